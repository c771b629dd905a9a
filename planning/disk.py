"""The directory of a plan store: one record per entry, read and written whole, believed only when everything agrees."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.devices import DeviceFacts
from ..runtime.environment import engine_environment
from ..runtime.files import header_path, read_header, read_record, write_atomic
from .signature import Signature

log = logging.getLogger("cudnn_graphs")

SUFFIX = ".plan"
FORMAT = 1


LISTED = {"key": str, "label": str, "engine": str, "device": dict, "signature": dict, "created": float, "build_seconds": float, "payload_bytes": int}
FAR_FUTURE = 1e11       # seconds: more than a calendar takes, and neither infinite nor NaN
DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError)      # all that reading a foreign file can raise


def entry_key(signature: Signature, engine: str, device: DeviceFacts) -> str:
    """The name of one entry: signature, engine and device identity. Versions are compared, not named, so an
    upgrade replaces an entry instead of leaving the old one behind."""
    text = json.dumps([signature.key, engine, device.identity()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@dataclass(frozen=True, slots=True)
class DiskEntry:
    """One entry as its header tells it. `signature` is None where this installation does not know its type."""

    key: str
    header: dict[str, Any]
    signature: Signature | None
    payload_bytes: int
    loads: int              # by every process so far
    last_used: float        # seconds since the epoch

    @property
    def engine(self) -> str:
        return self.header["engine"]

    @property
    def device(self) -> dict[str, Any]:
        return self.header["device"]


class PlanDirectory:
    """Reads never raise for what they find; a warning per damaged entry, once."""

    def __init__(self, root: Path, max_entries: int, max_bytes: int) -> None:
        self.root, self.max_entries, self.max_bytes = root, max_entries, max_bytes
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}    # key -> (mtime_ns, header)
        self.writable = True

    def path(self, key: str) -> Path:
        return self.root / f"{key}{SUFFIX}"

    def holds(self, key: str) -> bool:
        return os.path.exists(header_path(self.path(key)))      # False, where Path.exists raises, for a directory out of reach

    def keys(self) -> list[str]:
        try:
            return sorted(p.name[:-len(SUFFIX + ".json")] for p in self.root.glob(f"*{SUFFIX}.json"))
        except OSError:
            return []

    def read(self, key: str, engine: str, device: DeviceFacts, digest_now: Callable[[Signature], str]) -> tuple[Signature, dict[str, Any], bytes] | None:
        """An entry this environment may load, or None with one warning that says why not."""
        try:
            payload, header = read_record(self.path(key))
            signature = self._agreed(key, header, engine, device)
            now = digest_now(signature)
            if header["source_digest"] != now:
                raise ValueError("it was compiled from other kernel sources")
        except FileNotFoundError:
            return None
        except DAMAGE as error:
            self._warn(key, error)
            return None
        return signature, header, payload

    def _agreed(self, key: str, header: dict[str, Any], engine: str, device: DeviceFacts) -> Signature:
        _check_listable(key, header)
        if header["engine"] != engine:
            raise ValueError("it is another entry under this name")
        if header["device"] != device.identity():
            raise ValueError(f"it was built for {header['device']}")
        if header["environment"] != engine_environment(engine):
            raise ValueError(f"it was built with {header['environment']}, this is {engine_environment(engine)}")
        signature = Signature.from_json(header["signature"])
        if signature.key != header["signature_key"] or entry_key(signature, engine, device) != key:
            raise ValueError("its signature does not match its key")
        return signature

    def write(self, key: str, header: dict[str, Any], payload: bytes, keep: Collection[str] = ()) -> int:
        """Write an entry, then delete the least recently used beyond the bounds, never one of `keep`; how many that were."""
        if not self.writable:
            return 0
        self.writable = write_atomic(self.path(key), payload, {**header, "format": FORMAT})
        self._warned.discard(key)
        return self._shrink(keep) if self.writable else 0

    def entries(self) -> list[DiskEntry]:
        """Every entry whose header is sound."""
        found = []
        for key in self.keys():
            try:
                header = self._header(key)
                _check_listable(key, header)
                found.append(DiskEntry(key, header, _signature_or_none(header["signature"]), header["payload_bytes"], *self._use(key)))
            except FileNotFoundError:
                continue
            except DAMAGE as error:
                self._warn(key, error)
        return found

    def verify(self) -> list[tuple[str, str]]:
        """Reads every byte of every entry; (key, what is wrong) for each that is damaged."""
        damaged = []
        for key in self.keys():
            try:
                _, header = read_record(self.path(key))
                _check_listable(key, header)
            except DAMAGE as error:
                damaged.append((key, _reason(error)))
        return damaged

    def clear(self) -> list[str]:
        """Delete every entry. Returns the keys of those that are gone."""
        keys = self.keys()
        for key in keys:
            self.remove(key)
        left = set(self.keys())
        return [key for key in keys if key not in left]

    def remove(self, key: str) -> None:
        """Delete one entry, its header first, so that no reader finds half of it. Logs what could not be deleted."""
        for path in (header_path(self.path(key)), self.path(key), self._uses(key)):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot delete %s: %s", path, error)
        self._headers.pop(key, None)

    def _header(self, key: str) -> dict[str, Any]:
        stamp = header_path(self.path(key)).stat().st_mtime_ns
        known = self._headers.get(key)
        if known is None or known[0] != stamp:
            known = self._headers[key] = (stamp, read_header(self.path(key))["header"])
        return known[1]

    def _uses(self, key: str) -> Path:
        return self.root / f"{key}.uses"

    def count_use(self, key: str) -> None:
        """One byte a load: its size is the count and its time the last use, with no lock between processes."""
        try:
            with self._uses(key).open("ab") as file:
                file.write(b".")
        except OSError:
            pass        # a read-only directory serves plans all the same; it only cannot count them

    def _use(self, key: str) -> tuple[int, float]:
        try:
            status = self._uses(key).stat()
            return status.st_size, status.st_mtime
        except OSError:
            return 0, header_path(self.path(key)).stat().st_mtime

    def _shrink(self, keep: Collection[str]) -> int:
        """Delete what the bounds do not allow, least recently used first. Returns how many entries went."""
        with self._lock:
            self._sweep()
            entries = sorted(self.entries(), key=lambda e: e.last_used)
            count, total, removed = len(entries), sum(e.payload_bytes for e in entries), 0
            for entry in entries:
                if count <= self.max_entries and total <= self.max_bytes:
                    break
                if entry.key not in keep:
                    self.remove(entry.key)
                    count, total, removed = count - 1, total - entry.payload_bytes, removed + 1
            return removed

    def _sweep(self) -> None:
        """Delete what a killed process left an hour ago or more: temporary files, payloads and counts without a header."""
        with contextlib.suppress(OSError):      # the directory itself may go at any time
            headers = set(self.keys())
            for path in (*self.root.glob(".tmp-*"), *self.root.glob(f"*{SUFFIX}"), *self.root.glob("*.uses")):
                with contextlib.suppress(OSError):
                    if path.stem not in headers and time.time() - path.stat().st_mtime > 3600:
                        path.unlink()

    def _warn(self, key: str, error: Exception) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning("plan %s in %s is ignored and will be built anew: %s", key[:12], self.root, _reason(error))


def _check_listable(key: str, header: dict[str, Any]) -> None:
    """ValueError or KeyError unless it is this entry's header, with all that a list shows, of a kind that can be shown."""
    if header["format"] != FORMAT or header["key"] != key:
        raise ValueError("it is another entry under this name, or of another format")
    if any(not isinstance(header[n], kind) for n, kind in LISTED.items()) or not (
            isinstance(header["device"]["name"], str) and isinstance(header["signature"].get("type"), str)):
        raise ValueError("its header holds values of other types")
    if not (0 <= header["created"] < FAR_FUTURE and 0 <= header["build_seconds"] < FAR_FUTURE):
        raise ValueError("its times are none")


def _reason(error: Exception) -> str:
    return f"its header has no {error}" if isinstance(error, KeyError) else str(error)


def _signature_or_none(data: dict[str, Any]) -> Signature | None:
    try:
        return Signature.from_json(data)
    except ValueError:
        return None
