"""Exact attention in fp32, to compare the demo's results with."""

from __future__ import annotations

import torch
from demo_cache import PagedCache


def exact_attention(cache: PagedCache, request: int, q: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """q [Sq, heads, head_dim] over the keys of a request that `visible` [heads or 1, Sq, length] allows; fp32, like q."""
    k, v = cache.read(request)
    scores = q.transpose(0, 1).float() @ k.mT * q.shape[2] ** -0.5
    return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def causal_mask(length: int, seq_len_q: int, device: torch.device) -> torch.Tensor:
    """[1, Sq, length]: the last query sees every key."""
    query = torch.arange(seq_len_q, device=device)
    return torch.arange(length, device=device) <= (length - seq_len_q + query)[None, :, None]


def listed_mask(block_indptr: torch.Tensor, block_indices: torch.Tensor, seq_len_q: int, length: int, q_block_size: int, kv_block_size: int) -> torch.Tensor:
    """[heads, Sq, length] of one request's block_indptr [heads, R + 1]: the keys of the blocks that each query's row lists."""
    mask = torch.zeros(len(block_indptr), seq_len_q, length, dtype=torch.bool, device=block_indices.device)
    ids = block_indices.tolist()
    for h, ends in enumerate(block_indptr.tolist()):
        for row, (begin, end) in enumerate(zip(ends, ends[1:])):
            for block in ids[begin:end]:
                mask[h, row * q_block_size:(row + 1) * q_block_size, block * kv_block_size:(block + 1) * kv_block_size] = True
    return mask


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2."""
    return float((out.float() - want).norm() / want.norm())
