"""Bring the README's support matrix and benchmark table into step with planning.support and tests/gpu_report.json.

    python scripts/update_readme.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bench_report

import cudnn_graphs.ops  # noqa: F401 - the package as installed, with every signature type
from cudnn_graphs.planning.support import ENGINES, REQUIREMENTS

README = Path(__file__).resolve().parents[1] / "README.md"
MATRIX = ("<!-- support matrix: written by scripts/update_readme.py -->", "<!-- end of the support matrix -->")
BENCHMARK = ("<!-- benchmark: written by scripts/update_readme.py -->", "<!-- end of the benchmark -->")


def support_matrix() -> str:
    """A Markdown table: what each engine needs to serve each kind of descriptor."""
    lines = ["| descriptor | engine | needs |", "| --- | --- | --- |"]
    for kind in dict.fromkeys(r.kind for r in REQUIREMENTS):
        for engine in ENGINES:
            needs = [r.need for r in REQUIREMENTS if r.engine == engine and r.kind == kind]
            if needs:
                lines.append(f"| `{kind}` | `{engine}` | {'; '.join(needs)} |")
    return "\n".join(lines)


def benchmark() -> str:
    """The figures of the report's benchmark, as a Markdown table."""
    result = json.loads(bench_report.REPORT.read_text()).get("bench")
    if result is None:
        return "The benchmark of these sources is still to be run (`tests/gpu_pending.txt`)."
    return f"Made {result['made']} on one {result['device']}.\n\n{bench_report.markdown(result)}"


def updated(text: str) -> str:
    """The README's text with the tables of now."""
    for (begin, end), table in ((MATRIX, support_matrix()), (BENCHMARK, benchmark())):
        head, rest = text.split(begin)
        _, tail = rest.split(end)
        text = f"{head}{begin}\n{table}\n{end}{tail}"
    return text


def main(arguments: list[str]) -> int:
    text = README.read_text()
    if arguments == ["--check"]:
        if updated(text) != text:
            print("README.md: a table is out of step; run python scripts/update_readme.py", file=sys.stderr)
            return 1
        return 0
    README.write_text(updated(text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
