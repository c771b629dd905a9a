"""Prove a store that was built ahead of time on the machine that will serve from it: open it, freeze it, run every signature once.

    python scripts/check_store.py SIGNATURES.json --store DIR [--device cuda] [--json]

SIGNATURES.json is what scripts/build_plans.py was given. Each runs on random tensors of its full capacities (a cache of more than
256 MB maps its pages onto that much; packed batches have at most 4096 tokens).

Exit status: 0 when every plan was loaded, none was built, no kernel compiled, and every result is finite; 1 otherwise, with what is
wrong; 2 when the input cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from synthetic_calls import outputs_of, synthetic_call

from cudnn_graphs import PlanStore
from cudnn_graphs.planning import Plan, Signature
from cudnn_graphs.runtime.devices import device_facts

CONSOLE = Console(stderr=True, highlight=False, soft_wrap=True)

Row = dict[str, Any]


def check_one(store: PlanStore, data: Row, device: str) -> Row:
    """One signature from load to result: what ran and how long each took, or what is wrong."""
    data = dict(data)
    engine = data.pop("engine", None)
    try:
        signature = Signature.from_json(data)
        start = time.perf_counter()
        plan = store.get(signature, device, engine)
        loaded = time.perf_counter()
        outputs = _run(plan, device)
        ran = time.perf_counter()
    except Exception as error:  # noqa: BLE001 - one plan must not end the others
        return {"label": json.dumps(data), "engine": engine, "error": f"{type(error).__name__}: {error}"}
    wrong = [name for name, value in outputs.items() if not _plausible(name, value)]
    row = {"label": signature.label, "engine": plan.engine, "kernels": [kernel["name"] for kernel in plan.describe()["compiled"]["kernels"]],
           "load_seconds": loaded - start, "first_run_seconds": ran - loaded}
    if plan.built_for != signature:
        wrong.append(f"served by {plan.built_for.label}")
    return row | {"error": f"wrong: {', '.join(wrong)}"} if wrong else row


def _plausible(name: str, value: torch.Tensor) -> bool:
    """Finite and not all zeros; an lse may be -inf, where a query sees nothing."""
    if name == "lse":
        return bool((value < float("inf")).all())
    return bool(value.isfinite().all()) and bool(value.any())


def _run(plan: Plan, device: str) -> dict[str, torch.Tensor]:
    """The results of one call, waited for."""
    outputs = outputs_of(plan, synthetic_call(plan.signature, device))
    if plan.device.kind == "cuda":
        torch.cuda.synchronize(plan.device.index)
    return outputs


def check_all(directory: Path, signatures: Iterable[Row], device: str) -> tuple[list[Row], Row]:
    """A row for each of `signatures`, and the store's counts."""
    store = PlanStore(directory)
    store.freeze()
    rows = [check_one(store, data, device) for data in track(list(signatures), description="running plans", console=CONSOLE)]
    stats = store.stats()
    return rows, {"loads": stats.loads, "builds": stats.builds, "misses": stats.misses, "compiles": store.cubins.compiles,
                  "load_seconds": stats.load_seconds}


def show(rows: list[Row], counts: Row) -> None:
    for row in rows:
        if "error" in row:
            CONSOLE.print(f"  failed  {row['engine'] or ''!s:9} {row['label']}: {row['error']}", markup=False)
        else:
            CONSOLE.print(f"{1e3 * row['load_seconds']:7.1f} ms  {row['engine']:9} {row['label']}", markup=False)
            CONSOLE.print(f"{'':12}{', '.join(row['kernels'])}", markup=False)
    failed = sum("error" in row for row in rows)
    CONSOLE.print(f"{len(rows) - failed} ran, {failed} failed; {counts['loads']} loads in {counts['load_seconds']:.2f} s, {counts['builds']} builds, "
                  f"{counts['misses']} misses, {counts['compiles']} compiles")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("signatures", type=Path, metavar="SIGNATURES.json")
    parser.add_argument("--store", type=Path, required=True, metavar="DIR")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--json", action="store_true", help="print a JSON object: the plans in the order of the signatures, and the store's counts")
    options = parser.parse_args()
    try:
        signatures = json.loads(options.signatures.read_text())
        if not isinstance(signatures, list) or not signatures or not all(isinstance(data, dict) for data in signatures):
            raise ValueError("JSON that is no list of objects, or an empty one")
        device_facts(options.device)
    except (OSError, ValueError, RuntimeError) as error:
        CONSOLE.print(f"check_store: got {error}; need what build_plans.py was given, and a device that is here", markup=False)
        return 2
    rows, counts = check_all(options.store, signatures, options.device)
    show(rows, counts)
    if options.json:
        print(json.dumps({"plans": rows, **counts}, indent=1))
    return int(any("error" in row for row in rows) or counts["builds"] > 0 or counts["compiles"] > 0)


if __name__ == "__main__":
    sys.exit(main())
