"""The plan store: every plan of this process in memory, in front of a directory that outlives it.

`get` looks up exactly, then for the smallest cached plan that fits, then builds, once per key however
many threads ask. `freeze` turns a miss into `PlanMissError`. Damaged, foreign or outdated entries of the
directory are misses, never errors and never a wrong plan.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..engines.base import Compiled
from ..errors import CaptureError, CudnnGraphsError, PlanMissError, problem
from ..runtime.cubins import CubinCache
from ..runtime.devices import DeviceFacts, device_facts
from ..runtime.environment import engine_environment, versions
from ..runtime.files import untrusted, unwritable
from ..runtime.streams import is_capturing
from .disk import DiskEntry, PlanDirectory, entry_key
from .engines import engine_named
from .miss_text import miss_text
from .plan import BuiltPlan, Plan
from .ranking import choose
from .signature import Signature

log = logging.getLogger("cudnn_graphs")


@dataclass(slots=True)
class StoreStats:
    """Counts since the store was opened, and the seconds spent in each."""

    hits: int = 0               # exact, in memory
    fits: int = 0               # served by a plan of larger capacities
    misses: int = 0             # neither in memory nor on disk
    builds: int = 0
    loads: int = 0              # from disk
    evictions: int = 0
    negative_hits: int = 0      # a refusal remembered
    build_seconds: float = 0.0
    load_seconds: float = 0.0

    def to_json(self) -> dict[str, float]:
        return asdict(self)


Slot = tuple[str, int | None]       # entry key and device index: two GPUs of one model share an entry, never what was loaded from it


@dataclass(slots=True)
class _Flight:
    """One key that is being looked for or built, and how many threads hold or await its turn."""

    turn: threading.Lock
    threads: int = 0


class PlanStore:
    """Plans in memory in front of `root`. None: memory only.

    max_entries, max_bytes: bounds on what is kept, in memory and on disk each; least recently used goes
    first, pinned plans never. trust: load code from a directory that others own or can write to.
    Thread-safe; any number of processes may share one directory.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, *, max_entries: int = 4096, max_bytes: int = 4 << 30, trust: bool = False) -> None:
        if isinstance(root, str) and not root:
            raise ValueError(problem("root", "an empty path", "a directory, or None for memory only", "see whether a variable is unset"))
        if not isinstance(max_entries, int) or not isinstance(max_bytes, int):
            raise TypeError(problem("max_entries, max_bytes", f"{max_entries!r}, {max_bytes!r}", "ints", "see the class's docstring"))
        if max_entries < 1:
            raise ValueError(problem("max_entries", max_entries, "at least 1", "the plan that is being served has to be kept"))
        self.root = None if root is None else Path(root).expanduser()
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self._disk = None if self.root is None else PlanDirectory(self.root, max_entries, max_bytes)
        self.cubins = CubinCache(None if self.root is None else _kernel_directory(self.root))
        self._trust = trust
        self._no_directory = "memory only"      # what there is where there is no directory
        self._lock = threading.RLock()
        self._built: OrderedDict[Slot, BuiltPlan] = OrderedDict()    # least recently used first
        self._pinned: set[str] = set()
        self._views: dict[tuple[Signature, DeviceFacts, str | None], tuple[Plan, Slot]] = {}
        self._refused: dict[tuple[str, DeviceFacts, str | None], str] = {}
        self._flights: dict[str, _Flight] = {}
        self._uses: dict[str, int] = {}
        self._stats = StoreStats()
        self._frozen = False
        self._probed = False
        self._check_trust()

    # -- lookup ---------------------------------------------------------------------------------------

    def get(self, signature: Signature, device: Any = None, engine: str | None = None) -> Plan:
        """The plan of `signature` on `device` (None: the current CUDA device, or the CPU).

        Exact in memory, exact on disk, the smallest cached plan that fits, else a single-flight build.
        Raises NotImplementedError when no engine serves it, PlanMissError when frozen, CaptureError when a
        build or load would happen during CUDA graph capture.
        """
        facts = device_facts(device)
        view = self._views.get((signature, facts, engine))
        if view is not None:
            plan, slot = view
            with self._lock:
                if slot in self._built:
                    self._built.move_to_end(slot)
                    self._count_use(slot[0])
                    self._stats.hits += plan.built_for is plan.signature
                    self._stats.fits += plan.built_for is not plan.signature
                    return plan
        return self._find(signature, facts, engine, exact=False)

    def build(self, signatures: Iterable[Signature], device: Any = None, *, engine: str | None = None, progress: bool = False, pin: bool = True) -> list[Plan]:
        """Plans for all `signatures`, each exactly, built where the store does not hold them. pin: never evict them."""
        if isinstance(signatures, Signature):
            raise TypeError(problem("signatures", type(signatures).__name__, "several, in a list", "call build([signature])"))
        facts, todo = device_facts(device), list(signatures)
        plans = []
        for signature in _track(todo, progress):
            plan = self._find(signature, facts, engine, exact=True)
            plans.append(plan)
            if pin:
                self._pin(entry_key(plan.built_for, plan.engine, facts))
        return plans

    def _pin(self, key: str) -> None:
        with self._lock:
            self._pinned.add(key)

    def _find(self, signature: Signature, device: DeviceFacts, engine: str | None, *, exact: bool) -> Plan:
        if not isinstance(signature, Signature):
            raise TypeError(problem("signature", type(signature).__name__, "a signature", "make one, for example PagedBlockSparseSignature(...)"))
        with self._refusals(signature, device, engine):
            picked, declined = choose(signature.lower(), device, engine)
            key = entry_key(signature, picked, device)
            with self._flight(key):
                built = self._in_memory((key, device.index)) or self._load(key, picked, device)
                if built is None and not exact:
                    built = self._fitting(key, signature, picked, device)
                if built is None:
                    built = self._build(key, signature, picked, declined, device)
        plan = Plan(built.signature if built.signature == signature else signature, built)
        with self._lock:
            while len(self._views) >= 4 * self.max_entries:
                del self._views[next(iter(self._views))]
            self._views[(signature, device, engine)] = (plan, (entry_key(built.signature, picked, device), device.index))
        return plan

    @contextlib.contextmanager
    def _refusals(self, signature: Signature, device: DeviceFacts, engine: str | None) -> Iterator[None]:
        """Remember why no engine serves, or could build, `signature`, and say it again without asking."""
        slot = (signature.key, device, engine)
        reason = self._refused.get(slot)        # once: another thread may forget it
        if reason is not None:
            with self._lock:
                self._stats.negative_hits += 1
            raise NotImplementedError(reason)
        try:
            yield
        except NotImplementedError as error:
            with self._lock:
                if len(self._refused) >= self.max_entries:
                    self._refused = {}
                self._refused[slot] = str(error)
            raise

    @contextlib.contextmanager
    def _flight(self, key: str) -> Iterator[None]:
        """One thread at a time looks for or builds `key`; the others find what it made."""
        with self._lock:
            flight = self._flights.setdefault(key, _Flight(threading.Lock()))
            flight.threads += 1
        try:
            with flight.turn:
                yield
        finally:
            with self._lock:
                flight.threads -= 1
                if not flight.threads:
                    del self._flights[key]

    def _count_use(self, key: str) -> None:
        self._uses[key] = self._uses.get(key, 0) + 1

    def _in_memory(self, slot: Slot) -> BuiltPlan | None:
        with self._lock:
            built = self._built.get(slot)
            if built is not None:
                self._built.move_to_end(slot)
                self._stats.hits += 1
                self._count_use(slot[0])
            return built

    def _fitting(self, exact: str, signature: Signature, engine: str, device: DeviceFacts) -> BuiltPlan | None:
        """The smallest cached plan of larger capacities, in memory or on disk; not `exact`, which was looked for already."""
        with self._lock:
            known = {k: b.signature for (k, _), b in self._built.items() if b.engine == engine and b.device == device}
        if self._disk is not None:
            for entry in self._disk.entries():
                if entry.engine == engine and entry.device == device.identity() and entry.signature is not None:
                    known.setdefault(entry.key, entry.signature)
        fitting = sorted((s.size(), k) for k, s in known.items() if k != exact and s.fits(signature))
        for _, key in fitting:
            built = self._built.get((key, device.index))
            if built is None:
                with self._flight(key):     # whoever waits here waits for a larger plan, so no two wait for each other
                    built = self._built.get((key, device.index)) or self._load(key, engine, device)
            if built is not None and built.signature.fits(signature):
                with self._lock:
                    self._stats.fits += 1
                    self._count_use(key)
                return built
        return None

    # -- making plans ---------------------------------------------------------------------------------

    def _read(self, key: str, engine: str, device: DeviceFacts) -> tuple[Signature, dict[str, Any], bytes] | None:
        """Signature, header and payload of the directory's entry `key`, or None where there is none that this environment may use."""
        if self._disk is None or not self._disk.holds(key):
            return None
        return self._disk.read(key, engine, device, lambda signature: engine_named(engine).source_digest(signature.lower(), device))

    def _load(self, key: str, engine: str, device: DeviceFacts) -> BuiltPlan | None:
        """The entry `key` from disk, or None where there is none that this environment may use."""
        disk = self._disk
        if disk is None or not disk.holds(key) or not self._check_trust():
            return None
        _refuse_capture(device, f"loading plan {key[:12]}")
        start = time.perf_counter()
        found = self._read(key, engine, device)
        if found is None:
            return None
        signature, header, payload = found
        try:
            compiled = Compiled(header["compiled"], Compiled.parts_of(payload))
            executable = engine_named(engine).load(signature.lower(), device, compiled)
        except Exception as error:  # noqa: BLE001 - whatever a loader says of a payload, the answer is to build anew
            log.warning("plan %s could not be loaded and is built anew: %s", key[:12], error)
            return None
        disk.count_use(key)
        seconds = time.perf_counter() - start
        built = BuiltPlan(signature, device, engine, executable, MappingProxyType({**header, "load_seconds": seconds}), len(payload), {}, threading.Lock())
        with self._lock:
            self._stats.loads += 1
            self._stats.load_seconds += seconds
            self._count_use(key)
        self._keep(key, built)
        return built

    def _build(self, key: str, signature: Signature, engine: str, declined: dict[str, str], device: DeviceFacts) -> BuiltPlan:
        with self._lock:
            self._stats.misses += 1
        if self._frozen:
            raise PlanMissError(miss_text(signature, engine, device, self._signatures(), self.root))
        _refuse_capture(device, f"building {signature.label}")
        start = time.perf_counter()
        compiled, header = self._compile(signature, engine, declined, device)
        executable = engine_named(engine).load(signature.lower(), device, compiled)
        header["build_seconds"] = time.perf_counter() - start
        log.info("built %s on %s in %.3f s; %s", signature.label, engine, header["build_seconds"], self.root or "memory only")
        payload = self._write(key, header, compiled)
        built = BuiltPlan(signature, device, engine, executable, MappingProxyType(header), payload, {}, threading.Lock())
        with self._lock:
            self._stats.builds += 1
            self._stats.build_seconds += header["build_seconds"]
            self._uses.setdefault(key, 0)
        self._keep(key, built)
        return built

    def _compile(self, signature: Signature, engine: str, declined: dict[str, str], device: DeviceFacts) -> tuple[Compiled, dict[str, Any]]:
        self._probe()
        descriptor = signature.lower()
        compiled = engine_named(engine).compile(descriptor, device, self.cubins)
        header = {
            "key": entry_key(signature, engine, device), "label": signature.label, "signature": signature.to_json(), "signature_key": signature.key,
            "descriptor": descriptor.to_json(), "engine": engine, "declined": declined, "device": device.identity(),
            "environment": engine_environment(engine), "versions": versions(), "source_digest": engine_named(engine).source_digest(descriptor, device),
            "compiled": compiled.facts, "created": time.time(),
        }
        return compiled, header

    def build_ahead(self, signature: Signature, device: DeviceFacts, engine: str | None = None) -> dict[str, Any]:
        """Compile for a device that need not be here, and write the entry. One that is there already, and sound, stays as it is:
        only a build counts in `stats().builds`. Returns the header.

        Raises NotImplementedError when no engine serves it, CudnnGraphsError without a directory of ours that can be written.
        """
        self._probe()
        self._need_directory()
        with self._refusals(signature, device, engine):
            picked, declined = choose(signature.lower(), device, engine)
            key = entry_key(signature, picked, device)
            with self._flight(key):
                present = self._read(key, picked, device)
                if present is not None:
                    return present[1]
                start = time.perf_counter()
                compiled, header = self._compile(signature, picked, declined, device)
                header["build_seconds"] = time.perf_counter() - start
                self._write(key, header, compiled)
                self._need_directory()
        with self._lock:
            self._stats.builds += 1
            self._stats.build_seconds += header["build_seconds"]
        return header

    def _need_directory(self) -> None:
        """CudnnGraphsError where an entry could not be, or was not, written."""
        if self._disk is None or not self._disk.writable:
            got = self._no_directory if self._disk is None else f"{self.root}, which cannot be written"
            raise CudnnGraphsError(problem("store", got, "a directory to build ahead of time", "open PlanStore(path) on one of your own"))

    def _check_trust(self) -> bool:
        """Whether the directory is ours alone; from the first time it is not, plans stay in memory. Asked before every load too,
        since the directory may have been made after the store was opened, by anyone."""
        root = self.root
        if root is None or self._trust:
            return root is not None
        why = untrusted(root) or untrusted(_kernel_directory(root))
        if why is not None:
            with self._lock:
                if self.root is not None:
                    log.warning("plan store %s is not used, plans stay in memory: a plan is code, and %s; or open it with trust=True", root, why)
                    self._no_directory = f"{root}, which is not used: {why}"
                self.root, self._disk, self.cubins.directory = None, None, None
        return why is None

    def _probe(self) -> None:
        """Before the first write: whether there can be one. A store that cannot be written says so once and keeps plans in memory."""
        with self._lock:
            if self._probed or not self._check_trust():
                return
            self._probed = True
            assert self.root is not None and self._disk is not None
            why = unwritable(self.root) or unwritable(_kernel_directory(self.root))
            if why is not None:
                log.warning("plan store %s cannot be written (%s): new plans stay in memory; make it writable or set CUDNN_GRAPHS_CACHE_DIR", self.root, why)
                self._disk.writable = self.cubins.writable = False

    def _write(self, key: str, header: dict[str, Any], compiled: Compiled) -> int:
        payload = compiled.payload()
        header["payload_bytes"] = len(payload)
        if self._disk is not None:
            removed = self._disk.write(key, header, payload, keep=self._pinned | {key})
            with self._lock:
                self._stats.evictions += removed
        return len(payload)

    def _keep(self, key: str, built: BuiltPlan) -> None:
        """Put a plan in memory, push out the least recently used beyond the bounds, and drop the views that are no longer right:
        those of a plan pushed out, which they would keep alive, and those that the new plan may serve better."""
        with self._lock:
            slot = (key, built.device.index)
            self._built[slot] = built
            self._built.move_to_end(slot)
            if not is_capturing():
                self._push_out(slot)
            self._views = {s: v for s, v in self._views.items() if v[1] in self._built and not built.signature.fits(s[0])}

    def _push_out(self, kept: Slot) -> None:
        total = sum(b.payload_bytes for b in self._built.values())
        for old in [slot for slot in self._built if slot[0] not in self._pinned and slot != kept]:
            if len(self._built) <= self.max_entries and total <= self.max_bytes:
                break
            total -= self._built.pop(old).payload_bytes
            self._uses.pop(old[0], None)
            self._stats.evictions += 1

    # -- state ----------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """From here on a miss raises PlanMissError instead of building."""
        self._frozen = True

    def thaw(self) -> None:
        """Build on a miss again."""
        self._frozen = False

    @property
    def frozen(self) -> bool:
        return self._frozen

    def stats(self) -> StoreStats:
        """A snapshot of the counts."""
        with self._lock:
            return StoreStats(**asdict(self._stats))

    def entries(self) -> list[dict[str, Any]]:
        """Headers of every plan here and on disk, other devices' included, newest first, each with `where` and `hits`."""
        with self._lock:
            rows = {key: {**built.header, "key": key, "where": "memory", "hits": self._uses.get(key, 0), "pinned": key in self._pinned}
                    for (key, _), built in self._built.items()}
        if self._disk is not None:
            for entry in self._disk.entries():
                known = rows.get(entry.key)
                if known is not None:
                    known["where"] = "memory, disk"
                else:
                    rows[entry.key] = {**entry.header, "key": entry.key, "where": "disk", "hits": entry.loads, "pinned": False}
        return copy.deepcopy(sorted(rows.values(), key=lambda r: -r["created"]))

    def verify(self) -> list[tuple[str, str]]:
        """Every damaged entry of the directory as (key, what is wrong)."""
        return [] if self._disk is None else self._disk.verify()

    def clear(self) -> int:
        """Forget every plan and delete the directory's entries; how many there were. Plans in use keep working."""
        _refuse_capture(None, "clearing the store")
        with self._lock:
            keys = {key for key, _ in self._built}
            self._built.clear()
            self._views.clear()
            self._refused.clear()
            self._pinned.clear()
            self._uses.clear()
        if self._disk is not None:
            keys |= set(self._disk.clear())
        return len(keys)

    def _signatures(self) -> list[Signature]:
        with self._lock:
            known = {b.signature for b in self._built.values()}
        if self._disk is not None:
            known |= {e.signature for e in self._disk.entries() if e.signature is not None}
        return list(known)


def _refuse_capture(device: DeviceFacts | None, what: str) -> None:
    if is_capturing(device):
        raise CaptureError(f"CUDA graph capture: got {what}; need every plan built and loaded before capture begins; call store.build(...) at startup")


def _kernel_directory(root: Path) -> Path:
    return root.parent / "kernels" if root.name == "plans" else root / "kernels"


def _track(signatures: list[Signature], progress: bool) -> Iterable[Signature]:
    if not progress:
        return signatures
    from rich.progress import track
    return track(signatures, description="building plans")


__all__ = ["DiskEntry", "PlanStore", "StoreStats", "entry_key"]
