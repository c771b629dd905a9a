"""Choosing which key blocks each query block attends to, from mean-pooled scores."""

from __future__ import annotations

import torch

from ..errors import problem
from . import checks


def select_blocks(q: torch.Tensor, k: torch.Tensor, *, block_size: int = 64, top_k: int | None = None,
                  top_p: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The key blocks with the largest mean-pooled scores for each block of queries, ascending.

    q [B, H, Sq, D], k [B, H, Sk, D], floating point, any strides. A block of `block_size` tokens (the last may be shorter) is pooled
    to its mean; scores are softmax(mean_q . mean_k / sqrt(D)) over the N = ceil(Sk / block_size) key blocks. top_k: that many blocks
    in every row, at most N. top_p: the fewest blocks whose scores sum to at least top_p, at least one. Both: top_p, cut at top_k.

    Returns q2k_block_index int32 [B, H, ceil(Sq / block_size), capacity] and q2k_block_nums int32 [B, H, ceil(Sq / block_size)];
    capacity is top_k, or N without it; entries past a row's count are not selected. Nothing is copied to the host.
    Raises TypeError (not a tensor, not floating point, not an int or a number), ValueError (shapes, neither limit, limits out of range).
    """
    for name, x in (("q", q), ("k", k)):
        checks.tensor(name, x)
        if not x.is_floating_point():
            raise TypeError(problem(name, x.dtype, "a floating point tensor", "select before quantizing"))
        if x.dim() != 4 or 0 in x.shape or x.shape[:2] != q.shape[:2] or x.shape[3] != q.shape[3] or x.device != q.device:
            raise ValueError(problem(name, f"shape {list(x.shape)} on {x.device}", "[B, H, S, D] with B, H, D and device in common",
                                     "pass q and k of one attention"))
    checks.integer("block_size", block_size)
    blocks = -(-k.shape[2] // block_size)
    capacity = blocks if top_k is None else _limit_k(top_k, blocks)
    if top_p is None and top_k is None:
        raise ValueError(problem("top_k", None, "top_k or top_p", "say how many blocks to keep"))
    mean_q, mean_k = _block_means(q, block_size), _block_means(k, block_size)
    scores = torch.softmax(mean_q @ mean_k.mT * q.shape[3] ** -0.5, dim=-1)
    weight, block = scores.sort(dim=-1, descending=True, stable=True)
    block, weight = block[..., :capacity], weight[..., :capacity]
    if top_p is None:
        counts = torch.full(block.shape[:3], capacity, dtype=torch.int32, device=q.device)
    else:
        before = weight.cumsum(-1) - weight
        counts = (before < _limit_p(top_p)).sum(-1, dtype=torch.int32).clamp(min=1)
    kept = torch.arange(capacity, device=q.device) < counts[..., None]
    ordered = torch.where(kept, block, block + blocks).sort(dim=-1).values      # the unselected sort behind, as ids again
    return (ordered % blocks).to(torch.int32), counts


def _limit_k(top_k: int, blocks: int) -> int:
    checks.integer("top_k", top_k)
    if top_k > blocks:
        raise ValueError(problem("top_k", top_k, f"at most the {blocks} key blocks", "lower it"))
    return top_k


def _limit_p(top_p: float) -> float:
    checks.positive_scale("top_p", top_p, 1.0)
    if top_p > 1:
        raise ValueError(problem("top_p", top_p, "a share in (0, 1]", "pass the share of attention to keep"))
    return top_p


def _block_means(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """fp32 [B, H, ceil(S / block_size), D]."""
    batch, heads, tokens, dim = x.shape
    whole = tokens // block_size
    head = x.new_zeros((batch, heads, 0, dim), dtype=torch.float32)
    if whole:
        head = x[:, :, :whole * block_size].unflatten(2, (whole, block_size)).mean(3, dtype=torch.float32)
    if whole * block_size == tokens:
        return head
    return torch.cat([head, x[:, :, whole * block_size:].mean(2, keepdim=True, dtype=torch.float32)], dim=2)
