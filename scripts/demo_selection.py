"""Which KV blocks each block of queries attends to: those whose pooled key scores best, and as many at random to compare with."""

from __future__ import annotations

import torch
from demo_cache import PagedCache


def select_blocks(cache: PagedCache, requests: list[int], q: torch.Tensor, q_block_size: int, keep: int, *,
                  at_random: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """At most `keep` blocks for each (request, head, block of queries), always with the first block and the newest.

    q [B, Sq, heads, head_dim], the last Sq tokens of each request. Returns block_indptr int32 [B, heads, R + 1] and
    block_indices int32 [nnz], as the attention takes them.
    """
    rows, counts = [], []
    for request, queries in zip(requests, q):
        pooled_keys = cache.pooled_keys(request)
        first_query = cache.lengths[request] - len(queries)
        of_request = []
        for start in range(0, len(queries), q_block_size):
            block = queries[start:start + q_block_size].float()
            visible = (first_query + start + len(block) - 1) // cache.block_size + 1
            scores = torch.einsum("hd,hnd->hn", block.mean(0), pooled_keys[:, :visible])
            of_request.append(_best(torch.rand_like(scores) if at_random else scores, keep))
        rows.append(torch.cat(of_request, dim=1))
        counts.append([row.shape[1] for row in of_request])
    return _offsets(counts, q.shape[2], q.device), torch.cat([row.flatten() for row in rows]).int()


def _best(scores: torch.Tensor, keep: int) -> torch.Tensor:
    """[heads, n] ids, ascending."""
    scores[:, [0, -1]] = float("inf")
    return scores.topk(min(keep, scores.shape[1]), dim=1).indices.sort(dim=1).values


def _offsets(counts: list[list[int]], heads: int, device: torch.device) -> torch.Tensor:
    offsets, end = [], 0
    for of_request in counts:
        for _ in range(heads):
            offsets.append([end + sum(of_request[:i]) for i in range(len(of_request) + 1)])
            end = offsets[-1][-1]
    return torch.tensor(offsets, dtype=torch.int32, device=device).view(len(counts), heads, -1)
