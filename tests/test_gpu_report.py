"""The GPU report speaks of the sources as they are, and says they passed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from gpu_sources import REPORT, pending, source_digests

SECTIONS = ("tests", "sanitizer", "bench")


@pytest.mark.parametrize("section", SECTIONS)
def test_report_matches_the_sources(section):
    made_from = json.loads(REPORT.read_text())[section]["sources"]
    now, excused = source_digests(), pending()
    changed = sorted(p for p in {**now, **made_from} if now.get(p) != made_from.get(p) and p not in excused)
    assert not changed, f"{section} was proven with other sources: {changed}; run scripts/gpu_check.py on a GPU, or name them in tests/gpu_pending.txt"


def test_every_gpu_test_passed():
    report = json.loads(REPORT.read_text())["tests"]
    failed = [name for name, test in report["tests"].items() if test["outcome"] == "failed"]
    assert report["exit_code"] == 0 and not failed, failed


def test_sanitizer_found_nothing():
    assert json.loads(REPORT.read_text())["sanitizer"]["exit_code"] == 0


def test_pending_names_only_sources_with_a_reason():
    for path, why in pending().items():
        assert path in source_digests(), f"{path} is no kernel, graph or engine source"
        assert why, f"{path} gives no reason"
