"""Every rank's part of one attention in one buffer: written in place, gathered by one collective, merged in rank order.

One all-gather of [out | lse] brings each rank (N - 1) * (size * D + 4) bytes per (query, head): 260 for bf16 parts of 128
channels on two ranks. An all-reduce of fp32 sums would bring 2 * (N - 1) / N * (4 * D + 4), 516, after another all-reduce for
the maxima, and would add in an order that is the library's. It moves less only from five ranks on.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from ..engines.shard_kernels import merge_gathered
from ..runtime.cubins import CubinCache
from ..runtime.devices import DeviceFacts
from .merge_states import merge_attention_states

_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor      # renamed in torch 2.13
_ALIGNMENT = 256                # bytes: each part starts like an allocation of its own


class GatheredParts:
    """Parts out [..., S, H, D] with lse [..., H, S] fp32 of all ranks of `group`. `out` and `lse` are this rank's, to be written."""

    def __init__(self, out_shape: tuple[int, ...], dtype: torch.dtype, device: DeviceFacts, group: Any) -> None:
        *batch, queries, heads, _ = out_shape
        self.out_shape, self.lse_shape = tuple(out_shape), (*batch, heads, queries)
        self.dtype, self.device, self.group = dtype, device, group
        self.lse_offset = math.prod(self.out_shape) * dtype.itemsize
        self.lse_end = self.lse_offset + 4 * math.prod(self.lse_shape)
        nbytes = -(-self.lse_end // _ALIGNMENT) * _ALIGNMENT
        self.buffer = torch.empty((dist.get_world_size(group), nbytes), dtype=torch.uint8, device=device.torch_device)
        self.mine = self.buffer[dist.get_rank(group)]
        self.out, self.lse = self._views(self.mine)

    def _views(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (part[:self.lse_offset].view(self.dtype).view(self.out_shape),
                part[self.lse_offset:self.lse_end].view(torch.float32).view(self.lse_shape))

    def merge_into(self, out: torch.Tensor, lse: torch.Tensor | None, cubins: CubinCache) -> None:
        """Gather, then merge into out [..., S, H, D] of the parts' dtype and lse: the same bits on every rank. Collective."""
        _all_gather(self.buffer.view(-1), self.mine, group=self.group)
        if self.device.kind == "cuda":
            merge_gathered(self.buffer, self.lse_offset, out, lse, self.device, cubins)
            return
        merged, merged_lse = merge_attention_states(*zip(*map(self._views, self.buffer), strict=True))
        out.copy_(merged)
        if lse is not None:
            lse.copy_(merged_lse)
