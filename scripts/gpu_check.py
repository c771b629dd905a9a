"""Prove the kernels on this machine's GPU: run the gpu-marked tests, compute-sanitizer and the benchmark, write tests/gpu_report.json.

    python scripts/gpu_check.py [tests] [sanitizer] [bench] [sharded] [soak [--soak-minutes 10] [--soak-shared]]      all but soak when none is named

`sharded` (scripts/bench_sharded.py) needs two GPUs, as some of the tests do, and is left out with fewer. `soak` (scripts/soak.py)
needs a GPU to itself, or --soak-shared.
Each section of the report holds the digests of the sources it was made from, so sections can be made in separate runs.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_sources import REPORT, ROOT, source_digests

Keep = Callable[[dict[str, Any]], None]       # write what a section has so far
TEST_PROCESSES = 4


def run_tests() -> dict[str, Any]:
    """In TEST_PROCESSES processes at once, which share the GPU."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--no-header", "-p", "no:cacheprovider", "-p", "gpu_recorder", str(ROOT / "tests")]
        path = os.pathsep.join(filter(None, [str(ROOT / "scripts"), os.environ.get("PYTHONPATH")]))
        said = [Path(directory) / f"{share}.json" for share in range(TEST_PROCESSES)]
        running = [subprocess.Popen(command, cwd=directory, env=os.environ | {
            "PYTHONPATH": path, "CUDNN_GRAPHS_TESTS_SHARE": f"{share}/{TEST_PROCESSES}", "CUDNN_GRAPHS_TESTS_OUT": str(out)})
            for share, out in enumerate(said)]
        codes = [process.wait() for process in running]
        tests = {name: row for out in said if out.exists() for name, row in json.loads(out.read_text()).items()}
    outcomes = [t["outcome"] for t in tests.values()]
    counts = {o: outcomes.count(o) for o in sorted(set(outcomes))}
    return {"exit_code": max(map(abs, codes)), "counts": counts, "tests": tests}


def run_sanitizer() -> dict[str, Any]:
    """compute-sanitizer memcheck over small shapes of every kernel, one script per operation, at once. Driver-probing API
    errors are not memory errors."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        return {"exit_code": 1, "note": "compute-sanitizer is not installed here"}
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9", sys.executable]
    running = {script.name: subprocess.Popen([*command, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                             start_new_session=True)
               for script in sorted(ROOT.glob("tests/*sanitizer_cases.py"))}
    scripts = {name: _finished(process) for name, process in running.items()}
    return {"exit_code": max(abs(s["exit_code"]) for s in scripts.values()), "scripts": scripts}


def _finished(process: subprocess.Popen[str], seconds: float = 120) -> dict[str, Any]:
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)      # the tool and the program under it, which holds the pipe
        output, _ = process.communicate()
    summary = [line for line in output.splitlines() if "ERROR SUMMARY" in line or line.startswith("ran ")]
    return {"exit_code": process.returncode, "summary": summary} | ({} if process.returncode == 0 else {"output": output[-1500:]})


def run_bench(keep: Keep) -> dict[str, Any]:
    """Without an exit code until it has ended: what `keep` wrote before is a part, and a report with it is not a proof."""
    import bench
    result = bench.main(["--host", *bench.WORKLOADS], kept=keep)
    failed = bench.failures(result)
    return result | {"exit_code": int(bool(failed)), "failed": failed}


def run_sharded() -> dict[str, Any]:
    return _run_script("bench_sharded.py", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_soak(minutes: float, shared: bool) -> dict[str, Any]:
    options = ("--minutes", str(minutes)) + (("--shared",) if shared else ())
    return _run_script("soak.py", options=options, seconds=60 * minutes + 120)


def _run_script(name: str, *runner: str, options: tuple[str, ...] = (), seconds: float = 120) -> dict[str, Any]:
    """What scripts/`name` writes to --json, and how it ended."""
    with tempfile.TemporaryDirectory() as directory:
        said = Path(directory) / "said.json"
        command = [sys.executable, *runner, str(ROOT / "scripts" / name), *options, "--json", str(said)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=directory, start_new_session=True)
        ended = _finished(process, seconds)
        return (json.loads(said.read_text() or "{}") if said.exists() else {}) | ended


def write_section(name: str, section: dict[str, Any]) -> None:
    """Into the report as it now is: another process may be writing another section. Whole or not at all."""
    folder = os.open(REPORT.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
        new = REPORT.with_suffix(".new")
        new.write_text(json.dumps(report | {name: section}, indent=1, sort_keys=True) + "\n")
        new.replace(REPORT)
    finally:
        os.close(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help="any of tests, sanitizer, bench, sharded, soak")
    parser.add_argument("--soak-minutes", type=float, default=10)
    parser.add_argument("--soak-shared", action="store_true", help="others use the GPU meanwhile")
    options = parser.parse_args()
    sections: dict[str, Callable[[Keep], dict[str, Any]]] = {
        "tests": lambda keep: run_tests(), "sanitizer": lambda keep: run_sanitizer(), "bench": run_bench, "sharded": lambda keep: run_sharded(),
        "soak": lambda keep: run_soak(options.soak_minutes, options.soak_shared)}
    wanted = options.sections or [name for name in sections if name != "soak"]
    if unknown := set(wanted) - set(sections):
        sys.exit(f"gpu_check: got {sorted(unknown)}; need any of {', '.join(sections)}; name none to run all but soak")
    if not torch.cuda.is_available():
        sys.exit("gpu_check: got no CUDA device; need one; run it on a machine with a GPU")
    from cudnn_graphs.runtime.environment import versions
    failed = False
    for name in wanted:
        if name == "sharded" and torch.cuda.device_count() < 2:
            print("gpu_check: sharded needs two GPUs and is left out; the report keeps what it has of it")
            continue
        section = {"device": torch.cuda.get_device_name(), "versions": versions(), "sources": source_digests(), "made": time.strftime("%Y-%m-%d %H:%M:%S")}

        def keep(part: dict[str, Any], name: str = name, section: dict[str, Any] = section) -> None:
            write_section(name, section | part)

        done = sections[name](keep)
        keep(done)
        failed |= done["exit_code"] != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
