"""Sage block-sparse attention on the CPU, in fp32: Q.K^T is exact there, and P is not rounded."""

from __future__ import annotations

import torch

from ..arguments import SageArguments
from .sage_layout import natural_order

BLOCK = 64
GATHER_BYTES = 64 << 20         # of K and V rows gathered at once


def attend_sage(a: SageArguments) -> None:
    """Fill `a.out` and, where wanted, `a.lse`."""
    batch, heads, seq_len_q, head_dim = a.q.shape
    rows, capacity = a.block_index.shape[2:]
    step = max(1, GATHER_BYTES // (8 * capacity * BLOCK * head_dim))
    valid = _valid_keys(a)
    v = natural_order(a.v.view(torch.uint8)) if a.v_layout == "interleaved16" else a.v.view(torch.uint8)
    for b in range(batch):
        for h in range(heads):
            k = a.k[b, h].float()
            v_head = (v[b, h].view(torch.float8_e4m3fn).float() * a.v_scale[b, h, :, None]).T
            for first in range(0, rows, step):
                last = min(first + step, rows)
                blocks = _listed_blocks(a, b, h, first, last)
                span = slice(BLOCK * first, min(BLOCK * last, seq_len_q))
                out, lse = _attend_rows(a, b, h, span, blocks, valid[b, h], k, v_head)
                a.out[b, h, span] = out.to(a.out.dtype)
                if a.lse is not None:
                    a.lse[b, h, span] = lse


def _valid_keys(a: SageArguments) -> torch.Tensor:
    """Leading visible keys of every block, [B, H, N]."""
    batch, heads, seq_len_k, _ = a.k.shape
    num_blocks = a.k_scale.shape[-1]
    sizes = (seq_len_k - BLOCK * torch.arange(num_blocks, device=a.k.device)).clamp(max=BLOCK)
    if a.block_sizes is not None:
        given = a.block_sizes if a.block_sizes.ndim != 2 else a.block_sizes[:, None]
        sizes = torch.minimum(sizes, given.long())
    return sizes.clamp(min=0).expand(batch, heads, num_blocks)


def _listed_blocks(a: SageArguments, b: int, h: int, first: int, last: int) -> torch.Tensor:
    """Block ids of rows [first, last), -1 where there is none: [rows, longest count]."""
    capacity, num_blocks = a.block_index.shape[3], a.k_scale.shape[-1]
    counts = torch.full((last - first,), a.count, device=a.q.device) if a.counts is None else a.counts[b, h, first:last].long()
    counts = torch.where((counts >= 0) & (counts <= capacity), counts, 0)
    longest = int(counts.max())
    slot = torch.arange(longest, device=a.q.device)
    blocks = a.block_index[b, h, first:last, :longest].long()
    if a.contiguous and longest:                          # one count for all rows: only the last id is read
        final = blocks[:, -1:]
        blocks = torch.where(slot == longest - 1, final, (final - (longest - 1 - slot)) % num_blocks)
    listed = (slot < counts[:, None]) & (blocks >= 0) & (blocks < num_blocks)
    return torch.where(listed, blocks, -1)


def _attend_rows(a: SageArguments, b: int, h: int, span: slice, blocks: torch.Tensor, valid: torch.Tensor, k: torch.Tensor,
                 v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 out [tokens, D] and natural-log lse [tokens] of the query tokens in `span`."""
    tokens = span.stop - span.start
    rows, width = blocks.shape
    listed = blocks.clamp(min=0)
    size = torch.where(blocks >= 0, valid[listed], 0)
    in_block = torch.arange(BLOCK, device=blocks.device)
    visible = (in_block < size[..., None]).view(rows, 1, width * BLOCK)
    keys = (listed[..., None] * BLOCK + in_block).view(rows, width * BLOCK).clamp(max=k.shape[0] - 1)
    q = torch.zeros(rows * BLOCK, k.shape[1], dtype=torch.float32, device=k.device)
    q[:tokens] = a.q[b, h, span].float()
    q_scale = torch.zeros(rows * BLOCK, dtype=torch.float32, device=k.device)
    q_scale[:tokens] = a.q_scale[b, h].repeat_interleave(32)[span]
    k_scale = (a.k_scale[b, h, listed] * a.softmax_scale).repeat_interleave(BLOCK, dim=1)
    scores = torch.bmm(q.view(rows, BLOCK, -1), k[keys].mT) * q_scale.view(rows, BLOCK, 1) * k_scale[:, None]
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1) if width else torch.full((rows, BLOCK), float("-inf"), dtype=torch.float32, device=k.device)
    p = torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    out = torch.bmm(p, v[keys].masked_fill(~visible.mT, 0.0))
    return out.view(rows * BLOCK, -1)[:tokens], lse.view(-1)[:tokens]
