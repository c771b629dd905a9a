"""Packed query-sparse attention on the CPU, in float32, a chunk of queries at a time.

Only keys and values that some query of the chunk attends are read: NaN elsewhere cannot reach a result.
"""

from __future__ import annotations

import torch

from ..arguments import QuerySparseArguments

BLOCK_TOKENS = 4
_CHUNK_KEYS = 1 << 16           # (query, key) pairs gathered at once: 2 x 256 floats each per KV head


@torch.no_grad()
def query_sparse(arguments: QuerySparseArguments) -> None:
    """Fill out, out_fp32 and lse of one launch."""
    a = arguments
    counts = _candidate_counts(a)
    begin = 0
    for end in _chunk_ends(counts):
        rows, tokens = (_bitmap_pairs if a.indices is None else _indexed_pairs)(a, begin, end)
        _attend(a, begin, end, rows, tokens)
        begin = end


def _candidate_counts(a: QuerySparseArguments) -> list[int]:
    """An upper bound of every query's keys, so that chunks hold about equal work."""
    if a.indices is not None:
        return [a.indices.shape[1]] * a.q.shape[0]
    assert a.sel_blocks is not None
    return [BLOCK_TOKENS * n for n in a.sel_blocks.ne(0).sum(1).tolist()]


def _chunk_ends(counts: list[int]) -> list[int]:
    ends, pending = [], 0
    for t, count in enumerate(counts):
        pending += max(count, 1)
        if pending >= _CHUNK_KEYS:
            ends.append(t + 1)
            pending = 0
    if pending:
        ends.append(len(counts))
    return ends


def _bitmap_pairs(a: QuerySparseArguments, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, token) of every visible pair of queries [begin, end), rows from 0, ascending, none twice."""
    assert a.sel_blocks is not None and a.lo is not None and a.hi is not None and a.block_first is not None and a.block_last is not None
    rows, blocks = torch.nonzero(a.sel_blocks[begin:end], as_tuple=True)
    first, lo, hi = a.block_first.long()[blocks], a.lo.long()[begin:end][rows], a.hi.long()[begin:end][rows]
    last = torch.minimum(torch.minimum(a.block_last.long()[blocks], first + BLOCK_TOKENS - 1), hi)
    tokens = first[:, None] + torch.arange(BLOCK_TOKENS, device=first.device)
    visible = (tokens >= lo[:, None]) & (tokens <= last[:, None]) & (tokens >= 0) & (tokens < a.q.shape[0])
    return _unique(rows[:, None].expand_as(tokens)[visible], tokens[visible], a.q.shape[0])


def _indexed_pairs(a: QuerySparseArguments, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert a.indices is not None
    tokens = a.indices[begin:end].long()
    rows = torch.arange(end - begin, device=tokens.device)[:, None].expand_as(tokens)
    visible = (tokens >= 0) & (tokens <= rows + begin)
    return _unique(rows[visible], tokens[visible], a.q.shape[0])


def _unique(rows: torch.Tensor, tokens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = torch.unique(rows * total + tokens)
    return pairs // total, pairs % total


def _attend(a: QuerySparseArguments, begin: int, end: int, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    queries, heads_kv, dim = end - begin, a.k.shape[1], a.q.shape[2]
    counts = torch.bincount(rows, minlength=queries)
    slot = torch.arange(rows.numel(), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    width = max(int(counts.max()), 1)
    shape = queries, width, heads_kv, dim
    keys, values = (torch.zeros(shape, dtype=torch.float32, device=rows.device).index_put_((rows, slot), x[tokens].float()) for x in (a.k, a.v))
    listed = torch.arange(width, device=rows.device) < counts[:, None]
    q = a.q[begin:end].float().view(queries, heads_kv, -1, dim)
    scores = torch.einsum("tghd,twgd->tghw", q, keys) * a.scale
    scores = torch.where(listed[:, None, None, :], scores, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(listed[:, None, None, :], torch.exp(scores - lse[..., None]), 0.0)
    out = torch.einsum("tghw,twgd->tghd", weights, values).reshape(queries, -1, dim)
    a.out_fp32[begin:end] = out
    a.out[begin:end] = out.to(a.out.dtype)
    a.lse[:, begin:end] = lse.reshape(queries, -1).T
