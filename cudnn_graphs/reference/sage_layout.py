"""The two token orders of a quantized V, as permutations of its bytes."""

from __future__ import annotations

import torch

INTERLEAVED16 = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)      # slot s of an aligned 16-token group holds this token
V_LAYOUTS = ("natural", "interleaved16")


def _permuted(v: torch.Tensor, order: list[int]) -> torch.Tensor:
    groups = v.reshape(*v.shape[:-1], v.shape[-1] // 16, 16)
    return groups[..., torch.tensor(order, device=v.device)].reshape(v.shape)


def natural_order(v: torch.Tensor) -> torch.Tensor:
    """[..., 16 n] bytes in interleaved16 order -> token order."""
    return _permuted(v, [INTERLEAVED16.index(token) for token in range(16)])


def interleaved_order(v: torch.Tensor) -> torch.Tensor:
    """[..., 16 n] bytes in token order -> interleaved16 order."""
    return _permuted(v, list(INTERLEAVED16))
