"""The digests that tie tests/gpu_report.json to the sources it was made from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "tests" / "gpu_report.json"
PENDING = ROOT / "tests" / "gpu_pending.txt"
TWO_GPUS = "needs two CUDA devices"      # why a test is skipped; such tests and the section `sharded` may be older than the sources
PATTERNS = ("cudnn_graphs/kernels/**/*.cuh", "cudnn_graphs/graphs/*.py", "cudnn_graphs/engines/*.py", "cudnn_graphs/runtime/*.py")


def source_digests() -> dict[str, str]:
    """sha256 of every kernel, graph and engine source and of what loads and launches them, by path from the project's root."""
    paths = sorted(p for pattern in PATTERNS for p in ROOT.glob(pattern))
    return {p.relative_to(ROOT).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def is_current(section: dict[str, Any]) -> bool:
    """Whether a section of the report was made from the sources as they are."""
    return section["sources"] == source_digests()


def pending() -> dict[str, str]:
    """What is not yet proven on a GPU (a source, a section of the report, a file of tests), each with its reason: lines `path: why` of gpu_pending.txt."""
    lines = PENDING.read_text().splitlines() if PENDING.exists() else []
    named = (line.partition(":") for line in lines if line.strip() and not line.startswith("#"))
    return {path.strip(): why.strip() for path, _, why in named}
