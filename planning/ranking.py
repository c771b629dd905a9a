"""Which engine is picked when none is named: a fixed table, so that the same call always picks the same one.

The order of a measured device comes from runs of `scripts/bench.py` on it; every other device takes
`UNMEASURED`. Nothing is ever timed at run time.
"""

from __future__ import annotations

from ..descriptor import SparseBlockDescriptor
from ..runtime.devices import DeviceFacts
from .support import ENGINES, Verdict, verdict

UNMEASURED = ("sm90", "portable", "cudnn")

HOPPER = (9, 0)
READ_BOUND, FEW_ROWS, REUSE = "read-bound", "read-bound, few rows", "reuse"

MEASURED: dict[tuple[str, tuple[int, int], str], tuple[str, ...]] = {
    # H200 (the README's table): reading K and V once, the small-tile kernel of `portable` keeps more loads in flight (P5, P6), until
    # there are too few rows for the SMs, which a cluster of `sm90` shares without a second launch: called eagerly it is the faster at
    # P7, though replayed in a graph the slower by 2%. Wherever rows share K and V, the tensor cores decide (P1 to P4, Q1 to Q4, S1 to S3).
    ("csr/paged", HOPPER, READ_BOUND): ("portable", "sm90", "cudnn"),
    ("csr/paged", HOPPER, FEW_ROWS): ("sm90", "portable", "cudnn"),
    ("csr/paged", HOPPER, REUSE): ("sm90", "cudnn", "portable"),
    **{(kind, HOPPER, REUSE): ("sm90", "portable") for kind in ("padded/strided", "bitmap/packed", "token_ids/packed")},
    # Not measured here: cuDNN Frontend has kernels of its own for exactly these parts.
    **{(kind, capability, REUSE): ("cudnn", "portable") for kind in ("bitmap/packed", "token_ids/packed") for capability in ((10, 0), (10, 3), (10, 7))},
}


def workload_class(descriptor: SparseBlockDescriptor, device: DeviceFacts) -> str:
    """Read-bound: one short row for each (request, KV head), so that every listed byte is read once for few query rows. Few rows: no two for an SM."""
    short = descriptor.row == "q_block" and descriptor.memory == "paged" and descriptor.rows_per_head == 1 and descriptor.packed_rows <= 64
    if not short:
        return REUSE
    return FEW_ROWS if 2 * descriptor.batch_size * descriptor.num_kv_heads <= device.sm_count else READ_BOUND


def order(descriptor: SparseBlockDescriptor, device: DeviceFacts) -> tuple[str, ...]:
    """Engines to try, best first. `reference` only ever on the CPU."""
    if device.kind == "cpu":
        return ("reference",)
    return MEASURED.get((descriptor.kind, device.capability, workload_class(descriptor, device)), UNMEASURED)


def choose(descriptor: SparseBlockDescriptor, device: DeviceFacts, engine: str | None = None) -> tuple[str, dict[str, str]]:
    """The engine that serves `descriptor` on `device`, and why each other engine does not.

    Raises ValueError for an unknown engine name; NotImplementedError, with every engine's reason, when none serves.
    """
    if engine is not None and engine not in ENGINES:
        raise ValueError(f"engine: got {engine!r}; need one of {', '.join(ENGINES)} or None; leave it out to pick by the ranking table")
    candidates = order(descriptor, device) if engine is None else (engine,)
    verdicts: dict[str, Verdict] = {name: verdict(name, descriptor, device) for name in ENGINES}
    picked = next((name for name in candidates if verdicts[name].ok), None)
    if picked is None:
        asked = "no engine" if engine is None else f"engine {engine!r} does not serve this"
        reasons = "; ".join(f"{name}: {verdicts[name].reason or 'not picked on this device unless named'}" for name in ENGINES)
        raise NotImplementedError(f"{asked}: got {descriptor.kind} on {device.name}; need an engine that serves it; {reasons}")
    return picked, {name: _why_not(name, picked, engine, verdicts[name]) for name in ENGINES if name != picked}


def _why_not(name: str, picked: str, forced: str | None, said: Verdict) -> str:
    if not said.ok:
        return said.reason
    if forced is not None:
        return f"serves it; {picked} was named"
    if name == "reference":
        return "serves it; never picked on a GPU unless named"
    return f"serves it; {picked} ranks first"
