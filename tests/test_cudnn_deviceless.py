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


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, dict]:
    """The plan directory, and the header of the one plan in it."""
    need_deviceless_builds()
    directory = tmp_path_factory.mktemp("ahead")
    stub = subprocess.run([sys.executable, str(ROOT / "scripts" / "driver_stub.py"), str(directory / "stub")], capture_output=True, text=True, check=True)
    said = subprocess.run([sys.executable, "-c", BUILD, str(Path(__file__).parent), str(directory / "plans"), json.dumps(SIGNATURE.to_json())],
                          env={**os.environ, "LD_LIBRARY_PATH": stub.stdout.strip()}, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr[-3000:]
    return directory / "plans", json.loads(said.stdout)


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
