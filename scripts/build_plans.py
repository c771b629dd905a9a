"""Build plans ahead of time, for a GPU that need not be here: in worker processes, with a progress bar.

    python scripts/build_plans.py SIGNATURES.json --device-props H200.json --store DIR [--engine NAME] [--workers N] [--json]

SIGNATURES.json ("-": standard input) is a list of signatures as `Signature.to_json` writes them; an extra key "engine" names an
engine for one of them. H200.json comes from `python -m cudnn_graphs device-props` on the GPU machine, with the cuDNN version that
will load the plans; without --device-props the plans are built for --device, which is here. Without a driver here, cuDNN plans are
built against a stand-in for it (driver_stub.py), visible to the workers alone. What the store holds already, sound and of the
sources and versions of now, is left as it is.

Exit status: 0 when every plan is there, 1 when any failed, 2 when the input cannot be read.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from driver_stub import compile_stub
from rich.console import Console
from rich.progress import Progress

CONSOLE = Console(stderr=True, highlight=False, soft_wrap=True)
DEAD = "the process that built it died; run it alone with --workers 1 to see why"

Row = dict[str, Any]


class Warnings(logging.Handler):
    """The library's warnings while it is entered, as texts."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("cudnn_graphs").addHandler(self)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logging.getLogger("cudnn_graphs").removeHandler(self)


@dataclass(frozen=True)
class Target:
    """Where plans go, and what for. properties: an absent device's, instead of `device`."""

    store: str
    device: str
    properties: str | None
    engine: str | None


def build_one(target: Target, data: Row) -> Row:
    """In a worker: one plan into the store. What it took and holds, or why it failed."""
    import cudnn_graphs.ops  # noqa: F401 - registers every signature type
    from cudnn_graphs.planning import PlanStore, Signature
    from cudnn_graphs.runtime.devices import device_facts, facts_from_properties
    data = dict(data)
    engine = data.pop("engine", target.engine)
    with Warnings() as warnings:
        try:
            facts = device_facts(target.device) if target.properties is None else facts_from_properties(target.properties)
            store = PlanStore(target.store)
            header = store.build_ahead(Signature.from_json(data), facts, engine)
        except Exception as error:  # noqa: BLE001 - one plan must not end the others
            return failure(data, engine, f"{type(error).__name__}: {error}") | {"warnings": warnings}
    return {"label": header["label"], "engine": header["engine"], "key": header["key"], "built": store.stats().builds > 0, "seconds": header["build_seconds"],
            "payload_bytes": header["payload_bytes"], "kernels": [kernel["name"] for kernel in header["compiled"]["kernels"]], "warnings": warnings}


def failure(data: Row, engine: str | None, error: str) -> Row:
    return {"label": json.dumps(data), "engine": engine, "error": error}


def in_workers(function: Callable[[Any], Any], items: list[Any], workers: int) -> Iterator[tuple[int, Any]]:
    """(index, result) of each item as it is done. None for one whose process died, which is then the only one lost: a pool is lost
    whole, so what it had not done is done again, each in a pool of its own."""
    lost = []
    for index, result in _one_pool(function, dict(enumerate(items)), workers):
        if result is None:
            lost.append(index)
        else:
            yield index, result
    for index in lost:
        yield from _one_pool(function, {index: items[index]}, 1)


def _one_pool(function: Callable[[Any], Any], items: dict[int, Any], workers: int) -> Iterator[tuple[int, Any]]:
    if not items:
        return
    with ProcessPoolExecutor(min(workers, len(items)), mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {}
        for index, item in items.items():
            try:
                jobs[pool.submit(function, item)] = index
            except BrokenProcessPool:
                yield index, None
        for job in as_completed(jobs):
            yield jobs[job], None if isinstance(job.exception(), BrokenProcessPool) else job.result()


def build_all(target: Target, signatures: list[Row], workers: int) -> list[Row]:
    """A row for each of `signatures`, in their order."""
    rows: list[Row] = [{}] * len(signatures)
    with Progress(console=CONSOLE) as progress:
        task = progress.add_task("building plans", total=len(signatures))
        for index, row in in_workers(partial(build_one, target), signatures, workers):
            rows[index] = row or failure(signatures[index], target.engine, DEAD)
            progress.advance(task)
    return rows


def driver_is_here() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def stand_in_for_driver(directory: str) -> None:
    """Compile the stub and put it on the library path of every process started from here on."""
    try:
        compile_stub(Path(directory))
    except FileNotFoundError as error:
        CONSOLE.print(f"{error}, or plans that ask cuDNN fail", markup=False)
        return
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [directory, os.environ.get("LD_LIBRARY_PATH")]))


def show(rows: list[Row], seconds: float) -> None:
    for row in rows:
        if "error" in row:
            CONSOLE.print(f"  failed  {row['label']}: {row['error']}", markup=False)
        else:
            taken = f"{row['seconds']:6.2f} s" if row["built"] else "   there"
            CONSOLE.print(f"{taken}  {row['engine']:9} {row['label']}", markup=False)
            CONSOLE.print(f"{row['payload_bytes'] / 1e3:5.0f} kB  {', '.join(row['kernels']) or 'no kernels'}", markup=False)
        for warning in row.get("warnings", ()):
            CONSOLE.print(f" warning  {warning}", markup=False)
    failed, built = sum("error" in row for row in rows), sum(row.get("built", False) for row in rows)
    CONSOLE.print(f"{built} built, {len(rows) - failed - built} there already, {failed} failed, in {seconds:.1f} s")


def read_input(options: argparse.Namespace) -> tuple[list[Row], str | None]:
    """The signatures and the device's properties, if any. OSError or ValueError for what cannot be read."""
    signatures = json.loads(sys.stdin.read() if options.signatures == "-" else Path(options.signatures).read_text())
    if not isinstance(signatures, list) or not all(isinstance(data, dict) for data in signatures):
        raise ValueError("JSON that is no list of objects")
    if options.device_props is None:
        return signatures, None
    properties = options.device_props.read_text()
    if not isinstance(data := json.loads(properties), dict) or "deviceVer" not in data:
        raise ValueError("device properties without deviceVer")
    return signatures, properties


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("signatures", metavar="SIGNATURES.json")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--device-props", type=Path, metavar="FILE", help="the properties of a GPU that need not be here")
    where.add_argument("--device", default="cuda", help="a device that is here: cuda:1, cpu; default: cuda")
    parser.add_argument("--store", required=True, metavar="DIR")
    parser.add_argument("--engine", help="for signatures that name none; default: what the ranking table picks")
    parser.add_argument("--workers", type=int, metavar="N", default=len(os.sched_getaffinity(0)), help="processes; default: one a core")
    parser.add_argument("--json", action="store_true", help="print a JSON list of what is there now, in the order of the signatures")
    options = parser.parse_args()
    try:
        signatures, properties = read_input(options)
    except (OSError, ValueError, RecursionError) as error:
        CONSOLE.print(f"build_plans: got {error}; need a JSON list of signatures; properties come from `python -m cudnn_graphs device-props`",
                      markup=False)
        return 2
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as stub:
        if not driver_is_here():
            stand_in_for_driver(stub)
        rows = build_all(Target(options.store, options.device, properties, options.engine), signatures, max(1, options.workers))
    show(rows, time.perf_counter() - start)
    if options.json:
        print(json.dumps(rows, indent=1))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
