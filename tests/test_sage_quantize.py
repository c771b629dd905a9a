"""The Sage quantizer and the two token orders of V, on the CPU."""

import math

import pytest
import torch
from oracle_sage import SLOT_TOKENS

from cudnn_graphs.reference import sage_quantize
from cudnn_graphs.reference.sage_layout import interleaved_order, natural_order


def mean_in_order(x):
    """The fixed tree, one scalar channel at a time, spelled out in fp32."""
    def tree(values):
        while len(values) > 1:
            values = [a + b for a, b in zip(values[0::2], values[1::2], strict=True)]
        return values[0]
    zero = torch.zeros(())
    tokens = list(x) + [zero] * (-len(x) % 64)
    blocks = [tree(tokens[i:i + 64]) for i in range(0, len(tokens), 64)]
    lanes = [zero] * 32
    for i, s in enumerate(blocks):
        lanes[i % 32] = lanes[i % 32] + s if i >= 32 else s
    return tree(lanes) / torch.tensor(float(len(x)))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200, 2049, 4033])
def test_the_mean_is_the_fixed_tree(tokens):
    x = torch.randn(tokens, generator=torch.Generator().manual_seed(tokens)) + 3
    got = sage_quantize.token_mean(x[None, None, :, None].expand(1, 1, tokens, 2))
    assert torch.equal(got[0, 0, 0], mean_in_order(x)) and torch.equal(got[..., 0], got[..., 1])
    assert math.isclose(float(got[0, 0, 0]), float(x.double().mean()), rel_tol=1e-5)


def quantized(dtype=torch.bfloat16, seq_q=130, seq_k=200, v_layout="natural", smooth_k=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, n, 128, generator=g).to(dtype) for n in (seq_q, seq_k, seq_k))
    k[..., :4] += 10
    return (q, k, v), sage_quantize.quantize_on_cpu(q, k, v, v_layout, smooth_k)


@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("seq_q, seq_k", [(1, 1), (63, 65), (130, 200), (128, 129)])
def test_scales_and_values_are_the_divisions_of_the_specification(seq_q, seq_k, smooth_k):
    (q, k, v), (q8, k8, v8, q_scale, k_scale, v_scale, mean) = quantized(seq_q=seq_q, seq_k=seq_k, smooth_k=smooth_k)
    assert q8.shape == q.shape and k8.shape == k.shape and v8.shape == (2, 3, 128, -(-seq_k // 64) * 64) and v8.dtype == torch.float8_e4m3fn
    assert q_scale.shape == (2, 3, -(-seq_q // 128) * 4) and k_scale.shape == (2, 3, -(-seq_k // 64)) and v_scale.shape == mean.shape == (2, 3, 128)
    assert smooth_k or not mean.any()
    x = k.float() - mean[:, :, None]
    for i in range(q_scale.shape[2]):
        rows = q.float()[:, :, 32 * i:32 * i + 32]
        amax = rows.abs().amax((2, 3)) if rows.shape[2] else torch.zeros(2, 3)
        assert torch.equal(q_scale[..., i], torch.maximum(amax, torch.tensor(1e-7)) / torch.tensor(127.0))
        assert torch.equal(q8[:, :, 32 * i:32 * i + 32].float(), (rows / q_scale[..., i, None, None]).round())
    for n in range(k_scale.shape[2]):
        rows = x[:, :, 64 * n:64 * n + 64]
        assert torch.equal(k_scale[..., n], torch.maximum(rows.abs().amax((2, 3)), torch.tensor(1e-7)) / torch.tensor(127.0))
        assert torch.equal(k8[:, :, 64 * n:64 * n + 64].float(), (rows / k_scale[..., n, None, None]).round())
    assert torch.equal(v_scale, v.float().abs().amax(2) / torch.tensor(448.0))
    assert torch.equal(v8[..., :seq_k].view(torch.uint8), (v.float() / v_scale[:, :, None]).mT.to(torch.float8_e4m3fn).contiguous().view(torch.uint8))
    assert not v8.view(torch.uint8)[..., seq_k:].any()


def test_interleaved_slots_hold_the_tokens_that_the_specification_lists():
    tokens = torch.arange(48, dtype=torch.uint8).expand(2, 48)
    interleaved = interleaved_order(tokens)
    assert interleaved[0].tolist() == [16 * g + t for g in range(3) for t in SLOT_TOKENS]
    assert torch.equal(natural_order(interleaved), tokens)
    channels_last = tokens.repeat(3, 1).mT.contiguous().mT         # as V may lie on its way through the CPU quantizer
    assert not channels_last.is_contiguous() and torch.equal(interleaved_order(channels_last), interleaved.repeat(3, 1))
    _, natural = quantized()
    _, other = quantized(v_layout="interleaved16")
    assert torch.equal(natural_order(other[2].view(torch.uint8)), natural[2].view(torch.uint8))


def test_zeros_and_strided_inputs():
    zeros = torch.zeros(1, 1, 70, 128, dtype=torch.float16)
    parts = sage_quantize.quantize_on_cpu(zeros, zeros, zeros, "natural", True)
    assert not any(p.view(torch.uint8).any() for p in parts[:3]) and torch.equal(parts[3], torch.full((1, 1, 4), 1e-7) / torch.tensor(127.0))
    fused = torch.randn(1, 70, 3, 2, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    views = [fused[:, :, i].transpose(1, 2) for i in range(3)]
    for a, b in zip(sage_quantize.quantize_on_cpu(*views, "natural", True), sage_quantize.quantize_on_cpu(*(x.contiguous() for x in views), "natural", True),
                    strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
