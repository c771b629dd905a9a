"""Sage block-sparse attention through its public names, on the CPU."""

import dataclasses
import math

import pytest
import torch
from oracle_sage import errors, sage_attention
from sage_cases import SageCase

from cudnn_graphs import (
    PlanStore,
    SageBlockSparseSignature,
    bsa_attn_sm120_blk64_sage_fwd,
    convert_sage_v_layout,
    quantize_sage_qkv,
    sage_block_sparse_attention,
    select_blocks,
)
from cudnn_graphs.descriptor import SparseBlockDescriptor
from cudnn_graphs.errors import PlanMissError


def positional(case):
    return [case.q, case.k, case.v, case.q_scale, case.k_scale, case.v_scale, case.index, case.count, case.sizes, case.nums, case.scale]


def keywords(case):
    return dict(uniform_block_count=case.uniform, contiguous_block_indices=case.contiguous, v_layout=case.v_layout)


@pytest.mark.parametrize("facts", [dict(), dict(counts=True, seq_q=500), dict(sizes_rank=1), dict(sizes_rank=2), dict(sizes_rank=3, batch=2),
                                   dict(counts=True, uniform=True),
                                   dict(uniform=True, contiguous=True), dict(v_layout="interleaved16")], ids=str)
def test_one_shot_plan_and_drop_in_agree_with_the_oracle(facts):
    case = SageCase(**facts).make().poison()
    store = PlanStore(None)
    out, lse = sage_block_sparse_attention(*positional(case), **keywords(case), return_lse=True, store=store)
    total, worst, lse_error = errors(out, lse, *sage_attention(case))
    assert total < 3e-3 and worst < 5e-3 and lse_error < 1e-4
    given = torch.empty_like(out)
    assert bsa_attn_sm120_blk64_sage_fwd(*positional(case), **keywords(case), out=given, tma_descriptor_workspace=object()) is given
    assert torch.equal(given, out)
    signature = SageBlockSparseSignature(case.batch, case.heads, case.seq_q, case.seq_k, case.capacity, case.nums is not None, case.sizes_rank, case.uniform,
                                         case.contiguous, case.v_layout)
    plan = store.get(signature, "cpu")
    assert torch.equal(plan.run(*positional(case)), out) and plan.engine == "reference"
    lse_given = torch.empty_like(lse)
    result = sage_block_sparse_attention(*positional(case), **keywords(case), out=given, lse=lse_given)
    assert result is given and torch.equal(lse_given, lse)


def test_quantize_then_attend_is_close_to_attention():
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, n, 128, generator=g).to(torch.bfloat16) for n in (300, 500, 500))
    for offset in (0.0, 10.0):
        k[..., :4] += offset
        exact = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
        index, counts = select_blocks(q, k, top_k=8)
        for layout in ("natural", "interleaved16"):
            t = quantize_sage_qkv(q, k, v, v_layout=layout)
            out, lse = sage_block_sparse_attention(*t[:6], index, 8, None, counts, v_layout=t.v_layout, return_lse=True)
            assert torch.nn.functional.cosine_similarity(out.float().flatten(), exact.flatten(), dim=0) > 0.998
            want = torch.logsumexp(q.float() @ k.float().mT / math.sqrt(128), -1)
            corrected = lse + (q.float() @ t.k_mean[..., None])[..., 0] / math.sqrt(128)
            assert (corrected - want).abs().max() < 0.05


def test_layouts_convert_both_ways():
    v = torch.arange(64, dtype=torch.uint8).expand(1, 2, 128, 64).contiguous().view(torch.float8_e4m3fn)
    other = convert_sage_v_layout(v, "natural", "interleaved16")
    assert other.view(torch.uint8)[0, 0, 0, :4].tolist() == [0, 1, 8, 9]
    assert torch.equal(convert_sage_v_layout(other, "interleaved16", "natural").view(torch.uint8), v.view(torch.uint8))
    same = convert_sage_v_layout(v, "natural", "natural")
    assert torch.equal(same.view(torch.uint8), v.view(torch.uint8)) and same.data_ptr() != v.data_ptr()


def test_select_blocks_takes_the_best_and_enough():
    g = torch.Generator().manual_seed(2)
    q, k = torch.randn(1, 2, 130, 128, generator=g), torch.randn(1, 2, 300, 128, generator=g)
    pooled = [torch.stack([x[:, :, 64 * n:64 * n + 64].mean(2) for n in range(-(-x.shape[2] // 64))], 2) for x in (q, k)]
    scores = torch.softmax(pooled[0] @ pooled[1].mT / math.sqrt(128), -1)
    index, counts = select_blocks(q, k, top_k=3)
    assert index.shape == (1, 2, 3, 3) and index.dtype == counts.dtype == torch.int32 and (counts == 3).all()
    assert torch.equal(index.long(), scores.topk(3).indices.sort().values)
    index, counts = select_blocks(q, k, top_p=0.7)
    assert index.shape == (1, 2, 3, 5)
    for h in range(2):
        for r in range(3):
            chosen = index[0, h, r, :counts[0, h, r]].long()
            weights = scores[0, h, r, chosen]
            assert weights.sum() >= 0.7 - 1e-6 and weights.sum() - weights.min() < 0.7 and chosen.tolist() == sorted(set(chosen.tolist()))
    assert (select_blocks(q, k, top_p=1e-6)[1] == 1).all() and (select_blocks(q, k, top_k=2, top_p=1.0)[1] == 2).all()
    assert (select_blocks(q * 0, k[:, :, :256], top_p=0.5)[1] == 2).all(), "two of four equal scores sum to exactly half"
    assert (select_blocks(q * float("nan"), k, top_p=0.5)[1] == 1).all(), "at least one, whatever the scores"
    for bad in (dict(), dict(top_k=0), dict(top_k=6), dict(top_p=0.0), dict(top_p=1.5)):
        with pytest.raises(ValueError):
            select_blocks(q, k, **bad)


def test_a_plan_serves_what_is_smaller():
    store = PlanStore(None)
    big = SageBlockSparseSignature(2, 2, 130, 4096, 64)
    store.build([big], "cpu")
    store.freeze()
    case = SageCase().make()
    assert torch.equal(store.get(SageBlockSparseSignature(1, 2, 130, 330, 5), "cpu").run(*positional(case)), sage_block_sparse_attention(*positional(case)))
    for other in (dict(num_heads=3), dict(seq_len_q=64), dict(has_counts=True), dict(block_sizes_rank=1), dict(uniform=True), dict(v_layout="interleaved16")):
        with pytest.raises(PlanMissError):
            store.get(big.replace(**other), "cpu")


def test_signature_round_trip_and_descriptor():
    s = SageBlockSparseSignature(1, 24, 100, 200, 3, has_counts=True, block_sizes_rank=2, v_layout="interleaved16", return_lse=True)
    assert type(s).from_json(s.to_json()) == s and "interleaved16" in s.label
    d = s.lower()
    assert isinstance(d, SparseBlockDescriptor) and d.kind == "padded/strided" and d.has_counts and d.masks == {"length", "block_sizes"}
    assert not dataclasses.replace(s, uniform=True).lower().has_counts


# -- errors -------------------------------------------------------------------------------------------

def fp8(*shape):
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


BAD = [
    (TypeError, "q_int8", dict(q=[1])), (TypeError, "q_int8", dict(q=torch.zeros(1, 2, 130, 128))),
    (TypeError, "k_int8", dict(k=torch.zeros(1, 2, 330, 128, dtype=torch.uint8))),
    (TypeError, "v_fp8", dict(v=torch.zeros(1, 2, 128, 384, dtype=torch.int8))),
    (TypeError, "q_scale", dict(q_scale=torch.zeros(1, 2, 8, dtype=torch.float64))),
    (TypeError, "block_sparse_num", dict(count=2.0)), (TypeError, "block_sparse_num", dict(count=True)), (TypeError, "softmax_scale", dict(scale="1")),
    (ValueError, "q_int8", dict(q=torch.zeros(2, 130, 128, dtype=torch.int8))), (ValueError, "q_int8", dict(q=torch.zeros(1, 2, 130, 64, dtype=torch.int8))),
    (ValueError, "k_int8", dict(k=torch.zeros(1, 1, 330, 128, dtype=torch.int8))),
    (ValueError, "k_int8", dict(k=torch.zeros(1, 2, 128, 330, dtype=torch.int8).mT)),
    (ValueError, "v_fp8", dict(v=fp8(1, 2, 128, 330))), (ValueError, "v_fp8", dict(v=fp8(1, 2, 384, 128))),
    (ValueError, "k_scale", dict(k_scale=torch.ones(1, 2, 5))),
    (ValueError, "v_scale", dict(v_scale=torch.ones(1, 2, 384))), (ValueError, "q2k_block_index", dict(index=torch.zeros(1, 2, 3, 5, dtype=torch.int64))),
    (ValueError, "q2k_block_index", dict(index=torch.zeros(1, 2, 3, 0, dtype=torch.int32))),
    (ValueError, "q2k_block_index", dict(index=torch.zeros(1, 2, 4, 5, dtype=torch.int32))),
    (ValueError, "block_sparse_num", dict(count=6)), (ValueError, "block_sparse_num", dict(count=-1)),
    (ValueError, "block_sparse_num", dict(count=6, nums=torch.ones(1, 2, 3, dtype=torch.int32))),
    (ValueError, "q2k_block_nums", dict(nums=torch.ones(1, 2, 3, dtype=torch.int64))),
    (ValueError, "q2k_block_nums", dict(nums=torch.ones(1, 2, 4, dtype=torch.int32))),
    (ValueError, "block_sizes", dict(sizes=torch.ones(7, dtype=torch.int32))), (ValueError, "block_sizes", dict(sizes=torch.ones(6))),
    (ValueError, "block_sizes", dict(sizes=torch.ones(1, 1, 1, 6, dtype=torch.int32))), (ValueError, "softmax_scale", dict(scale=0.0)),
    (ValueError, "softmax_scale", dict(scale=-1.0)), (ValueError, "softmax_scale", dict(scale=math.inf)), (ValueError, "softmax_scale", dict(scale=math.nan)),
]


@pytest.mark.parametrize("error, name, change", BAD, ids=lambda x: str(x)[:40])
def test_bad_arguments_name_themselves(error, name, change):
    case = SageCase().make()
    sage_block_sparse_attention(*positional(case))      # a call that passed lets none of these through
    for field, value in change.items():
        setattr(case, field, value)
    with pytest.raises(error, match=name):
        sage_block_sparse_attention(*positional(case))


@pytest.mark.parametrize("error, match, given", [
    (ValueError, "interleaved16", dict(v_layout="swizzled")), (TypeError, "v_layout", dict(v_layout=1)),
    (TypeError, "uniform_block_count", dict(uniform_block_count=1)),
    (TypeError, "contiguous_block_indices", dict(contiguous_block_indices=None)), (ValueError, "uniform_block_count", dict(contiguous_block_indices=True)),
    (TypeError, "return_lse", dict(return_lse=1)), (TypeError, "out", dict(out=torch.zeros(1, 2, 130, 128))),
    (ValueError, "out", dict(out=torch.zeros(1, 2, 131, 128, dtype=torch.bfloat16))), (TypeError, "out", dict(out=3)),
    (ValueError, "lse", dict(lse=torch.zeros(1, 2, 131))), (ValueError, "engine", dict(engine="nope")), (NotImplementedError, "cudnn", dict(engine="cudnn"))],
    ids=str)
def test_bad_keywords(error, match, given):
    with pytest.raises(error, match=match):
        sage_block_sparse_attention(*positional(SageCase().make()), **given)


def test_out_must_not_share_memory():
    case = SageCase(seq_q=64, seq_k=128).make()
    memory = torch.zeros(2 * case.q.numel(), dtype=torch.int8)
    case.q = memory[:case.q.numel()].view(case.q.shape)
    with pytest.raises(ValueError, match="q_int8"):
        sage_block_sparse_attention(*positional(case), out=memory.view(torch.bfloat16).view(case.q.shape))


def test_the_drop_in_backends():
    case = SageCase().make()
    with pytest.raises(ValueError, match="backend"):
        bsa_attn_sm120_blk64_sage_fwd(*positional(case), backend="triton")
    with pytest.raises(ValueError, match="out"):
        bsa_attn_sm120_blk64_sage_fwd(*positional(case))
    with pytest.raises(TypeError, match="uniform_block_count"):
        bsa_attn_sm120_blk64_sage_fwd(*positional(case), backend="cute_dsl", uniform_block_count=1)
    want = sage_block_sparse_attention(*positional(case))
    got = bsa_attn_sm120_blk64_sage_fwd(*positional(case), backend="cute_dsl", contiguous_block_indices=True)
    assert torch.equal(got, want)
    assert torch.equal(bsa_attn_sm120_blk64_sage_fwd(*positional(case), backend="cute_dsl", out=torch.empty_like(want)), want)


@pytest.mark.parametrize("error, name, change", [
    (TypeError, "q", dict(q=3)), (TypeError, "k", dict(k=torch.zeros(1, 2, 70, 128))), (TypeError, "q", dict(q=torch.zeros(1, 2, 70, 128, dtype=torch.int8))),
    (ValueError, "v", dict(v=torch.zeros(1, 2, 71, 128, dtype=torch.bfloat16))), (ValueError, "q", dict(q=torch.zeros(1, 2, 70, 64, dtype=torch.bfloat16))),
    (ValueError, "q", dict(q=torch.zeros(1, 2, 0, 128, dtype=torch.bfloat16))), (ValueError, "v_layout", dict(v_layout="x")),
    (TypeError, "smooth_k", dict(smooth_k=1))], ids=str)
def test_bad_arguments_of_the_quantizer(error, name, change):
    x = torch.zeros(1, 2, 70, 128, dtype=torch.bfloat16)
    with pytest.raises(error, match=name):
        quantize_sage_qkv(**{"q": x, "k": x, "v": x, **change})
    for bad in ((x, "natural", "natural"), (fp8(1, 15), "natural", "natural"), (fp8(16), "x", "natural")):
        with pytest.raises((TypeError, ValueError)):
            convert_sage_v_layout(*bad)
