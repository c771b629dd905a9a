"""The small kernels around an attention over a share of the keys: which blocks this rank holds, and the merge of all ranks' parts."""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..arguments import PagedArguments
from ..reference.held_blocks import keep_held_blocks
from ..runtime.cubins import CubinCache
from ..runtime.devices import DeviceFacts
from ..runtime.launch import LoadedKernel
from ..runtime.nvrtc import KernelSource
from ..runtime.streams import current_raw_stream, on_device
from .kernel_values import element_name
from .paged_launch import pack_params

_MERGE_WARPS = 4                # kGatheredWarps in kernels/portable/merge_gathered.cuh
_MERGE = struct.Struct("<3Q6q3i4x")     # MergeGatheredParams
_EXCHANGE_WARPS = 16            # kExchangeWarps in kernels/portable/exchange_parts.cuh
MAX_EXCHANGE_RANKS = 8          # kMaxRanks there
_EXCHANGE = struct.Struct("<4Q6q5I4x8Q")  # ExchangeParams


@functools.cache
def held_source(rows: int) -> KernelSource:
    """One id a thread where a (request, head) has one row, as in decoding."""
    threads, of_one_row = (128, "_of_one_row") if rows == 1 else (1024, "")
    entry = f"paged_held_blocks_{threads}"
    return KernelSource(entry, f"""#include "portable/held_blocks.cuh"
extern "C" __global__ void __launch_bounds__({threads}) {entry}(const __grid_constant__ PagedParams p, i32* indptr, i32* indices) {{
    keep_held_blocks{of_one_row}<{threads}>(p, indptr, indices);
}}
""", threads=threads)


@functools.cache
def gathered_source(dtype: torch.dtype, head_dim: int) -> KernelSource:
    entry = f"merge_gathered_{element_name(dtype)}_d{head_dim}"
    return KernelSource(entry, f"""#include "portable/merge_gathered.cuh"
extern "C" __global__ void __launch_bounds__({32 * _MERGE_WARPS}) {entry}(const __grid_constant__ MergeGatheredParams p) {{
    merge_gathered<{element_name(dtype)}, {head_dim}>(p);
}}
""", threads=32 * _MERGE_WARPS)


@functools.cache
def exchange_source(dtype: torch.dtype, head_dim: int) -> KernelSource:
    entry = f"exchange_parts_{element_name(dtype)}_d{head_dim}"
    one_an_sm = ", 1" if head_dim > 128 else ""         # else it spills for sm_100; where it need not be said, 8 registers fewer
    return KernelSource(entry, f"""#include "portable/exchange_parts.cuh"
extern "C" __global__ void __launch_bounds__({32 * _EXCHANGE_WARPS}{one_an_sm}) {entry}(const __grid_constant__ ExchangeParams p) {{
    PartExchange<{element_name(dtype)}, {head_dim}>(p).run();
}}
""", threads=32 * _EXCHANGE_WARPS)


def load_kernels(sources: Iterable[KernelSource], device: DeviceFacts, cubins: CubinCache) -> None:
    """Have them ready, so that a later call may be captured. Nothing to do on a CPU."""
    if device.kind == "cuda":
        for source in sources:
            _kernel(source, device, cubins)


@dataclass(frozen=True, slots=True)
class HeldLists:
    """Room for the block lists that are left to one rank, for calls of up to `batch` requests."""

    indptr: torch.Tensor        # like the call's
    indices: torch.Tensor       # max_blocks_per_row entries a row

    @classmethod
    def of(cls, batch: int, heads: int, rows: int, max_blocks_per_row: int, device: torch.device) -> HeldLists:
        return cls(torch.empty((batch, heads, rows + 1), dtype=torch.int32, device=device),
                   torch.empty(batch * heads * rows * max_blocks_per_row, dtype=torch.int32, device=device))


def with_held_blocks(arguments: PagedArguments, lists: HeldLists, device: DeviceFacts, cubins: CubinCache) -> PagedArguments:
    """The same call with only those blocks listed, in `lists`, whose first page is not negative in its page table: see
    reference/held_blocks.py. No host copy."""
    batch, heads, ends = arguments.block_indptr.shape
    indptr, indices = lists.indptr[:batch], lists.indices[:batch * heads * (ends - 1) * arguments.max_blocks_per_row]
    if device.kind == "cpu":
        keep_held_blocks(arguments, indptr, indices)
    else:
        with on_device(device):
            params = (pack_params(arguments), struct.pack("<Q", indptr.data_ptr()), struct.pack("<Q", indices.data_ptr()))
            _kernel(held_source(ends - 1), device, cubins).launch((batch * heads, 1, 1), params, current_raw_stream(device))
    return dataclasses.replace(arguments, block_indptr=indptr, block_indices=indices)


def merge_gathered(parts: torch.Tensor, lse_offset: int, out: torch.Tensor, lse: torch.Tensor | None, device: DeviceFacts, cubins: CubinCache) -> None:
    """parts uint8 [N, part_bytes], as kernels/portable/merge_gathered.cuh says, into out [B, S, H, D] or [S, H, D] and lse [..., H, S]."""
    *_, seq_len, heads, head_dim = out.shape
    stride_b = out.stride(0) if out.dim() == 4 else 0
    items = out.numel() // head_dim
    params = _MERGE.pack(parts.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(), parts.stride(0), lse_offset,
                         stride_b, out.stride(-3), out.stride(-2), items, seq_len, heads, parts.shape[0])
    with on_device(device):
        _kernel(gathered_source(out.dtype, head_dim), device, cubins).launch((-(-items // _MERGE_WARPS), 1, 1), (params,), current_raw_stream(device))


@dataclass(frozen=True, slots=True)
class Inboxes:
    """What `exchange_parts` writes to and reads from: see kernels/portable/exchange_parts.cuh."""

    addresses: tuple[int, ...]  # of each rank's two inboxes, as this rank sees them
    rank: int
    turns: torch.Tensor         # [CTAs] int32, this rank's runs so far; zeros at first
    slot_bytes: int
    slot_lse_offset: int
    memory: Any                 # what keeps the addresses valid

    @staticmethod
    def ctas(items: int, device: DeviceFacts) -> int:
        """A warp an item, and never more than one CTA an SM: whatever else runs, all of them are on the GPU in the end."""
        return min(-(-items // _EXCHANGE_WARPS), device.sm_count)


def exchange_parts(part: torch.Tensor, lse_offset: int, inboxes: Inboxes, out: torch.Tensor, lse: torch.Tensor | None, device: DeviceFacts,
                   cubins: CubinCache) -> None:
    """`merge_gathered` of the parts of all ranks, of which this rank's is `part` uint8 [part_bytes]; every rank launches it, in equal order."""
    *_, seq_len, heads, head_dim = out.shape
    stride_b = out.stride(0) if out.dim() == 4 else 0
    others = (0,) * (MAX_EXCHANGE_RANKS - len(inboxes.addresses))
    params = _EXCHANGE.pack(part.data_ptr(), inboxes.turns.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(),
                            lse_offset, inboxes.slot_bytes, inboxes.slot_lse_offset, stride_b, out.stride(-3), out.stride(-2), out.numel() // head_dim,
                            seq_len, heads, len(inboxes.addresses), inboxes.rank, *inboxes.addresses, *others)
    with on_device(device):
        kernel = _kernel(exchange_source(out.dtype, head_dim), device, cubins)
        kernel.launch((len(inboxes.turns), 1, 1), (params,), current_raw_stream(device), early=True)


def _kernel(source: KernelSource, device: DeviceFacts, cubins: CubinCache) -> LoadedKernel:
    return cubins.loaded(source, device)
