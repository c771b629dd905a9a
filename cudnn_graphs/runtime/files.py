"""Files that other processes may be reading: written whole or not at all, believed only with their checksum.

A record is two files: NAME (the bytes) and NAME.json (a header that holds the bytes' sha256). The header
is written last, so it is the commit mark; whatever does not agree with it is a miss.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

log = logging.getLogger("cudnn_graphs")


def header_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _replace(path: Path, data: bytes) -> None:
    fd, temporary = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_atomic(path: Path, data: bytes, header: dict[str, Any]) -> bool:
    """Write a record. False, with a warning, where the directory cannot be written."""
    body = {"header": header, "payload_bytes": len(data), "payload_sha256": hashlib.sha256(data).hexdigest()}
    text = json.dumps(body, sort_keys=True)
    record = {"record": body, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _replace(path, data)
        _replace(header_path(path), json.dumps(record, sort_keys=True, indent=1).encode())
    except OSError as error:
        log.warning("cannot write %s (%s); kept in memory only; make the directory writable or set CUDNN_GRAPHS_CACHE_DIR", path, error)
        return False
    return True


def read_header(path: Path) -> dict[str, Any]:
    """The header of a record, its own checksum verified. Raises ValueError or OSError."""
    record = json.loads(header_path(path).read_bytes())
    text = json.dumps(record["record"], sort_keys=True)
    if hashlib.sha256(text.encode()).hexdigest() != record["sha256"]:
        raise ValueError("the header's checksum does not match")
    return record["record"]


def read_record(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A record's bytes and header, both verified. Raises ValueError or OSError."""
    body = read_header(path)
    data = path.read_bytes()
    if len(data) != body["payload_bytes"]:
        raise ValueError(f"the payload has {len(data)} bytes, its header says {body['payload_bytes']}")
    if hashlib.sha256(data).hexdigest() != body["payload_sha256"]:
        raise ValueError("the payload's checksum does not match")
    return data, body["header"]


def read_checked(path: Path) -> tuple[bytes, dict[str, Any]] | None:
    """A record, or None where there is none; a damaged one is None with one logged warning."""
    try:
        return read_record(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("ignored a damaged cache entry %s: %s", path, error)
        return None


def unwritable(directory: Path) -> str | None:
    """Why nothing can be written to a directory, or None. Makes it where it is missing."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd, probe = tempfile.mkstemp(prefix=".tmp-", dir=directory)
        os.close(fd)
        os.unlink(probe)
    except OSError as error:
        return str(error)
    return None


def untrusted(directory: Path) -> str | None:
    """Why code must not be loaded from a directory, or None. Another user's, or one others can write to, could plant it."""
    try:
        status = directory.stat()
    except OSError:         # missing or out of reach: there is nothing in it to load
        return None
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}; run `chown {os.geteuid()} {directory}` or name another directory"
    if stat.S_IMODE(status.st_mode) & 0o022:
        return f"others can write to it; run `chmod go-w {directory}`"
    return None
