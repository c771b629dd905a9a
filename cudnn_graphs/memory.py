"""Where a tensor's elements lie, and whether two tensors, or one with itself, share a byte. Nothing behind them is touched."""

from __future__ import annotations

import numpy as np
import torch

_MOST_WORK = 100_000         # candidate solutions that numpy looks at


def span_bytes(value: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if value.is_contiguous() or not value.numel():
        return value.nbytes
    return (1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride()))) * value.element_size()


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Exact for strided views: one may lie in the gaps of the other. Strides for which that cannot be told in a few milliseconds count as
    sharing, since some would take years."""
    first, second = a.data_ptr(), b.data_ptr()
    if first >= second + span_bytes(b) or second >= first + span_bytes(a):
        return False
    try:
        return bool(np.shares_memory(np.asarray(_Layout(a)), np.asarray(_Layout(b)), max_work=_MOST_WORK))  # type: ignore[arg-type]   # any number: numpy's stubs know two
    except np.exceptions.TooHardError:
        return True


def meets_itself(value: torch.Tensor) -> bool:
    """Whether two elements share an address. Strides that each step over all that is inside them cannot; others are counted."""
    if value.is_contiguous():
        return False
    dims = sorted((s, n) for s, n in zip(value.stride(), value.shape) if n > 1)
    if all(s > sum((n - 1) * t for t, n in dims[:i]) for i, (s, _) in enumerate(dims)):
        return False
    offsets = np.zeros(1, dtype=np.int64)
    for s, n in dims:
        offsets = np.unique(np.add.outer(offsets, s * np.arange(n)))
    return offsets.size < value.numel()


class _Layout:
    """A tensor's addresses as numpy sees them."""

    def __init__(self, value: torch.Tensor) -> None:
        size = value.element_size()
        self.__array_interface__ = {"data": (value.data_ptr(), False), "shape": tuple(value.shape), "typestr": f"|V{size}", "version": 3,
                                    "strides": tuple(s * size for s in value.stride())}
