"""Every rank's part of one attention, written in place, gathered by one collective, merged in rank order.

One all-gather of [out | lse] brings each rank (N - 1) * (size * D + 4) bytes per (query, head): 260 for bf16 parts of 128
channels on two ranks. An all-reduce of fp32 sums would bring 2 * (N - 1) / N * (4 * D + 4), 516, after another all-reduce for
the maxima, and would add in an order that is the library's. It moves less only from five ranks on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..engines.shard_kernels import merge_gathered
from ..runtime.cubins import CubinCache
from ..runtime.devices import DeviceFacts
from .merge_states import merge_attention_states

_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor      # renamed in torch 2.13
_ALIGNMENT = 256                # bytes: each part starts like an allocation of its own


@dataclass(frozen=True, slots=True)
class PartLayout:
    """How one rank's out [..., S, H, D] and lse [..., H, S] fp32 lie in bytes, one after the other."""

    out_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def lse_shape(self) -> tuple[int, ...]:
        *batch, queries, heads, _ = self.out_shape
        return (*batch, heads, queries)

    @property
    def lse_offset(self) -> int:
        return math.prod(self.out_shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return -(-(self.lse_offset + 4 * math.prod(self.lse_shape)) // _ALIGNMENT) * _ALIGNMENT

    def views(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse of `part`, uint8 [nbytes]."""
        lse_end = self.lse_offset + 4 * math.prod(self.lse_shape)
        return part[:self.lse_offset].view(self.dtype).view(self.out_shape), part[self.lse_offset:lse_end].view(torch.float32).view(self.lse_shape)


class GatheredParts:
    """The parts of all ranks of `group`, side by side. `out` and `lse` are this rank's, to be written.

    storage: uint8, at least as many parts of this layout; None allocates it.
    """

    def __init__(self, layout: PartLayout, device: DeviceFacts, group: Any, storage: torch.Tensor | None = None) -> None:
        world = dist.get_world_size(group)
        self.layout, self.device, self.group = layout, device, group
        if storage is None:
            storage = torch.empty(world * layout.nbytes, dtype=torch.uint8, device=device.torch_device)
        self.buffer = storage[:world * layout.nbytes].view(world, layout.nbytes)
        self.mine = self.buffer[dist.get_rank(group)]
        self.out, self.lse = layout.views(self.mine)

    def merge_into(self, out: torch.Tensor, lse: torch.Tensor | None, cubins: CubinCache) -> None:
        """Gather, then merge into out [..., S, H, D] of the parts' dtype and lse: the same bits on every rank. Collective."""
        _all_gather(self.buffer.view(-1), self.mine, group=self.group)
        if self.device.kind == "cuda":
            merge_gathered(self.buffer, self.layout.lse_offset, out, lse, self.device, cubins)
            return
        merged, merged_lse = merge_attention_states(*zip(*map(self.layout.views, self.buffer), strict=True))
        out.copy_(merged)
        if lse is not None:
            lse.copy_(merged_lse)
