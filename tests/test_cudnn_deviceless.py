"""A cuDNN plan for an H200, built where there is neither a GPU nor a driver. In a process of its own, with a stand-in for libcuda."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from devices import H200, need_deviceless_builds

from cudnn_graphs import PagedBlockSparseSignature, PlanStore

ROOT = Path(__file__).resolve().parents[1]
SIGNATURE = PagedBlockSparseSignature(batch_size=2, seq_len_q=128, max_seq_len_kv=4096, num_qo_heads=8, num_kv_heads=2, head_dim=128, q_block_size=64,
                                      kv_block_size=64, page_size=64, max_blocks_per_row=8)
BUILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from devices import H200
from cudnn_graphs import PlanStore
from cudnn_graphs.planning import Signature
import cudnn_graphs.ops
print(json.dumps(PlanStore(sys.argv[2]).build_ahead(Signature.from_json(json.loads(sys.argv[3])), H200, "cudnn")))
"""

# A page of 3 tokens: this cuDNN wants powers of two.
REFUSED = """
import sys
sys.path.insert(0, sys.argv[1])
import cudnn
from devices import H200
from cudnn_graphs.graphs.paged_sdpa import FoldedShape, build_graph
from cudnn_graphs.runtime.cudnn_plans import build_plan
shape = FoldedShape(rows=16, packed_rows=64, head_dim=128, sub_page=3, columns=8)
try:
    build_plan(lambda **where: build_graph(cudnn, shape, "bfloat16", **where), H200)
except NotImplementedError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def without_driver(tmp_path_factory):
    """Runs Python text in a process where a stub stands in for the driver. Returns what it printed."""
    need_deviceless_builds()
    stub = tmp_path_factory.mktemp("stub")
    subprocess.run([sys.executable, str(ROOT / "scripts" / "driver_stub.py"), str(stub)], check=True, capture_output=True)

    def run(text: str, *arguments: object) -> str:
        said = subprocess.run([sys.executable, "-c", text, str(Path(__file__).parent), *map(str, arguments)], env={**os.environ, "LD_LIBRARY_PATH": str(stub)},
                              capture_output=True, text=True, timeout=300)
        assert said.returncode == 0, said.stderr[-3000:]
        return said.stdout
    return run


@pytest.fixture(scope="module")
def built(tmp_path_factory, without_driver) -> tuple[Path, dict]:
    """The plan directory, and the header of the one plan in it."""
    plans = tmp_path_factory.mktemp("ahead") / "plans"
    return plans, json.loads(without_driver(BUILD, plans, json.dumps(SIGNATURE.to_json())))


def test_a_graph_without_an_execution_plan_is_not_implemented(without_driver):
    said = without_driver(REFUSED)
    assert said.startswith("engine 'cudnn': got a graph that cuDNN") and "on NVIDIA H200; need one that it serves; use another engine; cuDNN says: " in said


def test_the_kernel_is_hoppers_own(built):
    kernels = {k["role"]: k for k in built[1]["compiled"]["kernels"]}
    assert kernels.keys() == {"graph", "fold", "unfold", "tail"}
    assert "sm90" in kernels["graph"]["name"] and "wgmma" in kernels["graph"]["name"] and "sdpa" in kernels["graph"]["name"]


def test_the_header_says_what_it_was_built_for_and_with(built):
    header = built[1]
    assert header["device"] == H200.identity() and header["engine"] == "cudnn" and header["signature"] == SIGNATURE.to_json()
    assert header["environment"].keys() == {"package", "cudnn", "frontend"} and all(header["environment"].values())
    assert header["compiled"]["config"] == {"folded_rows": 8, "packed_rows": 256, "sub_page": 64, "table_columns": 8,
                                            "graph_workspace_bytes": header["compiled"]["config"]["graph_workspace_bytes"]}
    assert header["compiled"]["workspace_bytes"] > 2 * 2 * 8 * 256 * 128


def test_the_plan_is_in_the_directory_and_not_for_this_machine(built):
    store = PlanStore(built[0])
    (entry,) = store.entries()
    assert entry["key"] == built[1]["key"] and entry["where"] == "disk" and entry["payload_bytes"] > 50_000 and store.verify() == []
    assert store.get(SIGNATURE, "cpu").engine == "reference" and store.stats().builds == 1
