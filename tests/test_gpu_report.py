"""The GPU report speaks of the sources as they are, and says they passed. What is not proven is named in gpu_pending.txt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from gpu_sources import REPORT, ROOT, TWO_GPUS, pending, source_digests

CURRENT = ("tests", "sanitizer", "bench", "soak")
SECTIONS = (*CURRENT, "sharded")    # two GPUs are not always at hand: the README says beside its figures where they are older


@pytest.mark.parametrize("section", CURRENT)
def test_report_matches_the_sources(section):
    excused, report = pending(), json.loads(REPORT.read_text())
    if section in excused:
        pytest.skip(excused[section])
    assert section in report, f"the report has no {section}; run scripts/gpu_check.py {section} on a GPU, or say why not in tests/gpu_pending.txt"
    now, made_from = source_digests(), report[section]["sources"]
    changed = sorted(p for p in {**now, **made_from} if now.get(p) != made_from.get(p) and p not in excused)
    assert not changed, (f"{section} was proven with other sources: {changed}; run scripts/gpu_check.py {section} on a GPU, "
                         "or name them in tests/gpu_pending.txt")


def test_every_gpu_test_passed():
    report = json.loads(REPORT.read_text())["tests"]
    failed = [name for name, test in report["tests"].items() if test["outcome"] == "failed"]
    assert not [name for name in failed if name.partition("::")[0] not in pending()], failed
    assert report["exit_code"] == int(bool(failed))


def test_the_report_has_every_gpu_test(request):
    """Of those collected now: one that was added or renamed since has proven nothing."""
    proven = json.loads(REPORT.read_text())["tests"]["tests"]
    missing = [item.nodeid for item in request.session.items if "gpu" in item.keywords and item.nodeid not in proven
               and item.nodeid.partition("::")[0] not in pending()]
    assert not missing, f"{missing}; run scripts/gpu_check.py tests on a GPU, or name their file in tests/gpu_pending.txt"


def test_skipped_were_only_those_that_had_nothing_to_test():
    tests = json.loads(REPORT.read_text())["tests"]["tests"]
    skipped = [name for name, test in tests.items() if test["outcome"] == "skipped"]
    unexplained = [name for name in skipped if name.partition("::")[0] not in pending()
                   and TWO_GPUS not in tests[name].get("reason", "")
                   and not ("bad_rows" in name and "causal" in name and "cudnn" in name)            # cudnn serves no causal mask
                   and name != "tests/test_paged_gpu.py::test_a_workspace_must_hold_what_the_plan_says[sm90]"]     # it needs none
    assert not unexplained, f"{unexplained}; run them where they can run, or name their file in tests/gpu_pending.txt"


def test_portable_and_sm90_served_the_whole_surface():
    tests = json.loads(REPORT.read_text())["tests"]["tests"]
    for engine in ("portable", "sm90"):
        surface = tests[f"tests/test_paged_gpu.py::test_surface[{engine}]"]
        assert surface["surface_cases"] > 200 and surface["surface_declined"] == 0
    assert tests["tests/test_paged_gpu.py::test_surface[cudnn]"]["surface_cases"] > 100


def test_sanitizer_found_nothing():
    sanitizer = json.loads(REPORT.read_text())["sanitizer"]
    assert sanitizer["exit_code"] == 0
    assert sanitizer["scripts"].keys() == {path.name for path in ROOT.glob("tests/*sanitizer_cases.py")}
    for name, script in sanitizer["scripts"].items():
        ran = [int(line.split()[1]) for line in script["summary"] if line.startswith("ran ")]
        assert ran and ran[0] > 0, f"{name} launched nothing"


def test_the_benchmark_ended_and_no_engine_of_ours_was_wrong():
    report = json.loads(REPORT.read_text())
    if "bench" not in report and "bench" in pending():
        pytest.skip(pending()["bench"])
    assert report["bench"].get("exit_code") == 0, report["bench"].get("failed", "the run was cut short")


def test_the_split_cache_was_right_and_larger_than_one_gpu():
    report = json.loads(REPORT.read_text())
    if "sharded" not in report and "sharded" in pending():
        pytest.skip(pending()["sharded"])
    sharded = report["sharded"]
    assert sharded["exit_code"] == 0, sharded.get("output")
    assert {w["workload"] for w in sharded["workloads"]} == {"P6", "P6 x 4"} and sharded["large"]["cache_of_gpus"] >= 1.69


def test_the_soak_ended_without_growth():
    report = json.loads(REPORT.read_text())
    if "soak" not in report and "soak" in pending():
        pytest.skip(pending()["soak"])
    soak = report["soak"]
    assert soak["exit_code"] == 0 and soak["wrong"] == [], soak.get("output")
    assert soak["samples"][-1]["seconds"] >= 60 and soak["replays"] > 1000


def test_pending_names_only_what_there_is_with_a_reason():
    proven = {path for section in json.loads(REPORT.read_text()).values() for path in section["sources"]}      # some are gone by now
    for name, why in pending().items():
        assert name in proven | source_digests().keys() or name in SECTIONS or (name.startswith("tests/test_") and (ROOT / name).exists()), (
            f"{name} is no kernel, graph or engine source, no section of the report and no test file")
        assert why, f"{name} gives no reason"


def test_the_shares_of_the_gpu_tests_are_whole_files_each_once(monkeypatch):
    import gpu_recorder
    files = ("test_a.py", "test_b.py", "test_c.py", "test_two_gpus.py", "test_z.py")
    everything = [SimpleNamespace(path=file, nodeid=f"tests/{file}::{i}", keywords={"gpu"}) for file in files for i in range(3)]
    config, taken = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None)), []
    for share in range(4):
        monkeypatch.setenv("CUDNN_GRAPHS_TESTS_SHARE", f"{share}/4")
        items = list(everything)
        gpu_recorder.pytest_collection_modifyitems(config, items)
        taken.append([item.nodeid for item in items])
    assert sorted(sum(taken, [])) == sorted(item.nodeid for item in everything)
    assert all(not any("two_gpus" in name for name in share) or "two_gpus" in share[0] for share in taken)
    assert len([share for share in taken if any("test_a" in name for name in share)]) == 1
