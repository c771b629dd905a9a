"""Float64 oracle of paged block-sparse attention: one query token at a time, the visible keys written out.

Reads only visible keys and values, so NaN anywhere else cannot reach it. `rows` limits the work to some
(request, query token) pairs, for checks at sizes where everything would take minutes.
"""

from __future__ import annotations

import torch


def visible_tokens(case, b: int, h: int, i: int) -> list[int]:
    """Logical tokens that query token i of request b attends to under KV head h, ascending."""
    length = int(case.seq_lens[b])
    heads = case.block_indptr.shape[1]
    row = case.block_indptr[b, h if heads > 1 else 0]
    r = i // case.q_block_size
    last = length - 1 if case.mask_type == "dense" else length - case.q.shape[1] + i
    tokens = []
    for block in case.block_indices[int(row[r]):int(row[r + 1])].tolist():
        for t in range(block * case.kv_block_size, min((block + 1) * case.kv_block_size, length)):
            if t <= last and (case.valid_bits is None or case.bit(b, t)):
                tokens.append(t)
    return tokens


def paged_attention(case, rows: list[tuple[int, int]] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """out [n, Hq, D] and natural-log lse [n, Hq] in float64 on the CPU, n query tokens: all of them in order, or `rows`."""
    batch, seq_len_q, num_qo_heads, head_dim = case.q.shape
    k_cache, v_cache = case.k_cache, case.v_cache
    num_kv_heads, page_size = k_cache.shape[1], k_cache.shape[2]
    group = num_qo_heads // num_kv_heads
    rows = [(b, i) for b in range(batch) for i in range(seq_len_q)] if rows is None else rows
    out = torch.zeros(len(rows), num_qo_heads, head_dim, dtype=torch.float64)
    lse = torch.full((len(rows), num_qo_heads), float("-inf"), dtype=torch.float64)
    for n, (b, i) in enumerate(rows):
        for h in range(num_kv_heads):
            tokens = visible_tokens(case, b, h, i)
            if not tokens:
                continue
            page = torch.tensor([case.page_of(b, t) for t in tokens], device=k_cache.device)
            slot = torch.tensor([t % page_size for t in tokens], device=k_cache.device)
            heads = slice(h * group, (h + 1) * group)
            k, v = k_cache[page, h, slot].double(), v_cache[page, h, slot].double()
            score = case.q[b, i, heads].double() @ k.T * case.scale
            lse[n, heads] = torch.logsumexp(score, -1).cpu()
            out[n, heads] = (torch.softmax(score, -1) @ v).cpu()
    return out, lse


BARS = {torch.bfloat16: (3.5e-3, 1e-2), torch.float16: (1e-3, 2e-3)}    # relative L2 overall, and of the worst (query, head) row


def assert_close(out: torch.Tensor, want: torch.Tensor, lse: torch.Tensor | None = None, want_lse: torch.Tensor | None = None) -> None:
    """out [n, Hq, D] against float64, overall and row by row, zeros exactly; lse to 1e-4 absolute."""
    overall, worst = BARS[out.dtype]
    got = out.detach().cpu().double()
    assert torch.isfinite(got).all(), f"{int((~torch.isfinite(got)).sum())} values are not finite"
    empty = want.flatten(0, -2).abs().amax(-1) == 0
    assert (got.flatten(0, -2)[empty] == 0).all(), "a row with no visible key is not exactly zero"
    error, norm = (got - want).flatten(0, -2).norm(dim=-1), want.flatten(0, -2).norm(dim=-1)
    if (~empty).any():
        assert error.norm() <= overall * norm.norm(), f"relative L2 {error.norm() / norm.norm():.2e} over all"
        rows = error[~empty] / norm[~empty]
        assert rows.max() <= worst, f"relative L2 {rows.max():.2e} in row {int(rows.argmax())} of the rows with keys"
    if lse is not None:
        got_lse = lse.detach().cpu().double()
        assert torch.equal(torch.isinf(got_lse), torch.isinf(want_lse)), "lse is -inf in other rows than it should be"
        seen = torch.isfinite(want_lse)
        if seen.any():
            assert (got_lse - want_lse)[seen].abs().max() <= 1e-4, f"lse off by {(got_lse - want_lse)[seen].abs().max():.1e}"
