"""Bring the README's support matrix into step with planning.support.REQUIREMENTS: python scripts/update_readme.py [--check]"""

from __future__ import annotations

import sys
from pathlib import Path

import cudnn_graphs.ops  # noqa: F401 - the package as installed, with every signature type
from cudnn_graphs.planning.support import ENGINES, REQUIREMENTS

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- support matrix: written by scripts/update_readme.py -->", "<!-- end of the support matrix -->"


def support_matrix() -> str:
    """A Markdown table: what each engine needs to serve each kind of descriptor."""
    lines = ["| descriptor | engine | needs |", "| --- | --- | --- |"]
    for kind in dict.fromkeys(r.kind for r in REQUIREMENTS):
        for engine in ENGINES:
            needs = [r.need for r in REQUIREMENTS if r.engine == engine and r.kind == kind]
            if needs:
                lines.append(f"| `{kind}` | `{engine}` | {'; '.join(needs)} |")
    return "\n".join(lines)


def updated(text: str) -> str:
    """The README's text with the matrix of now."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{support_matrix()}\n{END}{tail}"


def main(arguments: list[str]) -> int:
    text = README.read_text()
    if arguments == ["--check"]:
        if updated(text) != text:
            print("README.md: the support matrix is out of step; run python scripts/update_readme.py", file=sys.stderr)
            return 1
        return 0
    README.write_text(updated(text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
