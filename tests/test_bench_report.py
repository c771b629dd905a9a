"""The benchmark's arithmetic and its tables, on figures made up here: what needs a GPU runs in scripts/gpu_check.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import bench
import bench_report
from rich.console import Console


def row(ms, eager, peer=False, other=False, **more):
    return {"ms": ms, "eager_ms": eager, "tflops": 600 / ms, "tb_s": 4 / ms, "peer": peer, "other_question": other, "worst_row": 3e-3, **more}


def made_up(**contenders):
    rows = {"sm90": row(1.0, 1.2), "portable": row(2.0, 2.1), "cudnn": {"declined": "no causal mask", "peer": False}, **contenders}
    bench._add_ratios(rows.values())
    return {"workload": "P1", "title": "prefill", "bound": "compute", "limit": "matmul_tflops", "contenders": rows}


LIMITS = {"matmul_tflops": 780.0}


def test_ratios_are_to_the_fastest_peer_of_the_same_question():
    rows = made_up(slow=row(3.0, 3.0, peer=True), fast=row(1.5, 1.8, peer=True), dense=row(0.1, 0.1, peer=True, other=True))["contenders"]
    assert rows["sm90"]["ratio_to_best_peer"] == pytest.approx(1.5) and rows["sm90"]["eager_ratio"] == pytest.approx(1.5)
    assert rows["fast"]["ratio_to_best_peer"] == 1.0 and rows["portable"]["ratio_to_best_peer"] == pytest.approx(0.75)


def test_without_a_peer_no_ratio_is_claimed():
    result = {"workloads": [made_up()], "limits": LIMITS}
    assert "ratio_to_best_peer" not in result["workloads"][0]["contenders"]["sm90"]
    assert "| P1 prefill, TFLOPS | 600 | 300 | - | none | none | none | 780 |" in bench_report.markdown(result)


def test_the_tables_name_the_best_peer_and_what_another_question_costs():
    result = {"workloads": [made_up(Peer=row(1.5, 1.8, peer=True), Dense=row(3.0, 3.0, peer=True, other=True)) | {"quantize_ms": 0.5}], "limits": LIMITS}
    table = bench_report.markdown(result)
    assert "| 400 (Peer) | 1.50 | 1.50 | 780 |" in table
    assert "- P1: `quantize_sage_qkv` 0.50 ms." in table and "- P1: Dense 3.000 ms, ours 1.000 ms (3.00 times as fast)." in table
    console = Console(width=130, record=True, file=open("/dev/null", "w"))       # noqa: SIM115
    bench_report.show(result["workloads"][0], LIMITS, console)
    text = console.export_text()
    assert "Peer (peer)" in text and "77%" in text and "no causal mask" in text


def test_only_our_own_engines_fail_the_benchmark():
    wrong = made_up(Peer={"failed": "wrong", "peer": True})
    assert bench.failures({"workloads": [wrong]}) == []
    wrong["contenders"]["sm90"]["failed"] = "wrong: worst row 1"
    assert bench.failures({"workloads": [wrong]}) == ["P1 on sm90: wrong: worst row 1"]


def test_a_wrong_answer_is_not_timed():
    w = bench.WORKLOADS["S1"]
    errors = {"relative_l2": 5e-2, "worst_row": 9e-2, "other_question": False}
    assert "worst row 9.0e-02" in bench._wrong(w, {"peer": False, **errors})
    assert bench._wrong(w, {"peer": True, **errors}) is None                     # they quantize more coarsely; garbage is 1
    assert bench._wrong(w, {"peer": True, **errors, "worst_row": 1.0})
    assert bench._wrong(bench.WORKLOADS["P1"], {"peer": True, **errors})


def test_every_workload_has_a_limit_and_a_title():
    for name, w in bench.WORKLOADS.items():
        assert w.title and w.limit in ("matmul_tflops", "fp8_tflops", "read_tb_s"), name
        assert (w.limit == "read_tb_s") == (w.bound == "memory"), name
