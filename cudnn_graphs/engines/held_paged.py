"""Decoding over the blocks that a rank holds of a split cache: kernels/portable/paged_held.cuh, where a plan of the `portable` engine would serve.

One launch instead of two, to the same bits, and made for rows that the split left uneven.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..arguments import PagedArguments
from ..descriptor import SparseBlockDescriptor
from ..runtime.devices import DeviceFacts
from ..runtime.launch import LoadedKernel
from ..runtime.nvrtc import KernelSource
from .paged_launch import pack_params
from .portable_paged import PortablePagedDesign, Tile, paged_source

_STATIC_SMEM = 1024             # what little there is moves the dynamic to its next alignment
# Of a rank's share of the longest list, so nothing where capacities are loose. Half of P6 on one H200, exchanging with itself, took
# 73.8 us so, 75.5 at 0.8, 76.8 at 0.5, 75.7 without.
_PACE = 0.625


@dataclass(frozen=True, slots=True)
class HeldDesign:
    """The attention of calls of up to a descriptor's capacities, whose block lists are those of the whole cache."""

    tile: Tile
    kernel: KernelSource
    pace: int                   # paged_held.cuh; 0: all rows read at one rate

    @staticmethod
    def of(descriptor: SparseBlockDescriptor, device: DeviceFacts, ranks: int) -> HeldDesign | None:
        """For one of `ranks`. None where a row takes more than one CTA, or where its list finds no room in shared memory beside the plan's tile."""
        plan = PortablePagedDesign(descriptor, device)
        ids = 4 * plan.spans
        if descriptor.rows_per_head > 1 or descriptor.packed_rows > plan.tile.rows or plan.partials.num_splits > 1:
            return None
        paced = dataclasses.replace(plan.tile, stages=3, blocks_per_sm=2)
        one_wave = descriptor.batch_size * descriptor.num_kv_heads <= 2 * device.sm_count
        if one_wave and plan.tile.stages == 2 and paced.fits(device, ids + _STATIC_SMEM):
            pace = max(1, round(_PACE * plan.longest / ranks))
            return HeldDesign(paced, paged_source(descriptor, paced, "paged_held", "true", more_bytes=ids), pace)
        if plan.tile.fits(device, ids + _STATIC_SMEM):
            return HeldDesign(plan.tile, paged_source(descriptor, plan.tile, "paged_held", "false", more_bytes=ids), 0)
        return None

    def launch(self, kernel: LoadedKernel, arguments: PagedArguments, stream: int) -> None:
        params = pack_params(arguments), self.pace.to_bytes(4, "little")
        kernel.launch((arguments.q.shape[0] * arguments.k.shape[1], 1, 1), params, stream)
