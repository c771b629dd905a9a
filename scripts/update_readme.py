"""Bring the README's support matrix and measured tables into step with planning.support and tests/gpu_report.json.

    python scripts/update_readme.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import bench_report
from gpu_sources import TWO_GPUS, is_current

import cudnn_graphs.ops  # noqa: F401 - the package as installed, with every signature type
from cudnn_graphs.planning.support import ENGINES, REQUIREMENTS

README = Path(__file__).resolve().parents[1] / "README.md"
UNPROVEN = "Of these sources it is still to be run (`tests/gpu_pending.txt`)."


def support_matrix() -> str:
    """A Markdown table: what each engine needs to serve each kind of descriptor."""
    lines = ["| descriptor | engine | needs |", "| --- | --- | --- |"]
    for kind in dict.fromkeys(r.kind for r in REQUIREMENTS):
        for engine in ENGINES:
            needs = [r.need for r in REQUIREMENTS if r.engine == engine and r.kind == kind]
            if needs:
                lines.append(f"| `{kind}` | `{engine}` | {'; '.join(needs)} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """What the README holds between `<!-- NAME: written by ... -->` and `<!-- end of the NAME -->`."""
    report = json.loads(bench_report.REPORT.read_text())
    bench, sharded, tests = report.get("bench"), report.get("sharded"), report["tests"]["tests"]
    left_out = sum(TWO_GPUS in test.get("reason", "") for test in tests.values())
    return {"support matrix": support_matrix(),
            "host cost": UNPROVEN if bench is None or "host" not in bench else bench_report.host_markdown(bench["host"]),
            "split cache": UNPROVEN if sharded is None or sharded["exit_code"] else _two_gpus(sharded, left_out),
            "benchmark": UNPROVEN if bench is None else f"Made {bench['made']} on one {bench['device']}.\n\n{bench_report.markdown(bench)}"}


def _two_gpus(sharded: dict[str, Any], left_out: int) -> str:
    """Two GPUs are not always at hand: what they ran may be older than what one ran, and says so."""
    made = f"Made {sharded['made']} on two {sharded['device']}" + ("." if is_current(sharded) else ", **from older sources than those here**.")
    tests = f" The GPU tests were last run where there was one GPU: {left_out} that need two were left out." if left_out else ""
    return f"{made}{tests}\n\n{bench_report.sharded_markdown(sharded)}"


def updated(text: str) -> str:
    """The README's text with the tables of now."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: written by scripts/update_readme.py -->", f"<!-- end of the {name} -->"
        head, rest = text.split(begin)
        _, tail = rest.split(end)
        text = f"{head}{begin}\n{table}\n{end}{tail}"
    return text


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a table is out of step, and write nothing")
    check, text = parser.parse_args(arguments).check, README.read_text()
    if check:
        if updated(text) != text:
            print("README.md: a table is out of step; run python scripts/update_readme.py", file=sys.stderr)
            return 1
        return 0
    README.write_text(updated(text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
