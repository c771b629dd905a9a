"""Paged block-sparse attention in torch: chunks of rows against chunks of their own blocks, online softmax in fp32.

Only selected blocks are ever gathered, and a key that a query does not see is replaced before it is multiplied,
so that no byte of it can reach the result.
"""

from __future__ import annotations

import torch

from ..arguments import PagedArguments

CHUNK_ELEMENTS = 1 << 24        # fp32 values of K gathered at once: 64 MB


def attend_paged(a: PagedArguments) -> None:
    """Writes a.out and a.lse. Bad rows (spec: range, ids, pages, length) become zeros with lse -inf."""
    batch, seq_len_q, num_qo_heads, head_dim = a.q.shape
    num_kv_heads = a.k.shape[1]
    rows = a.block_indptr.shape[2] - 1
    begin, count, bad = _ranges(a, rows)
    q = _pack_rows(a.q, num_kv_heads, rows, a.q_block_size).reshape(batch * num_kv_heads * rows, -1, head_dim)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    widest = int(count.max()) if count.numel() else 0
    per_row = max(1, min(widest, 8)) * a.kv_block_size * head_dim
    for chunk in torch.arange(q.shape[0], device=q.device).split(max(1, CHUNK_ELEMENTS // max(per_row, q.shape[1] * head_dim))):
        live = chunk[count[chunk] > 0]
        if live.numel():
            out[live], lse[live], bad[live] = _attend_rows(a, q[live], live, begin[live], count[live], rows)
    out[bad], lse[bad] = 0.0, float("-inf")
    group = num_qo_heads // num_kv_heads
    out = out.view(batch, num_kv_heads, rows, a.q_block_size, group, head_dim).permute(0, 2, 3, 1, 4, 5)
    a.out.copy_(out.reshape(batch, rows * a.q_block_size, num_qo_heads, head_dim)[:, :seq_len_q].to(a.out.dtype))
    if a.lse is not None:
        lse = lse.view(batch, num_kv_heads, rows, a.q_block_size, group).permute(0, 1, 4, 2, 3)
        a.lse.copy_(lse.reshape(batch, num_qo_heads, rows * a.q_block_size)[..., :seq_len_q])


def _ranges(a: PagedArguments, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per flat row: where its list begins, how many ids it has (0 when bad or empty), and whether it is bad."""
    batch, heads = a.q.shape[0], a.k.shape[1]
    indptr = a.block_indptr.long().expand(batch, heads, rows + 1)
    begin, end = indptr[..., :-1], indptr[..., 1:]
    lens = a.seq_lens.long()[:, None, None]
    bad = (begin < 0) | (end < begin) | (end > a.block_indices.numel()) | (end - begin > a.max_blocks_per_row)
    bad |= (lens < 0) | (lens > a.max_seq_len_kv)
    if a.causal:
        bad |= (lens > 0) & (lens < a.q.shape[1])
    count = torch.where(bad | (lens == 0), 0, end - begin)
    return begin.reshape(-1), count.reshape(-1), bad.reshape(-1).clone()


def _pack_rows(q: torch.Tensor, num_kv_heads: int, rows: int, q_block_size: int) -> torch.Tensor:
    """[B, Sq, Hq, D] -> [B, Hkv, R, q_block_size * G, D] in fp32, the ragged last block padded with zeros."""
    batch, seq_len_q, num_qo_heads, head_dim = q.shape
    padded = torch.zeros(batch, rows * q_block_size, num_qo_heads, head_dim, dtype=torch.float32, device=q.device)
    padded[:, :seq_len_q] = q
    packed = padded.view(batch, rows, q_block_size, num_kv_heads, num_qo_heads // num_kv_heads, head_dim)
    return packed.permute(0, 3, 1, 2, 4, 5).reshape(batch, num_kv_heads, rows, -1, head_dim)


def _attend_rows(a: PagedArguments, q: torch.Tensor, flat: torch.Tensor, begin: torch.Tensor, count: torch.Tensor,
                 rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Online softmax of some rows [n, M, D] over their blocks, eight blocks a step. Returns out, lse, bad."""
    heads = a.k.shape[1]
    request, head, row = flat // (heads * rows), flat // rows % heads, flat % rows
    top = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    total = torch.zeros_like(top)
    acc = torch.zeros_like(q)
    bad = torch.zeros(flat.shape, dtype=torch.bool, device=q.device)
    for first in range(0, int(count.max()), 8):
        token, listed, faulty = _tokens(a, begin, count, request, first)
        page, lost = _pages(a, request, token, listed)
        bad |= (faulty | lost).flatten(1).any(1)
        keep = (listed & ~lost).flatten(1)
        token, page = token.flatten(1), page.flatten(1)
        k = a.k[page, head[:, None], token % a.k.shape[2]].float()
        v = a.v[page, head[:, None], token % a.k.shape[2]].float()
        visible = keep[:, None, :] & _visible(a, request, row, token, q.shape[1])
        top, total, acc = _step(q * a.sm_scale, k, v, visible, top, total, acc)
    lse = torch.where(total > 0, top + total.log(), torch.where(total == 0, float("-inf"), total))
    return torch.where(total[..., None] == 0, 0.0, acc / total[..., None]), lse, bad


def _tokens(a: PagedArguments, begin: torch.Tensor, count: torch.Tensor, request: torch.Tensor, first: int) -> tuple[torch.Tensor, ...]:
    """Logical tokens [n, 8, kv_block_size] of the next eight blocks, which of them are live, and which ids are bad."""
    step = torch.arange(first, first + 8, device=begin.device)
    inside = step < count[:, None]
    block = a.block_indices.long()[torch.where(inside, begin[:, None] + step, begin[:, None])]
    length = a.seq_lens.long()[request][:, None]
    faulty = inside & ((block < 0) | (block * a.kv_block_size >= length))
    block = torch.where(inside & ~faulty, block, 0)
    token = block[..., None] * a.kv_block_size + torch.arange(a.kv_block_size, device=begin.device)
    return token, (inside & ~faulty)[..., None] & (token < length[..., None]), faulty[..., None]


def _pages(a: PagedArguments, request: torch.Tensor, token: torch.Tensor, listed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The page of each token (0 where not listed), and which listed tokens have none."""
    if not a.pages.numel():
        return torch.zeros_like(token), listed
    if a.page_indptr is None:
        start, span = request * a.pages.stride(0), torch.full_like(request, a.pages.shape[1])
        flat = torch.as_strided(a.pages, ((a.pages.shape[0] - 1) * a.pages.stride(0) + a.pages.shape[1],), (1,))
    else:
        offsets, flat = a.page_indptr.long(), a.pages
        start, span = offsets[request], offsets[request + 1] - offsets[request]
        span = torch.where((start < 0) | (span < 0) | (start + span > flat.numel()), 0, span)
    logical = token // a.k.shape[2]
    inside = listed & (logical < span[:, None, None])
    page = flat.long()[torch.where(inside, start[:, None, None] + logical, 0)]
    found = inside & (page >= 0) & (page < a.k.shape[0])
    return torch.where(found, page, 0), listed & ~found


def _visible(a: PagedArguments, request: torch.Tensor, row: torch.Tensor, token: torch.Tensor, packed_rows: int) -> torch.Tensor:
    """Which keys each packed query row may see, by the masks inside a block: [n, M or 1, keys]."""
    mask = torch.ones(token.shape[0], 1, token.shape[1], dtype=torch.bool, device=token.device)
    if a.valid_bits is not None:
        words = a.valid_bits.view(torch.int32)[request[:, None], (token // 32).clamp(max=a.valid_bits.shape[1] - 1)]
        mask = ((words >> (token % 32)) & 1).bool()[:, None]
    if a.causal:
        group = packed_rows // a.q_block_size
        query = row[:, None] * a.q_block_size + torch.arange(packed_rows, device=token.device) // group
        last = a.seq_lens.long()[request][:, None] - a.q.shape[1] + query
        mask = mask & (token[:, None] <= last[..., None])
    return mask


def _step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, top: torch.Tensor, total: torch.Tensor,
          acc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One online-softmax step. A value that some query does not see is multiplied only for those that do."""
    score = torch.where(visible, q @ k.transpose(1, 2), float("-inf"))
    new_top = torch.maximum(top, score.amax(-1))
    base = torch.where(new_top == float("-inf"), 0.0, new_top)
    p, carry = (score - base[..., None]).exp(), (top - base).exp()
    seen_by_any = visible.any(1)
    finite = v.isfinite()
    added = p @ torch.where(finite & seen_by_any[..., None], v, 0.0)
    wild = (~finite & seen_by_any[..., None]).any(-1).any(0).nonzero().flatten()
    for key in wild.tolist():       # rare: a visible NaN or Inf, added to exactly the queries that see it
        lone = p[..., key, None] * torch.where(finite[:, key], 0.0, v[:, key])[:, None]
        added = added + torch.where(visible.expand_as(score)[..., key, None], lone, 0.0)
    return new_top, total * carry + p.sum(-1), acc * carry[..., None] + added
