"""Host cost of a planned call: microseconds that `run()` adds over its raw launches, plan lookup and load, allocations. Needs a GPU.

    python scripts/bench_host.py [--json FILE]

Calls are small, and five of them follow a synchronize, so the host never waits for the GPU; the ways to call take turns, so that
all see the same machine. Microseconds are medians over single calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from synthetic_calls import outputs_of, synthetic_call

from cudnn_graphs import PagedBlockSparseSignature, PlanStore, QuerySparseSignature, SageBlockSparseSignature
from cudnn_graphs.planning import ENGINES, Plan, Signature

ROUNDS, CALLS = 200, 4          # of each way to call: synchronize, one call to warm up, CALLS that are timed

SIGNATURES: dict[str, Signature] = {
    "paged, P7": PagedBlockSparseSignature(8, 1, 32768, 64, 8, 128, 1, 64, 64, max_blocks_per_row=64),
    "Sage, 1024 x 4 heads": SageBlockSparseSignature(1, 4, 1024, 1024, 8, has_counts=True),
    "QSA, 512 tokens": QuerySparseSignature(12, 1, "bitmap", 512),
    "QSA indexed, 512": QuerySparseSignature(12, 1, "indices", 512),
}


def host_costs() -> list[dict[str, Any]]:
    """A row for each operation and engine that serves it."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for operation, signature in SIGNATURES.items():
            for engine in (e for e in ENGINES if e != "reference"):
                try:
                    plan = PlanStore(Path(directory) / "plans").get(signature, "cuda", engine)
                except NotImplementedError:
                    continue
                rows.append({"operation": operation, "engine": engine} | _costs(plan, Path(directory) / "plans"))
    return rows


def _costs(plan: Plan, directory: Path) -> dict[str, Any]:
    signature = plan.signature
    call = synthetic_call(signature, "cuda")
    args, keywords = call[0], {**call[1], **outputs_of(plan, call)}
    bound = signature.bind(plan.device, *args, **keywords)
    workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
    stream, executable = torch.cuda.current_stream().cuda_stream, plan._built.executable
    fresh = PlanStore(directory)
    start = time.perf_counter()
    fresh.get(signature, "cuda", plan.engine)
    load_ms = 1e3 * (time.perf_counter() - start)
    us = medians({"run_us": lambda: plan.run(*args, **keywords), "unvalidated_us": lambda: plan.run(*args, validate=False, **keywords),
                  "launches_us": lambda: executable.launch(bound, workspace.data_ptr(), stream),
                  "lookup_us": lambda: fresh.get(signature, "cuda", plan.engine)})
    before = _allocations()
    for _ in range(100):
        plan.run(*args, **keywords)
    return us | {"adds_us": us["run_us"] - us["launches_us"], "load_ms": load_ms, "loads": fresh.stats().loads, "builds": fresh.stats().builds,
                 "allocations": _allocations() - before}


def _allocations() -> int:
    return torch.cuda.memory_stats()["allocation.all.allocated"]


def medians(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Host microseconds of one call, each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, call in ways.items():
            torch.cuda.synchronize()
            call()
            for _ in range(CALLS):
                start = time.perf_counter()
                call()
                times[name].append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in times.items()}


COLUMNS = {"run_us": "run() us", "unvalidated_us": "unvalidated", "launches_us": "launches", "adds_us": "adds", "lookup_us": "lookup us", "load_ms": "load ms"}


def host_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="host", title_justify="left")
    for column in ("operation", "engine", *COLUMNS.values(), "allocations"):
        table.add_column(column, justify="left" if column in ("operation", "engine") else "right")
    for row in rows:
        table.add_row(row["operation"], row["engine"], *(f"{row[name]:.1f}" for name in COLUMNS), str(row["allocations"]))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_host: got no CUDA device; need one; run it on a machine with a GPU")
    rows = host_costs()
    Console(width=110).print(host_table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
