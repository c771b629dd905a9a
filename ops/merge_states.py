"""Exact merge of attention over disjoint sets of keys, from each part's result and log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import problem
from . import checks

_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def merge_attention_states(outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor, *,
                           heads_first: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over all keys, from parts that each attended to a share of them, no key in two parts.

    outs: parts [..., S, H, D] of one floating dtype, as the paged and the query-sparse operation return them; with
    heads_first [..., H, S, D], as Sage returns them. lses: as many [..., H, S], fp32 (or fp64) natural log, scale
    included. Both: a sequence, or one tensor with the parts along dim 0. Strides are free, any device, one for all.

    Returns out like a part and lse like its own. A part without visible keys has lse -inf and its out is not used,
    whatever it holds; where all are so, out is exactly 0 and lse -inf. NaN stays NaN in the rows that have it. Sums run in
    fp32 (fp64 for fp64), in the order of the parts, so equal inputs give equal bits; merging in stages agrees to rounding.
    No host copy, capturable; no gradient flows.
    Raises TypeError (not tensors, dtypes that are not these) and ValueError (no part, counts, shapes or devices that differ).
    """
    checks.flag("heads_first", heads_first)
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    _check(outs, lses, heads_first)
    weights, lse = _weights(lses)
    working = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    merged = torch.zeros(outs[0].shape, dtype=working, device=outs[0].device)
    for part, part_lse, weight in zip(outs, lses, weights, strict=True):
        weight, empty = (x if heads_first else x.transpose(-1, -2) for x in (weight, part_lse == float("-inf")))
        merged += weight[..., None].to(working) * part.detach().to(working).masked_fill(empty[..., None], 0.0)
    return merged.to(outs[0].dtype), lse


def _weights(lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each part's share of the whole [N, ..., H, S], and the whole's lse."""
    lse = torch.stack([x.detach() for x in lses])
    top = lse.amax(0)
    base = top.masked_fill(top == float("-inf"), 0.0)       # -inf less -inf is NaN: a row without keys takes another base
    weights = (lse - base).exp()
    total = weights.sum(0)
    return weights / total.masked_fill(total == 0, 1.0), base + total.log()


def _parts(name: str, value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        checks.tensor(name, value)
        if value.dim() == 0:
            raise ValueError(problem(name, "a tensor of rank 0", "parts along dim 0", "stack the parts, or pass a list"))
        return list(value.unbind(0))
    if not isinstance(value, (list, tuple)):
        raise TypeError(problem(name, type(value).__name__, "a sequence of tensors, or one tensor", "pass the parts as a list"))
    return [checks.tensor(f"{name}[{i}]", part) for i, part in enumerate(value)]


def _check(outs: list[torch.Tensor], lses: list[torch.Tensor], heads_first: bool) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(problem("outs", f"{len(outs)} parts and {len(lses)} lses", "at least one part, an lse for each", "pass what each part returned"))
    first = outs[0]
    if first.dtype not in _OUT_DTYPES or lses[0].dtype not in (torch.float32, torch.float64):
        raise TypeError(problem("outs", f"{first.dtype} with lses of {lses[0].dtype}", "a floating dtype of 16 bits or more, with lses of torch.float32",
                                "pass what the operations return"))
    if first.dim() < 3:
        raise ValueError(problem("outs[0]", f"shape {list(first.shape)}", "[..., H, S, D]" if heads_first else "[..., S, H, D]", "add the missing dimensions"))
    rows = first.shape[:-1] if heads_first else (*first.shape[:-3], first.shape[-2], first.shape[-3])
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for name, x, like, shape in ((f"outs[{i}]", out, first, first.shape), (f"lses[{i}]", lse, lses[0], torch.Size(rows))):
            if x.dtype != like.dtype:
                raise TypeError(problem(name, x.dtype, like.dtype, "give all parts one dtype"))
            if x.shape != shape or x.device != first.device:
                raise ValueError(problem(name, f"shape {list(x.shape)} on {x.device}", f"{list(shape)} on {first.device}",
                                         "every part covers the same queries; lse is [..., H, S]"))
