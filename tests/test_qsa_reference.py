"""The CPU engine of packed query-sparse attention against the float64 oracle."""

import pytest
import torch
from cases_qsa import HEAD_PAIRS, bitmap_indices, packed_batch, qkv, random_bitmap
from oracle_qsa import bitmap_keys, errors, oracle_bitmap, oracle_indexed

from cudnn_graphs.arguments import QuerySparseArguments
from cudnn_graphs.ops.qsa_metadata import build_qsa_metadata
from cudnn_graphs.reference import query_sparse as reference


def run(q, k, v, scale=1 / 16, metadata=None, sel_blocks=None, indices=None, default_device="cpu"):
    out, out_fp32 = torch.full_like(q, float("nan")), torch.full(q.shape, float("nan"))
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
    fields = {} if metadata is None else metadata._asdict()
    with torch.device(default_device):
        reference.query_sparse(QuerySparseArguments(q, k, v, out, out_fp32, lse, scale, sel_blocks=sel_blocks, indices=indices, **fields))
    return out, out_fp32, lse


def check(got, want):
    out, out_fp32, lse = got
    assert torch.equal(out, out_fp32.to(torch.bfloat16)) or not out_fp32.isfinite().all()
    total, worst, lse_error = errors(out_fp32, lse, *want)
    assert total < 1e-5 and worst < 1e-4 and lse_error < 1e-4


@pytest.mark.parametrize("heads", HEAD_PAIRS)
@pytest.mark.parametrize("sequences, density, scale", [(1, 0.3, 1 / 16), (4, 0.5, -0.2), (9, 1.0, 0.0), (5, 0.0, 1 / 16)])
def test_bitmap(heads, sequences, density, scale, monkeypatch):
    monkeypatch.setattr(reference, "_CHUNK_KEYS", 64)
    metadata = packed_batch(sequences, 24, seed=sequences)
    q, k, v = qkv(metadata.lo.numel(), heads)
    sel = random_bitmap(metadata, density, tail=density > 0)
    check(run(q, k, v, scale, metadata, sel), oracle_bitmap(q, k, v, sel, metadata, scale))


def test_tensors_lie_where_the_inputs_do_whatever_the_default_device():
    metadata = packed_batch(3, 24, seed=3)
    q, k, v = qkv(metadata.lo.numel(), (3, 1))
    sel = random_bitmap(metadata, 0.5, tail=True)
    for chosen in ({"metadata": metadata, "sel_blocks": sel}, {"indices": bitmap_indices(sel, metadata, 32)}):
        assert all(map(torch.equal, run(q, k, v, **chosen, default_device="meta"), run(q, k, v, **chosen)))


def test_windows_that_cut_blocks_and_leave_the_batch():
    metadata = build_qsa_metadata([0, 11, 30])
    lo, hi = metadata.lo.clone(), metadata.hi.clone()
    lo[3], hi[3] = 2, 9
    lo[4], hi[4] = -7, 400
    lo[5], hi[5] = 5, 4
    lo[20], hi[20] = 13, 13
    metadata = metadata._replace(lo=lo, hi=hi)
    q, k, v = qkv(30)
    sel = random_bitmap(metadata, 0.8)
    check(run(q, k, v, metadata=metadata, sel_blocks=sel), oracle_bitmap(q, k, v, sel, metadata, 1 / 16))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_unseen_bytes_never_reach_a_result(poison):
    metadata = packed_batch(3, 24, seed=3)
    total = metadata.lo.numel()
    q, k, v = qkv(total)
    sel = random_bitmap(metadata, 0.4)
    clean = run(q, k, v, metadata=metadata, sel_blocks=sel)
    victim = total // 2
    k[victim], v[victim] = poison, poison
    got = run(q, k, v, metadata=metadata, sel_blocks=sel)
    seers = [t for t in range(total) if victim in bitmap_keys(t, sel, metadata.lo, metadata.hi, metadata.block_first, metadata.block_last, total)]
    others = [t for t in range(total) if t not in seers]
    assert seers and torch.equal(got[1][others], clean[1][others]) and torch.equal(got[2][:, others], clean[2][:, others])
    assert not got[1][seers].isfinite().all()


@pytest.mark.parametrize("heads", HEAD_PAIRS)
def test_indices_anywhere(heads):
    metadata = packed_batch(4, 24, seed=7)
    total = metadata.lo.numel()
    q, k, v = qkv(total, heads)
    sel = random_bitmap(metadata, 0.5)
    indices = bitmap_indices(sel, metadata, 64)
    indices[5] = -1
    indices[6, :4] = torch.tensor([7, 2**31 - 1, -(2**31), 6])
    check(run(q, k, v, indices=indices), oracle_indexed(q, k, v, indices, 1 / 16))


def test_the_two_forms_agree():
    metadata = packed_batch(4, 24, seed=9)
    q, k, v = qkv(metadata.lo.numel())
    sel = random_bitmap(metadata, 0.5)
    bitmap, indexed = run(q, k, v, metadata=metadata, sel_blocks=sel), run(q, k, v, indices=bitmap_indices(sel, metadata, 64))
    assert all(torch.equal(x, y) for x, y in zip(bitmap, indexed))
