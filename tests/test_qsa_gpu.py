"""Packed query-sparse attention on a GPU, engine by engine, against float64.

Two more engines are designs for a device that is not there. `packed`: sm90 told that it has three SMs, so that even small
batches are packed and each CTA takes many items; on the real count they go query by query. `narrow`: portable as it is
designed for 99 KB of shared memory.
"""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
from cases_qsa import HEAD_PAIRS, bitmap_indices, correlated_bitmap, cut_windows, misaligned, packed_batch, qkv, random_bitmap
from oracle_qsa import attend_dense, errors, visible_by_bitmap, visible_by_indices

from cudnn_graphs.arguments import QuerySparseArguments
from cudnn_graphs.ops.qsa_metadata import QsaMetadata, build_qsa_metadata
from cudnn_graphs.ops.query_sparse import QuerySparseSignature, qsa_forward, qsa_indexed_forward
from cudnn_graphs.planning import PlanStore, verdict
from cudnn_graphs.planning.engines import engine_named
from cudnn_graphs.runtime.cubins import CubinCache
from cudnn_graphs.runtime.devices import device_facts

pytestmark = pytest.mark.gpu

DESIGNED_FOR = {"packed": ("sm90", {"sm_count": 3}), "narrow": ("portable", {"smem_per_block": 99 << 10})}
ENGINES = ("portable", "sm90", *DESIGNED_FOR)
POISONS = (float("nan"), float("inf"), float("-inf"))


@functools.cache
def store():
    return PlanStore(None)


@functools.cache
def designed(name, heads):
    """The executable of an engine of `DESIGNED_FOR`."""
    base, changes = DESIGNED_FOR[name]
    facts = dataclasses.replace(device_facts("cuda"), **changes)
    descriptor, engine = QuerySparseSignature(*heads, max_tokens=4096).lower(), engine_named(base)
    return engine.load(descriptor, facts, engine.compile(descriptor, facts, CubinCache()))


def skip_unserved(engine, source="bitmap"):
    said = verdict(DESIGNED_FOR.get(engine, (engine,))[0], QuerySparseSignature(12, 1, source).lower(), device_facts("cuda"))
    if not said.ok:
        pytest.skip(said.reason)


def on_gpu(*tensors):
    return [x.cuda() for x in tensors]


def run_bitmap(engine, q, k, v, sel, metadata, scale=1 / 16):
    if engine not in DESIGNED_FOR:
        return qsa_forward(q, k, v, sel, *metadata, scale, engine=engine, store=store())
    out, out_fp32, lse = torch.empty_like(q), torch.empty(q.shape, device="cuda"), torch.empty(q.shape[1], q.shape[0], device="cuda")
    executable = designed(engine, (q.shape[1], k.shape[1]))
    workspace = torch.full((executable.workspace_bytes,), 0x5A, dtype=torch.uint8, device="cuda")
    arguments = QuerySparseArguments(q, k, v, out, out_fp32, lse, scale, sel_blocks=sel, **metadata._asdict())
    executable.launch(arguments, workspace.data_ptr(), torch.cuda.current_stream().cuda_stream)
    return arguments.result


def check(got, want_out, want_lse):
    total, worst, lse_error = errors(got[1], got[2], want_out, want_lse)
    assert total < 4e-3 and worst < 1e-2 and lse_error < 1e-4, (total, worst, lse_error)
    assert torch.equal(got[0], got[1].to(torch.bfloat16))


def batch(heads, sequences, longest, density, *, seed=0, causal=True, windows=False, shift=0):
    metadata = packed_batch(sequences, longest, seed=seed, causal=causal)
    sel = random_bitmap(metadata, density, seed=seed, tail=density < 0.9)
    q, k, v = qkv(metadata.lo.numel(), heads, seed)
    metadata = cut_windows(metadata, seed) if windows else metadata
    return (*on_gpu(q, k, v), misaligned(sel.cuda(), shift), QsaMetadata(*on_gpu(*metadata)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("heads", HEAD_PAIRS)
@pytest.mark.parametrize("shape", [(1, 300, 0.4, 1 / 16), (7, 90, 0.5, -0.1), (64, 12, 0.6, 1 / 16), (3, 200, 1.0, 1 / 16), (2, 40, 0.02, 0.0)], ids=str)
def test_batches(engine, heads, shape):
    skip_unserved(engine)
    sequences, longest, density, scale = shape
    for seed, (causal, windows, shift) in enumerate([(True, False, 0), (False, False, 5), (True, True, 1)]):
        q, k, v, sel, metadata = batch(heads, sequences, longest, density, seed=seed, causal=causal, windows=windows, shift=shift)
        sel[::7] = 0
        got = run_bitmap(engine, q, k, v, sel, metadata, scale)
        check(got, *attend_dense(q, k, v, visible_by_bitmap(sel, metadata), scale))
        again = run_bitmap(engine, q, k, v, sel, metadata, scale)
        assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True)), "another run, other bits"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("total, density", [(1, 1.0), (3, 1.0), (10, 0.5), (11, 0.5), (2300, 0.1), (2300, 1.0)])
def test_one_sequence(engine, total, density):
    skip_unserved(engine)
    metadata = build_qsa_metadata([0, total])
    sel = random_bitmap(metadata, density)
    q, k, v = on_gpu(*qkv(total))
    metadata, sel = QsaMetadata(*on_gpu(*metadata)), sel.cuda()
    check(run_bitmap(engine, q, k, v, sel, metadata), *attend_dense(q, k, v, visible_by_bitmap(sel, metadata), 1 / 16))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("heads", HEAD_PAIRS)
@pytest.mark.parametrize("where", ["k", "v", "kv"])
def test_poison_that_only_some_queries_of_a_tile_see(engine, heads, where):
    skip_unserved(engine)
    q, k, v, sel, metadata = batch(heads, 3, 120, 0.5, seed=3)
    visible = visible_by_bitmap(sel, metadata)
    want_out, want_lse = attend_dense(q, k, v, visible, 1 / 16)
    victims = [5, len(q) // 2, len(q) - 9]
    seers = visible[:, victims].any(1)
    assert seers.any() and not seers.all()
    for poison in POISONS:
        bad = {"k": k.clone(), "v": v.clone()}
        for name in where:
            bad[name][victims] = poison
        got = run_bitmap(engine, q, bad["k"], bad["v"], sel, metadata)
        check([x[~seers] for x in got[:2]] + [got[2][:, ~seers]], want_out[~seers], want_lse[:, ~seers])
        assert not got[1][seers].isfinite().flatten(1).all(1).any()


@pytest.mark.parametrize("engine", ["portable", "sm90"])
@pytest.mark.parametrize("heads", HEAD_PAIRS)
def test_indices(engine, heads):
    skip_unserved(engine, "indices")
    metadata = packed_batch(4, 90, seed=7)
    sel = random_bitmap(metadata, 0.5)
    indices = bitmap_indices(sel, metadata, 4 * int((sel != 0).sum(1).max()) + 8).cuda()
    q, k, v = on_gpu(*qkv(len(indices), heads))
    got = qsa_indexed_forward(q, k, v, indices, engine=engine, store=store())
    check(got, *attend_dense(q, k, v, visible_by_indices(indices), 1 / 16))
    bitmap = run_bitmap(engine, q, k, v, sel.cuda(), QsaMetadata(*on_gpu(*metadata)))
    assert (got[1] - bitmap[1]).norm() < 4e-3 * bitmap[1].norm()


@pytest.mark.parametrize("engine", ["portable", "sm90"])
def test_widest_indices(engine):
    skip_unserved(engine, "indices")
    total = 2300
    indices = torch.stack([torch.randperm(total)[:2052] for _ in range(total)]).int().cuda()
    indices[:, ::11] = -1
    indices[3::7, 1], indices[4::9, 2] = 2**31 - 1, -2**31
    q, k, v = on_gpu(*qkv(total))
    check(qsa_indexed_forward(q, k, v, indices, engine=engine, store=store()), *attend_dense(q, k, v, visible_by_indices(indices), 1 / 16))


@pytest.mark.parametrize("engine", ["portable", "sm90"])
def test_correlated_selections(engine):
    skip_unserved(engine)
    metadata = build_qsa_metadata([0, 2048])
    sel = correlated_bitmap(metadata, 64).cuda()
    q, k, v = on_gpu(*qkv(2048))
    metadata = QsaMetadata(*on_gpu(*metadata))
    check(run_bitmap(engine, q, k, v, sel, metadata), *attend_dense(q, k, v, visible_by_bitmap(sel, metadata), 1 / 16))


@pytest.mark.parametrize("engine", ["portable", "sm90"])
def test_bitmap_past_two_to_the_31(engine):
    skip_unserved(engine)
    total = 92_700
    metadata = QsaMetadata(*on_gpu(*build_qsa_metadata([0, total])))
    sel = torch.zeros(total, metadata.block_first.numel(), dtype=torch.uint8, device="cuda")
    assert sel.numel() > 2**31
    for part in torch.arange(total, device="cuda").split(4096):
        sel[part[0]:part[-1] + 1].scatter_(1, (torch.rand(len(part), 300, device="cuda") * (part[:, None] // 4 + 1)).long(), 1)
    q, k, v = on_gpu(*qkv(total))
    _, out_fp32, lse = run_bitmap(engine, q, k, v, sel, metadata)
    for t in (0, 5, 46_341, total // 2, total - 2, total - 1):
        tokens = (4 * torch.nonzero(sel[t]) + torch.arange(4, device="cuda")).flatten()
        tokens = tokens[tokens <= t]
        scores = q[t].double() @ k[tokens, 0].double().T / 16
        want = torch.softmax(scores, -1) @ v[tokens, 0].double()
        assert ((out_fp32[t] - want).norm(dim=-1) < 1e-2 * want.norm(dim=-1)).all()
        assert (lse[:, t] - torch.logsumexp(scores, -1)).abs().max() < 1e-4


@pytest.mark.parametrize("engine", ["portable", "sm90"])
def test_scratch_is_small_and_known(engine):
    skip_unserved(engine)
    plan = store().get(QuerySparseSignature(24, 2, "bitmap", 131_072), "cuda", engine)
    assert plan.workspace_bytes <= 1 << 20


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_selected_touches_no_key(engine):
    """K and V whole of NaN: a query that selects nothing reads none of it."""
    skip_unserved(engine)
    q, k, v, sel, metadata = batch((12, 1), 2, 40, 0.5)
    got = run_bitmap(engine, q, k * float("nan"), v * float("nan"), torch.zeros_like(sel), metadata)
    assert not got[1].any() and not got[0].any() and (got[2] == float("-inf")).all()


def test_facts_of_the_plan():
    skip_unserved("sm90")
    plan = store().get(QuerySparseSignature(12, 1), "cuda", "sm90")
    said = SimpleNamespace(**plan.describe()["compiled"])
    assert [k["role"] for k in said.kernels] == ["decide", "union", "gather"] and all(k["spill_bytes"] == 0 for k in said.kernels)
