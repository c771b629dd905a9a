"""The soak script, briefly on a CPU, and what it calls growth."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def test_a_short_soak(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPTS / "soak.py"), "--minutes", "0.1", "--device", "cpu", "--max-entries", "4", "--json",
                           str(tmp_path / "soak.json")], capture_output=True, text=True, timeout=200, check=False)
    said = json.loads((tmp_path / "soak.json").read_text())
    wrong = [fault for fault in said["wrong"] if not fault.startswith("host_mb")]      # six seconds say nothing of growth
    assert not wrong, done.stdout
    last = said["samples"][-1]
    assert last["calls"] > 20 and last["evictions"] > 0 and last["builds"] > 4 and last["in_memory"] <= 4 and last["on_disk"] <= 4
    assert "16 signatures" in done.stdout and "evictions" in done.stdout and (done.returncode == 0) == (not said["wrong"])


@pytest.mark.parametrize("growth, faults, evictions, said", [
    (0.0, [], 9, []), (0.01, [], 9, []), (2.0, [], 9, ["host_mb grew from 1005.0 to 1085.0"]), (0.0, ["other bits"], 9, ["other bits"]),
    (0.0, [], 0, ["nothing was evicted: give fewer --max-entries, or more time"]),
])
def test_what_is_wrong(growth, faults, evictions, said, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from soak import Soak
    soak = object.__new__(Soak)
    soak.faults = faults
    soak.samples = [{"host_mb": 1000.0 + growth * (i - 7), "evictions": evictions} for i in range(60)]
    assert soak.verdict() == said


@pytest.mark.parametrize("options, said", [
    (["--minutes", "0"], "need a time over 0"), (["--minutes", "nan"], "need a time over 0"), (["--max-entries", "0"], "max-entries: got 0; need at least 1"),
    (["--engines", "nope"], "engines: got nope"), (["--json", "/nonexistent/soak.json"], "json: got"),
])
def test_what_it_could_only_fail_at_is_said_at_once(options, said, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import soak
    monkeypatch.setattr(sys, "argv", ["soak.py", "--device", "cpu", *options])
    with pytest.raises(SystemExit, match="2"):
        soak.main()
    assert said in capsys.readouterr().err


def test_results_of_another_plan_are_near_only_where_nothing_is_lost(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from soak import _near
    a = torch.randn(2, 640, 128)
    lse = torch.randn(2, 640)
    lse[0, 3] = -float("inf")
    assert _near(a, a * (1 + 2e-3)) and _near(lse, lse.clone())
    lost, other = a.clone(), lse.clone()
    lost[1, 5, 7], other[1, 3] = float("nan"), -float("inf")
    assert not _near(a, lost) and not _near(lost, lost) and not _near(lse, other) and not _near(lse, -lse) and not _near(a, a * 1.02)


def test_what_others_hold_on_a_shared_device_is_no_growth(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from soak import Soak
    soak = object.__new__(Soak)
    soak.faults, soak.samples = [], [{"host_mb": 1000.0, "device_mb": 500.0 + 10 * i, "evictions": 1} for i in range(60)]
    assert soak.verdict(shared=True) == [] and soak.verdict() == ["device_mb grew from 595.0 to 995.0"]
