"""cuDNN Frontend's own query-sparse operation as an engine, with a stand-in for the operation: it runs on SM100-class parts only."""

import sys
import types

import pytest
import torch

from cudnn_graphs.arguments import QuerySparseArguments
from cudnn_graphs.engines.cudnn_qsa import CudnnQsaEngine
from cudnn_graphs.ops.qsa_metadata import build_qsa_metadata
from cudnn_graphs.ops.query_sparse import QuerySparseSignature
from cudnn_graphs.planning import choose, verdict
from cudnn_graphs.runtime import environment
from cudnn_graphs.runtime.cubins import CubinCache
from cudnn_graphs.runtime.devices import DeviceFacts


def device(major, minor):
    return DeviceFacts(kind="cuda", index=None, name=f"SM{major}{minor}", capability=(major, minor), sm_count=148, smem_per_block=232448)


@pytest.fixture
def calls(monkeypatch):
    """Every call of the stand-in: (operation, arguments)."""
    seen = []

    def stand_in(name):
        def operation(q, *rest):
            seen.append((name, (q, *rest)))
            return {"out": torch.full_like(q, 1), "out_fp32": torch.full(q.shape, 2.0), "lse": torch.full((q.shape[1], q.shape[0]), 3.0)}
        return operation

    ops = types.ModuleType("cudnn.ops")
    ops.qsa_forward, ops.qsa_indexed_forward = stand_in("qsa_forward"), stand_in("qsa_indexed_forward")
    cudnn = types.ModuleType("cudnn")
    cudnn.ops, cudnn.__version__ = ops, "1.32.0"
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setitem(sys.modules, "cudnn.ops", ops)
    return seen


def launch(source, **selection):
    descriptor, engine = QuerySparseSignature(12, 1, source).lower(), CudnnQsaEngine()
    compiled = engine.compile(descriptor, device(10, 0), CubinCache())
    q, k, v = (torch.zeros(9, h, 256, dtype=torch.bfloat16) for h in (12, 1, 1))
    a = QuerySparseArguments(q, k, v, torch.empty_like(q), torch.empty(q.shape), torch.empty(12, 9), 0.5, **selection)
    engine.load(descriptor, device(10, 0), compiled).launch(a, 0, 0)
    assert (a.out == 1).all() and (a.out_fp32 == 2).all() and (a.lse == 3).all()
    return a, compiled


def test_bitmap(calls):
    metadata = build_qsa_metadata([0, 9])
    a, compiled = launch("bitmap", sel_blocks=torch.ones(9, 3, dtype=torch.uint8), **metadata._asdict())
    [(name, given)] = calls
    assert name == "qsa_forward" and compiled.facts["kernels"] == [{"name": "cudnn.ops.qsa_forward"}]
    assert all(x is y for x, y in zip(given, (a.q, a.k, a.v, a.sel_blocks, *metadata), strict=False)) and given[-1] == 0.5 and len(given) == 11


def test_indices(calls):
    a, _ = launch("indices", indices=torch.zeros(9, 4, dtype=torch.int32))
    [(name, given)] = calls
    assert name == "qsa_indexed_forward" and given == (a.q, a.k, a.v, a.indices, 0.5)


def test_selection_by_the_support_table(monkeypatch):
    monkeypatch.setattr(environment, "_present", lambda module: True)

    def served(source, heads, capability, tokens=4096):
        return verdict("cudnn", QuerySparseSignature(*heads, source, tokens).lower(), device(*capability)).ok
    for capability in ((10, 0), (10, 3), (10, 7)):
        assert served("bitmap", (12, 1), capability) and served("bitmap", (24, 2), capability)
        assert served("indices", (12, 1), capability) == (capability != (10, 7))
        assert not served("bitmap", (6, 1), capability) and not served("indices", (24, 2), capability)
        assert not served("bitmap", (24, 2), capability, 2**20)
        assert choose(QuerySparseSignature(12, 1).lower(), device(*capability))[0] == "cudnn"
        assert choose(QuerySparseSignature(6, 1).lower(), device(*capability))[0] == "portable"
    for capability in ((8, 0), (9, 0), (12, 0)):
        assert not served("bitmap", (12, 1), capability)
