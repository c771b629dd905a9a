"""Float64 oracle of paged block-sparse attention: the visible keys of each row written out, one softmax over them.

A row's keys are gathered only when at least one of its queries sees them, so a NaN anywhere else cannot reach the
result; a NaN that some queries of a row see and others do not is kept apart query by query.
"""

from __future__ import annotations

import torch


def paged_attention(case) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B * Sq, Hq, D] and natural-log lse [B * Sq, Hq] in float64 on the CPU."""
    batch, seq_len_q, num_qo_heads, head_dim = case.q.shape
    num_kv_heads, page_size = case.k_cache.shape[1:3]
    group = num_qo_heads // num_kv_heads
    q = case.q.cpu().double().unflatten(2, (num_kv_heads, group))
    out = torch.zeros(batch, seq_len_q, num_kv_heads, group, head_dim, dtype=torch.float64)
    lse = torch.full((batch, seq_len_q, num_kv_heads, group), float("-inf"), dtype=torch.float64)
    for b in range(batch):
        table = torch.tensor(case.pages_of[b], dtype=torch.long)
        k_live, v_live = (cache[table.to(cache.device)].cpu().double() for cache in (case.k_cache, case.v_cache))     # logical pages of request b
        for h in range(num_kv_heads):
            for r in range(case.rows):
                tokens = case.row_tokens(b, h, r)
                seen = case.visible(b, r, tokens)
                used = seen.any(0)
                tokens, seen = tokens[used], seen[:, used]
                if not len(tokens):
                    continue
                k, v = k_live[tokens // page_size, h, tokens % page_size], v_live[tokens // page_size, h, tokens % page_size]
                queries = slice(r * case.q_block_size, min((r + 1) * case.q_block_size, seq_len_q))
                out[b, queries, h], lse[b, queries, h] = _attend(q[b, queries, h], k, v, seen, case.scale)
    return out.flatten(2, 3).flatten(0, 1), lse.flatten(2, 3).flatten(0, 1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, G, D], k and v [keys, D], seen [n, keys] -> out [n, G, D], lse [n, G]; a query that sees nothing gets 0 and -inf."""
    if not seen.all() and not (k.isfinite().all() and v.isfinite().all()):
        each = [_attend(q[i:i + 1], k[seen[i]], v[seen[i]], torch.ones(1, int(seen[i].sum()), dtype=torch.bool), scale) for i in range(len(q))]
        return torch.cat([out for out, _ in each]), torch.cat([lse for _, lse in each])
    if not seen.any():
        return torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"), dtype=q.dtype)
    score = (q @ k.T * scale).masked_fill(~seen[:, None], float("-inf"))
    out = torch.softmax(score, -1) @ v
    return torch.where(seen.any(1)[:, None, None], out, 0.0), torch.logsumexp(score, -1)


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
        assert torch.equal(torch.isneginf(got_lse), torch.isneginf(want_lse)), "lse is -inf in other rows than it should be"
        seen = torch.isfinite(want_lse)
        if seen.any():
            off = (got_lse - want_lse)[seen].abs().max()
            assert off <= 1e-4, f"lse off by {off:.1e}"
