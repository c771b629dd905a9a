"""The GPU report speaks of the sources as they are, and says they passed. What is not proven is named in gpu_pending.txt."""

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
    excused, report = pending(), json.loads(REPORT.read_text())
    if section not in report:
        assert section in excused, f"the report has no {section}; run scripts/gpu_check.py {section} on a GPU, or say why not in tests/gpu_pending.txt"
        return
    now, made_from = source_digests(), report[section]["sources"]
    changed = sorted(p for p in {**now, **made_from} if now.get(p) != made_from.get(p) and p not in excused)
    assert not changed, f"{section} was proven with other sources: {changed}; run scripts/gpu_check.py on a GPU, or name them in tests/gpu_pending.txt"


def test_every_gpu_test_passed():
    report = json.loads(REPORT.read_text())["tests"]
    failed = [name for name, test in report["tests"].items() if test["outcome"] == "failed"]
    assert report["exit_code"] == 0 and not failed, failed


def test_portable_and_sm90_served_the_whole_surface():
    tests = json.loads(REPORT.read_text())["tests"]["tests"]
    for engine in ("portable", "sm90"):
        surface = tests[f"tests/test_paged_gpu.py::test_surface[{engine}]"]
        assert surface["surface_cases"] > 200 and surface["surface_declined"] == 0
    assert tests["tests/test_paged_gpu.py::test_surface[cudnn]"]["surface_cases"] > 100


def test_sanitizer_found_nothing():
    assert json.loads(REPORT.read_text())["sanitizer"]["exit_code"] == 0


def test_pending_names_only_what_there_is_with_a_reason():
    for name, why in pending().items():
        assert name in source_digests() or name in SECTIONS, f"{name} is no kernel, graph or engine source and no section of the report"
        assert why, f"{name} gives no reason"
