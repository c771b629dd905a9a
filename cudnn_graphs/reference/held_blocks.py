"""Which blocks of a paged call a shard of its cache holds, in torch: what kernels/portable/held_blocks.cuh does on a GPU."""

from __future__ import annotations

import torch

from ..arguments import PagedArguments

BAD_BLOCK = 2**31 - 1           # an id past every length: the row that lists it is a bad row on every engine


def keep_held_blocks(a: PagedArguments, block_indptr: torch.Tensor, block_indices: torch.Tensor) -> None:
    """Write the lists of `a` without the blocks whose first page is negative: held elsewhere.

    block_indptr like a.block_indptr; block_indices [B * heads * R * max_blocks_per_row], of which each (request, head) uses
    the front of its share. What cannot be looked up stays listed, and a range that is bad becomes one bad id, so that a bad
    row is bad on every shard.
    """
    for b, (indptr, kept) in enumerate(zip(block_indptr, block_indices.view(len(block_indptr), -1), strict=True)):
        ids, listed = _listed(a, b)
        keep = listed & ~_elsewhere(a, b, ids)
        counts = keep.sum(-1)
        share = kept.numel() // len(indptr)
        starts = torch.arange(b * len(indptr), (b + 1) * len(indptr), device=kept.device)[:, None] * share
        indptr[:, :1] = starts
        indptr[:, 1:] = starts + counts.cumsum(-1)
        place = keep.flatten(1).long().cumsum(-1) - 1 + starts - b * kept.numel()
        sink = torch.where(keep.flatten(1), place, kept.numel())        # what is not kept goes to one spare slot
        spare = torch.empty(kept.numel() + 1, dtype=kept.dtype, device=kept.device)
        spare.scatter_(0, sink.flatten(), ids.flatten())
        kept.copy_(spare[:-1])


def _listed(a: PagedArguments, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 [heads, R, max_blocks_per_row] of request b, and which of them are listed; a bad range lists BAD_BLOCK alone."""
    begin, end = a.block_indptr[b, :, :-1].long(), a.block_indptr[b, :, 1:].long()
    bad = (begin < 0) | (end < begin) | (end > a.block_indices.numel()) | (end - begin > a.max_blocks_per_row)
    step = torch.arange(a.max_blocks_per_row, device=begin.device)
    listed = (step < torch.where(bad, 1, end - begin)[..., None])
    entry = torch.where(listed & ~bad[..., None], begin[..., None] + step, 0)
    ids = torch.full(entry.shape, BAD_BLOCK, dtype=torch.int32, device=begin.device)
    if a.block_indices.numel():
        ids = torch.where(bad[..., None], ids, a.block_indices[entry])
    return ids, listed


def _elsewhere(a: PagedArguments, b: int, ids: torch.Tensor) -> torch.Tensor:
    """Which ids begin inside the live length in a page that the table marks as held by another rank."""
    pages, first, span = a.pages, torch.zeros_like(a.seq_lens[b]).long(), torch.full_like(a.seq_lens[b], a.pages.shape[-1])
    if a.page_indptr is None:
        pages = pages[b]
    else:
        first, last = a.page_indptr[b].long(), a.page_indptr[b + 1].long()
        span = torch.where((first < 0) | (last < first) | (last > pages.numel()), 0, last - first)
    if not pages.numel():
        return torch.zeros_like(ids, dtype=torch.bool)
    token = ids.long() * a.kv_block_size
    logical = token // a.k.shape[2]
    inside = (token >= 0) & (token < a.seq_lens[b]) & (logical < span)
    return inside & (pages[torch.where(inside, first + logical, 0)] < 0)
