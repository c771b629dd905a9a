"""Float64 oracle of Sage block-sparse attention on the quantized inputs: one row of 64 queries, one key set, one softmax at a time."""

from __future__ import annotations

import torch

SLOT_TOKENS = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


def row_blocks(case, b, h, r):
    """The ids a row reads, in order, as the specification lists them."""
    blocks = case.k_scale.shape[2]
    row = case.index[b, h, r].tolist()
    count = case.count if case.uniform or case.nums is None else int(case.nums[b, h, r])
    if not 0 <= count <= len(row):
        return []
    if case.contiguous and count:
        row = [(row[count - 1] - back) % blocks for back in range(count - 1, 0, -1)] + [row[count - 1]]
    return [n for n in row[:count] if 0 <= n < blocks]


def row_tokens(case, b, h, r):
    tokens = []
    for n in row_blocks(case, b, h, r):
        size = min(64, case.k.shape[2] - 64 * n)
        if case.sizes is not None:
            size = min(size, int(case.sizes[n] if case.sizes.dim() == 1 else case.sizes[b, n] if case.sizes.dim() == 2 else case.sizes[b, h, n]))
        tokens += range(64 * n, 64 * n + max(size, 0))
    return tokens


def value_of(case, b, h, tokens):
    """float64 [tokens, 128] of V's bytes at logical tokens."""
    slots = tokens if case.v_layout == "natural" else [t // 16 * 16 + SLOT_TOKENS.index(t % 16) for t in tokens]
    return (case.v[b, h].view(torch.uint8)[:, slots].view(torch.float8_e4m3fn).double() * case.v_scale[b, h, :, None].double()).T


def sage_attention(case):
    """out [B, H, Sq, 128] and natural-log lse [B, H, Sq] in float64."""
    batch, heads, seq_q, dim = case.q.shape
    out = torch.zeros(batch, heads, seq_q, dim, dtype=torch.float64)
    lse = torch.full((batch, heads, seq_q), float("-inf"), dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for r in range(case.index.shape[2]):
                tokens = row_tokens(case, b, h, r)
                if not tokens:
                    continue
                span = torch.arange(64 * r, min(64 * r + 64, seq_q))
                keys = torch.tensor(tokens)
                scores = case.q[b, h, span].double() @ case.k[b, h, keys].double().T
                scores *= case.q_scale[b, h, span // 32, None].double() * case.k_scale[b, h, keys // 64].double() * case.scale
                lse[b, h, span] = torch.logsumexp(scores, 1)
                out[b, h, span] = torch.exp(scores - lse[b, h, span, None]) @ value_of(case, b, h, tokens)
    return out, lse


def errors(out, lse, want_out, want_lse):
    """Relative L2 over everything and in the worst row, and the worst absolute lse error. AssertionError where finiteness differs."""
    out, lse = out.cpu().double(), lse.cpu().double()
    assert torch.equal(out.isfinite(), want_out.isfinite()), "finite elements differ"
    assert torch.equal(lse == float("-inf"), want_lse == float("-inf")), "empty rows differ"
    empty = want_lse == float("-inf")
    assert not out[empty].any(), "an empty row is not zero"
    if empty.all():
        return 0.0, 0.0, 0.0
    finite = want_out.isfinite().all(-1)
    difference, size = (out - want_out)[finite].norm(dim=-1), want_out[finite].norm(dim=-1)
    worst = (difference / size.clamp(min=1e-30)).max() if difference.numel() else torch.zeros(())
    return float(difference.norm() / size.norm().clamp(min=1e-30)), float(worst), float((lse - want_lse)[~empty].abs().max())
