"""Float64 oracle of packed query-sparse attention: one query, one key set, one softmax at a time."""

from __future__ import annotations

import torch


def bitmap_keys(t, sel_blocks, lo, hi, block_first, block_last, total):
    """The tokens that query t attends, ascending."""
    keys = set()
    for b in range(sel_blocks.shape[1]):
        if sel_blocks[t, b] != 0:
            for k in range(int(block_first[b]), min(int(block_last[b]), int(block_first[b]) + 3) + 1):
                if max(int(lo[t]), 0) <= k <= min(int(hi[t]), total - 1):
                    keys.add(k)
    return sorted(keys)


def indexed_keys(t, indices):
    return sorted({i for i in indices[t].tolist() if 0 <= i <= t})


def attend(q, k, v, keys_of, scale):
    """out [T, Hq, D] and natural-log lse [Hq, T] in float64; keys_of(t) lists what query t attends."""
    total, heads, dim = q.shape
    group = heads // k.shape[1]
    q, k, v = (x.cpu().double() for x in (q, k, v))
    out = torch.zeros(total, heads, dim, dtype=torch.float64)
    lse = torch.full((heads, total), float("-inf"), dtype=torch.float64)
    for t in range(total):
        keys = keys_of(t)
        for h in range(heads if keys else 0):
            scores = (k[keys, h // group] @ q[t, h]) * scale
            lse[h, t] = torch.logsumexp(scores, 0)
            out[t, h] = torch.exp(scores - lse[h, t]) @ v[keys, h // group]
    return out, lse


def oracle_bitmap(q, k, v, sel_blocks, metadata, scale):
    lo, hi, _, _, first, last = (x.cpu() for x in metadata)
    sel = sel_blocks.cpu()
    return attend(q, k, v, lambda t: bitmap_keys(t, sel, lo, hi, first, last, q.shape[0]), scale)


def oracle_indexed(q, k, v, indices, scale):
    indices = indices.cpu()
    return attend(q, k, v, lambda t: indexed_keys(t, indices), scale)


# -- the same for larger T: whole matrices, on any device, finite inputs only -----------------------------

def visible_by_bitmap(sel_blocks, metadata):
    """[T, T] bool: whether query t attends token k."""
    total, device = metadata.lo.numel(), sel_blocks.device
    visible = torch.zeros(total, total, dtype=torch.bool, device=device)
    last = torch.minimum(metadata.block_last, metadata.block_first + 3)
    for j in range(4):
        token = metadata.block_first + j
        blocks = torch.nonzero((token <= last) & (token >= 0) & (token < total)).flatten()
        visible[:, token[blocks].long()] |= sel_blocks[:, blocks] != 0
    token = torch.arange(total, device=device)
    return visible & (token >= metadata.lo[:, None]) & (token <= metadata.hi[:, None])


def visible_by_indices(indices):
    total = indices.shape[0]
    listed = (indices >= 0) & (indices <= torch.arange(total, device=indices.device)[:, None])
    count = torch.zeros(total, total, dtype=torch.int32, device=indices.device)
    return count.scatter_add_(1, indices.clamp(0, total - 1).long(), listed.int()) > 0


def attend_dense(q, k, v, visible, scale):
    """out [T, Hq, D] and lse [Hq, T] in float64."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.where(visible, torch.einsum("thd,khd->htk", q.double(), keys) * scale, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(visible, torch.exp(scores - lse[..., None]), 0.0)
    return torch.einsum("htk,khd->thd", weights, values), lse


def errors(out, lse, want_out, want_lse):
    """Relative L2 over everything and in the worst (query, head) row that is finite, and the worst absolute lse error.

    Raises AssertionError where finiteness differs."""
    out, lse, want_out, want_lse = (x.cpu().double() for x in (out, lse, want_out, want_lse))
    assert torch.equal(out.isfinite(), want_out.isfinite()), "finite elements differ"
    assert torch.equal(lse.isfinite(), want_lse.isfinite()) and torch.equal(lse.isneginf(), want_lse.isneginf()), "finite lse differ"
    rows = want_out.isfinite().all(-1) & want_lse.T.isfinite()
    empty = want_lse.T.isneginf()
    assert not out[empty].any(), "an empty row is not zero"
    if not rows.any():
        return 0.0, 0.0, 0.0
    diff, want = (out - want_out)[rows], want_out[rows]
    worst = (diff.norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-20)).max().item()
    finite = want_lse.isfinite()
    return (diff.norm() / want.norm()).item(), worst, (lse - want_lse)[finite].abs().max().item()
