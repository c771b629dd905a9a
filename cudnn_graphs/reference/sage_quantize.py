"""The Sage quantizer on the CPU, bit for bit what the GPU kernel makes.

Every number is one fp32 operation away from the next, in an order both sides share: a sum over tokens is
a pairwise tree inside each 64-token block, then 32 running sums of every 32nd block, then a pairwise tree
over those. Scales and values come of divisions, never of reciprocals.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .sage_layout import interleaved_order

BLOCK = 64
Q_ROWS = 32                     # query tokens per scale
SUM_LANES = 32
SMALLEST_AMAX = 1e-7
INT8_MAX, E4M3_MAX = 127.0, 448.0


def quantize_on_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, v_layout: str,
                    smooth_k: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_int8, k_int8, v_fp8, q_scale, k_scale, v_scale, k_mean; shapes as in `ops.sage_quantize.SageTensors`."""
    batch, heads, seq_len_k, head_dim = k.shape
    k = k.float()
    k_mean = token_mean(k) if smooth_k else torch.zeros(batch, heads, head_dim, dtype=torch.float32)
    q_int8, q_scale = _int8_by_rows(q.float(), Q_ROWS, -(-q.shape[2] // 128) * 4)
    k_int8, k_scale = _int8_by_rows(k - k_mean[:, :, None], BLOCK, -(-seq_len_k // BLOCK))
    v = v.float()
    v_scale = _scale(v.abs().amax(dim=2), E4M3_MAX)
    v_fp8 = (v / v_scale[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX).mT.to(torch.float8_e4m3fn).view(torch.uint8)
    v_fp8 = F.pad(v_fp8, (0, -seq_len_k % BLOCK))
    if v_layout == "interleaved16":
        v_fp8 = interleaved_order(v_fp8)
    return q_int8, k_int8, v_fp8.contiguous().view(torch.float8_e4m3fn), q_scale, k_scale, v_scale, k_mean


def _pairwise(x: torch.Tensor) -> torch.Tensor:
    """Sum over dim -2, a power of two long, by adding neighbours."""
    while x.shape[-2] > 1:
        x = x[..., 0::2, :] + x[..., 1::2, :]
    return x[..., 0, :]


def token_mean(x: torch.Tensor) -> torch.Tensor:
    """Mean of fp32 [B, H, S, D] over S by the fixed tree."""
    batch, heads, tokens, dim = x.shape
    blocks = -(-tokens // BLOCK)
    sums = _pairwise(F.pad(x, (0, 0, 0, blocks * BLOCK - tokens)).view(batch, heads, blocks, BLOCK, dim))
    lanes = F.pad(sums, (0, 0, 0, -blocks % SUM_LANES)).view(batch, heads, -1, SUM_LANES, dim)
    running = lanes[:, :, 0] + 0.0      # a sum of nothing but -0 is 0
    for step in range(1, lanes.shape[2]):
        running = running + lanes[:, :, step]
    total = _pairwise(running)
    return total / torch.full_like(total, tokens)


def _scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    return amax.clamp(min=SMALLEST_AMAX) / torch.full_like(amax, largest)


def _int8_by_rows(x: torch.Tensor, rows: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [B, H, S, D] -> int8 of its shape and one scale per `rows` tokens, [B, H, groups]."""
    batch, heads, tokens, dim = x.shape
    padded = F.pad(x, (0, 0, 0, groups * rows - tokens)).view(batch, heads, groups, rows, dim)
    scale = _scale(padded.abs().amax(dim=(3, 4)), INT8_MAX)
    quantized = (padded / scale[..., None, None]).round().to(torch.int8)
    return quantized.view(batch, heads, groups * rows, dim)[:, :, :tokens].contiguous(), scale
