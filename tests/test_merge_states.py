"""Merging partial attention by lse: exact, whatever a part without keys holds, in any grouping."""

from __future__ import annotations

import pytest
import torch

from cudnn_graphs import merge_attention_states

INF, NAN = float("inf"), float("nan")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def attention(parts, heads_first=False, dtype=torch.float32, device="cpu", scale=1.0):
    """Keys split at `parts` (numbers of keys): each part's out and lse, and float64 over all of them."""
    gen = torch.Generator().manual_seed(sum(parts) + len(parts))
    batch, heads, queries, dim = 2, 3, 5, 16
    q = torch.randn(batch, heads, queries, dim, generator=gen, dtype=torch.float64) * scale
    k, v = (torch.randn(batch, heads, sum(parts), dim, generator=gen, dtype=torch.float64) for _ in range(2))

    def over(keys):
        score = q @ k[:, :, keys].mT
        out, lse = score.softmax(-1) @ v[:, :, keys], score.logsumexp(-1)
        return (out if heads_first else out.transpose(1, 2)).to(device), lse.to(device)

    ends = torch.tensor([0, *parts]).cumsum(0).tolist()
    each = [over(slice(begin, end)) for begin, end in zip(ends[:-1], ends[1:], strict=True)]
    return [out.to(dtype) for out, _ in each], [lse.float() for _, lse in each], *over(slice(None))


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("parts", [[7], [3, 4], [1, 20, 5, 0, 9]])
def test_parts_add_up_to_the_whole(parts, heads_first, device):
    outs, lses, want, want_lse = attention(parts, heads_first, device=device)
    out, lse = merge_attention_states(outs, lses, heads_first=heads_first)
    assert out.shape == want.shape and out.dtype == torch.float32
    assert relative(out, want) < 3e-7 and (lse - want_lse).abs().max() < 2e-6
    stacked = merge_attention_states(torch.stack(outs), torch.stack(lses), heads_first=heads_first)
    assert torch.equal(stacked[0], out) and torch.equal(stacked[1], lse)


@pytest.mark.parametrize("dtype, bar", [(torch.bfloat16, 2.6e-3), (torch.float16, 3.3e-4)])
def test_16_bit_parts_cost_one_more_rounding_whatever_their_number(dtype, bar):
    """Two roundings of 1.7e-3 (bf16) or 2.1e-4: each part's, and the whole's."""
    for parts in ([8, 8], [8] * 8):
        outs, lses, want, _ = attention(parts, dtype=dtype)
        out, _ = merge_attention_states(outs, lses)
        assert out.dtype == dtype and relative(out, want) < bar


def test_merging_in_stages_agrees_to_rounding():
    outs, lses, want, want_lse = attention([4, 9, 2, 6])
    pairs = [merge_attention_states(outs[i:i + 2], lses[i:i + 2]) for i in (0, 2)]
    out, lse = merge_attention_states(*zip(*pairs, strict=True))
    assert relative(out, want) < 3e-7 and (lse - want_lse).abs().max() < 2e-6


@pytest.mark.parametrize("device", DEVICES)
def test_a_part_without_keys_is_not_used(device):
    outs, lses, want, want_lse = attention([6, 5], device=device)
    for filler in (NAN, INF, 7.0):
        nothing = torch.full_like(outs[0], filler), torch.full_like(lses[0], -INF)
        out, lse = merge_attention_states([nothing[0], *outs, nothing[0]], [nothing[1], *lses, nothing[1]])
        assert relative(out, want) < 3e-7 and (lse - want_lse).abs().max() < 2e-6
        out, lse = merge_attention_states([nothing[0]] * 2, [nothing[1]] * 2)
        assert (out == 0).all() and (lse == -INF).all()


def test_empty_for_some_queries_only():
    outs, lses, *_ = attention([6, 5])
    lses[0][0, 1, 2] = -INF
    outs[0][0, 2, 1] = NAN
    out, lse = merge_attention_states(outs, lses)
    assert torch.equal(out[0, 2, 1], outs[1][0, 2, 1]) and lse[0, 1, 2] == lses[1][0, 1, 2]
    assert out.isfinite().all()


def test_a_nan_shows_in_its_own_row_and_nowhere_else():
    for poison in ("out", "lse", "both"):
        outs, lses, *_ = attention([6, 5])
        if poison != "lse":
            outs[1][1, 4, 0] = NAN
        if poison != "out":
            lses[1][1, 0, 4] = NAN
        out, lse = merge_attention_states(outs, lses)
        assert out[1, 4, 0].isnan().all()
        assert lse[1, 0, 4].isnan() == (poison != "out")
        out[1, 4, 0], lse[1, 0, 4] = 0.0, 0.0
        assert out.isfinite().all() and lse.isfinite().all()


def test_scores_far_from_zero_and_far_apart():
    outs, lses, *_ = attention([3, 3])
    for shift in (-3e4, 3e4):
        out, lse = merge_attention_states(outs, [x + shift for x in lses])
        assert out.isfinite().all() and (lse - shift - torch.logaddexp(*lses)).abs().max() < 4e-3      # fp32 near 3e4
    out, lse = merge_attention_states(outs, [lses[0], lses[1] - 500.0])
    assert torch.equal(out, outs[0]) and torch.equal(lse, lses[0])


def test_strided_parts_and_no_gradient():
    outs, lses, want, _ = attention([6, 5])
    wide = [torch.cat([x, x], -1)[..., :16].requires_grad_() for x in outs]
    out, _ = merge_attention_states(wide, [x.mT.contiguous().mT for x in lses])
    assert not out.requires_grad and relative(out, want) < 3e-7


@pytest.mark.parametrize("outs, lses, error, text", [
    ([], [], ValueError, "outs: got 0 parts"),
    ([torch.zeros(2, 3, 4)], [], ValueError, "an lse for each"),
    (7, [torch.zeros(3, 2)], TypeError, "outs: got int"),
    ([7], [torch.zeros(3, 2)], TypeError, r"outs\[0\]: got int"),
    (torch.zeros(()), torch.zeros(()), ValueError, "rank 0"),
    ([torch.zeros(2, 4)], [torch.zeros(2)], ValueError, r"outs\[0\]: got shape \[2, 4\]"),
    ([torch.zeros(2, 3, 4)], [torch.zeros(2, 3)], ValueError, r"lses\[0\]: got shape \[2, 3\]"),
    ([torch.zeros(2, 3, 4)], [torch.zeros(3, 2).half()], TypeError, "lses of torch.float32"),
    ([torch.zeros(2, 3, 4).int()], [torch.zeros(3, 2)], TypeError, "floating dtype"),
    ([torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).half()], [torch.zeros(3, 2)] * 2, TypeError, r"outs\[1\]: got torch.float16"),
    ([torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)], [torch.zeros(3, 2)] * 2, ValueError, r"outs\[1\]: got shape \[2, 3, 5\]"),
    ([torch.zeros(2, 3, 4)] * 2, [torch.zeros(3, 2), torch.zeros(3, 2).double()], TypeError, r"lses\[1\]: got torch.float64"),
])
def test_refusals(outs, lses, error, text):
    with pytest.raises(error, match=text):
        merge_attention_states(outs, lses)
