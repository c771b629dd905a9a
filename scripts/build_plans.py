"""Build plans ahead of time, for a GPU that need not be here: in worker processes, with a progress bar.

    python scripts/build_plans.py SIGNATURES.json --device-props H200.json --store DIR [--engine NAME] [--workers N]

SIGNATURES.json ("-": standard input) is a list of signatures as `Signature.to_json` writes them; an extra key "engine" names an
engine for one of them. H200.json comes from `python -m cudnn_graphs device-props` on the GPU machine, with the cuDNN version that
will load the plans; without --device-props the plans are built for this machine's own GPU. Without a driver here, cuDNN plans are
built against a stand-in for it (driver_stub.py), visible to the workers alone.

Exit status: 0 when every plan was built, 1 when any failed, 2 when the input cannot be read.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from driver_stub import compile_stub
from rich.console import Console
from rich.progress import Progress

CONSOLE = Console(stderr=True)


def build_one(data: dict[str, Any], properties: str | None, engine: str | None, store: str) -> dict[str, Any]:
    """In a worker: one plan into the store. Returns what it took, or why it failed."""
    import cudnn_graphs.ops  # noqa: F401 - registers every signature type
    from cudnn_graphs.planning import PlanStore, Signature
    from cudnn_graphs.runtime.devices import device_facts, facts_from_properties
    data = dict(data)
    engine = data.pop("engine", engine)
    row = {"label": json.dumps(data)[:80], "engine": engine}
    try:
        signature = Signature.from_json(data)
        facts = device_facts("cuda") if properties is None else facts_from_properties(properties)
        header = PlanStore(store).build_ahead(signature, facts, engine)
    except Exception as error:  # noqa: BLE001 - one plan must not end the others
        return row | {"error": f"{type(error).__name__}: {error}"}
    return {"label": header["label"], "engine": header["engine"], "key": header["key"], "seconds": header["build_seconds"],
            "payload_bytes": header["payload_bytes"], "kernels": [k["name"] for k in header["compiled"]["kernels"]]}


def build_all(signatures: list[dict[str, Any]], properties: str | None, engine: str | None, store: str, workers: int) -> list[dict[str, Any]]:
    """All plans, in the order of `signatures`."""
    rows: list[dict[str, Any]] = [{}] * len(signatures)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool, Progress(console=CONSOLE) as progress:
        task = progress.add_task("building plans", total=len(signatures))
        jobs = {pool.submit(build_one, data, properties, engine, store): i for i, data in enumerate(signatures)}
        for job in as_completed(jobs):
            rows[jobs[job]] = job.result()
            progress.advance(task)
    return rows


def driver_is_here() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def show(rows: list[dict[str, Any]], seconds: float) -> None:
    for row in rows:
        if "error" in row:
            CONSOLE.print(f"failed  {row['label']}: {row['error']}", markup=False)
        else:
            CONSOLE.print(f"{row['seconds']:6.2f} s  {row['engine']:9} {row['label']}", markup=False)
    failed = sum("error" in row for row in rows)
    CONSOLE.print(f"{len(rows) - failed} plans in {seconds:.1f} s, {failed} failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("signatures")
    parser.add_argument("--device-props", type=Path)
    parser.add_argument("--store", required=True)
    parser.add_argument("--engine")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="print one JSON list of what was built")
    options = parser.parse_args()
    try:
        signatures = json.loads(sys.stdin.read() if options.signatures == "-" else Path(options.signatures).read_text())
        properties = None if options.device_props is None else options.device_props.read_text()
    except (OSError, ValueError) as error:
        CONSOLE.print(f"build_plans: got {error}; need a JSON list of signatures and a device-properties file", markup=False)
        return 2
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as stub:
        if not driver_is_here():
            compile_stub(Path(stub))
            os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [stub, os.environ.get("LD_LIBRARY_PATH")]))     # workers start with it
        rows = build_all(signatures, properties, options.engine, options.store, options.workers)
    show(rows, time.perf_counter() - start)
    if options.json:
        print(json.dumps(rows, indent=1))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
