"""Sage block-sparse attention and its quantizer on a GPU, engine by engine."""

from __future__ import annotations

import functools

import pytest
import torch
from oracle_sage import errors, sage_attention
from sage_cases import SageCase, table
from test_sage_operation import keywords, positional

from cudnn_graphs import PlanStore, SageBlockSparseSignature, quantize_sage_qkv, sage_block_sparse_attention
from cudnn_graphs.planning import verdict
from cudnn_graphs.reference.sage_quantize import quantize_on_cpu
from cudnn_graphs.runtime.devices import device_facts

pytestmark = pytest.mark.gpu
ENGINES = ("portable", "sm90")
LIMITS = {"portable": (4e-2, 7e-2, 1e-4), "sm90": (4e-2, 7e-2, 1e-4)}       # P in FP8


@functools.cache
def store() -> PlanStore:
    return PlanStore(None)


@functools.cache
def surface():
    cases = [SageCase(**facts).make().poison() for facts in table()]
    wanted = [sage_attention(case) for case in cases]
    return [(case.to("cuda"), *want) for case, want in zip(cases, wanted, strict=True)]


def served(engine: str) -> None:
    said = verdict(engine, SageBlockSparseSignature(1, 1, 64, 64, 1).lower(), device_facts("cuda"))
    if not said.ok:
        pytest.skip(said.reason)


def run(case, engine, return_lse=True, **given):
    return sage_block_sparse_attention(*positional(case), **keywords(case), return_lse=return_lse, engine=engine, store=store(), **given)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_rule(engine):
    served(engine)
    for case, want, want_lse in surface():
        out = torch.full(case.q.shape, float("nan"), dtype=torch.bfloat16, device="cuda")
        lse = torch.full(case.q.shape[:3], float("nan"), device="cuda")
        got = errors(*run(case, engine, out=out, lse=lse), want, want_lse)
        assert all(x <= limit for x, limit in zip(got, LIMITS[engine], strict=True)), (case, got)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_rule_without_lse(engine):
    """A kernel of its own on Hopper, where the tensor cores sum P."""
    served(engine)
    for case, want, want_lse in surface():
        out = torch.full(case.q.shape, float("nan"), dtype=torch.bfloat16, device="cuda")
        got = errors(run(case, engine, return_lse=False, out=out), want_lse, want, want_lse)
        assert all(x <= limit for x, limit in zip(got, LIMITS[engine], strict=True)), (case, got)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("return_lse", [True, False])
@pytest.mark.parametrize("layout", ["natural", "interleaved16"])
def test_one_hot_rows_place_every_token(engine, layout, return_lse):
    served(engine)
    for facts in (dict(), dict(sizes_rank=3), dict(uniform=True, contiguous=True), dict(seq_k=4033, capacity=12, count=12),
                  dict(seq_k=129, capacity=3, count=3)):
        case = SageCase(v_layout=layout, seq_q=200, **facts).make().one_hot()
        got = run(case.to("cuda"), engine, return_lse)
        out, seen = got[0] if return_lse else got, case.target >= 0
        assert torch.equal(out.cpu().float()[seen], case.code.view(torch.float8_e4m3fn).float().T[case.target[seen]])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("return_lse", [True, False])
@pytest.mark.parametrize("name, index, queries", [("q_scale", (..., 1), slice(32, 64)), ("k_scale", (...,), slice(None))])
def test_scores_that_are_nan_show(engine, return_lse, name, index, queries):
    """A NaN in q makes the scale of 32 queries NaN. Nothing else does: zeros and lse -inf are for queries without a key."""
    served(engine)
    case = SageCase(heads=2, seq_q=200, seq_k=300).make()
    getattr(case, name)[index] = float("nan")
    got = run(case.to("cuda"), engine, return_lse)
    for result in got if return_lse else (got,):
        seen = torch.zeros(result.shape[:3], dtype=torch.bool, device="cuda")
        seen[:, :, queries] = True
        assert result[seen].isnan().all() and result[~seen].isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_repeatable(engine):
    served(engine)
    case = SageCase(heads=3, seq_q=700, counts=True).make().to("cuda")
    first, first_lse = run(case, engine)
    for _ in range(3):
        out, lse = run(case, engine)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


@pytest.mark.parametrize("engine", ENGINES)
def test_more_than_2_31_elements(engine):
    """The last blocks of a K and V of 2.2 G elements, against the same blocks cut out."""
    served(engine)
    blocks, listed = 268_436, 4
    g = torch.Generator().manual_seed(0)
    small = SageCase(heads=1, seq_q=64, seq_k=64 * listed - 5, capacity=listed, count=listed).make()
    small.index[..., :] = torch.arange(listed)
    want = sage_attention(small)
    k = torch.zeros(1, 1, 64 * blocks - 5, 128, dtype=torch.int8, device="cuda")
    v = torch.zeros(1, 1, 128, 64 * blocks, dtype=torch.uint8, device="cuda")
    assert k.numel() > 2**31
    k[:, :, -small.k.shape[2]:] = small.k.cuda()
    v[..., -64 * listed:] = small.v.view(torch.uint8).cuda()
    big = SageCase(heads=1, seq_q=64, seq_k=64, capacity=listed, count=listed)
    for name in ("q", "q_scale", "v_scale", "sizes", "nums"):
        setattr(big, name, None if getattr(small, name) is None else getattr(small, name).cuda())
    big.k, big.v, big.k_scale = k, v.view(torch.float8_e4m3fn), torch.rand(1, 1, blocks, generator=g).cuda()
    big.k_scale[..., -listed:] = small.k_scale.cuda()
    big.index = (small.index + blocks - listed).cuda()
    total, worst, lse_error = errors(*run(big, engine), *want)
    assert total < 4e-2 and worst < 7e-2 and lse_error < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_quantizer_agrees_with_the_cpu_bit_for_bit(dtype):
    g = torch.Generator().manual_seed(5)
    for batch, heads, seq_q, seq_k in ((1, 1, 1, 1), (2, 3, 130, 200), (1, 2, 63, 65), (1, 3, 700, 4033), (2, 2, 64, 2049)):
        q, k, v = (torch.randn(batch, heads, n, 128, generator=g).to(dtype) for n in (seq_q, seq_k, seq_k))
        k += (torch.randn(128, generator=g) * 5).to(dtype)
        v[..., 0], v[..., 1] = 0, -0.0
        fused = torch.stack([k, v]).permute(1, 3, 0, 2, 4).contiguous().cuda()          # [B, S, 2, H, D]
        views = (q.mT.contiguous().cuda().mT, fused[:, :, 0].transpose(1, 2), fused[:, :, 1].transpose(1, 2))
        for layout in ("natural", "interleaved16"):
            for smooth in (True, False):
                want = quantize_on_cpu(q, k, v, layout, smooth)
                for given in ((q.cuda(), k.cuda(), v.cuda()), views):
                    got = quantize_sage_qkv(*given, v_layout=layout, smooth_k=smooth)
                    for name, a, b in zip(got._fields, got, want, strict=False):
                        assert torch.equal(a.cpu().view(torch.uint8), b.contiguous().view(torch.uint8)), name


def test_the_quantizer_can_be_captured():
    q, k, v = (torch.randn(1, 2, n, 128, device="cuda", dtype=torch.bfloat16) for n in (300, 500, 500))
    want = quantize_sage_qkv(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        got = quantize_sage_qkv(q, k, v)
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got[:7], want[:7], strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_quantize_then_attend_is_close_to_attention(engine):
    served(engine)
    q, k, v = (torch.randn(1, 4, 2048, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for offset in (0, 10):
        k[..., :4] += offset
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        t = quantize_sage_qkv(q, k, v)
        index = torch.arange(32, dtype=torch.int32, device="cuda").expand(1, 4, 32, 32).contiguous()
        out = sage_block_sparse_attention(*t[:6], index, 32, engine=engine, store=store())
        assert torch.nn.functional.cosine_similarity(out.float().flatten(), exact.float().flatten(), dim=0) > 0.998


def test_a_plan_quotes_cudnn():
    plan = store().get(SageBlockSparseSignature(1, 2, 130, 330, 5), "cuda")
    assert plan.describe()["compiled"]["cudnn"]["refusal"] and "cudnn" in plan.describe()["declined"]
