"""The `sm90` engine's design for paged block-sparse attention: kernels/sm90/paged_attention.cuh, wgmma and bulk tensor copies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..arguments import PagedArguments
from ..descriptor import SparseBlockDescriptor
from ..runtime.devices import DeviceFacts
from ..runtime.launch import LoadedKernel, zero_memory
from ..runtime.nvrtc import KernelSource
from .kernel_values import element_name
from .paged_launch import pack_params
from .tensor_maps import encode_tensor_map

_SPLITS = (1, 2, 4, 8)          # blocks of a portable cluster
_ROW_COST = 3                   # of an item, in key tiles: reading the list, first copies, the store
_MAX_TENSOR_MAPS = 64           # kept per plan
_COUNTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Tile:
    """One block's work: the numbers of `PagedPlan` in kernels/sm90/paged_plan.cuh, and how many blocks are launched."""

    consumers: int              # warpgroups of 64 packed query rows that share a row and its rings
    keys: int                   # of one K or V tile
    key_stages: int             # tiles in the ring of K; 0: V of a tile takes the place of its K
    value_stages: int           # and of V
    queries_in_registers: bool
    blocks_per_sm: int = 1
    chains: int = 1             # rows that a block attends to at a time
    splits: int = 1             # blocks of one cluster that share a row's list

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers * self.chains + 1)

    def smem_bytes(self, head_dim: int) -> int:
        """For each chain: queries, rings, and 1 KB or 2 KB of barriers and notes."""
        notes = 1024 if self.blocks_per_sm == 2 or self.chains > 1 else 2048
        return self.chains * (2 * head_dim * (self.rows + (self.key_stages + self.value_stages) * self.keys) + notes)


# head_dim -> tile. Wide: two warpgroups share a row. Narrow: one has its own, in two blocks per SM (one where registers allow no more).
# Trio: three rows at a time in one block, for long lists of rows too small for wide tiles; at D 64 narrow was faster, 454 against 423 TFLOPS.
WIDE = {64: Tile(2, 128, 6, 6, True), 128: Tile(2, 128, 3, 3, True), 256: Tile(2, 64, 2, 2, False)}
NARROW = {64: Tile(1, 128, 3, 3, True, 2), 128: Tile(1, 64, 3, 3, True, 2), 256: Tile(1, 64, 3, 3, False)}
TRIO = {128: Tile(1, 64, 0, 3, False, chains=3)}
WIDE_BOTH_MASKS = WIDE | {128: Tile(2, 128, 3, 3, False)}     # queries in registers too would spill
_TRIO_ITEMS = 8             # for each chain: fewer leave too many chains idle at the end
_WIDE_RATE, _NARROW_RATE = 680, 560     # TFLOPS measured at D 128 (P3, P2): narrow tiles read K and V from L2 twice as often


def _items(descriptor: SparseBlockDescriptor, tile: Tile) -> int:
    return descriptor.batch_size * descriptor.num_kv_heads * descriptor.rows_per_head * -(-descriptor.packed_rows // tile.rows)


def _splits(items: int, tiles: int, sm_count: int, blocks_per_sm: int) -> int:
    """Blocks that share a row, from static capacities alone: the least time in key tiles walked one after the other.

    Clusters do not pack the device: 64 clusters of 4 took 54 us where 64 clusters of 2 took 40, so one of their blocks is counted per SM.
    """
    def cost(splits: int) -> int:
        slots = sm_count * (blocks_per_sm if splits == 1 else 1)
        return -(-items * splits // slots) * (-(-tiles // splits) + _ROW_COST)
    return min(_SPLITS, key=cost)


def choose_tile(descriptor: SparseBlockDescriptor, device: DeviceFacts) -> Tile:
    """Wide tiles where they fill the device and waste little of their rows; else trios where rows are many, else narrow ones, split over
    clusters when rows are few."""
    assert descriptor.max_seq_len_kv is not None
    wides = WIDE_BOTH_MASKS if {"causal", "valid_bits"} <= descriptor.masks else WIDE
    rows, wide, narrow = descriptor.packed_rows, wides[descriptor.head_dim], NARROW[descriptor.head_dim]
    time = {tile: -(-rows // tile.rows) * tile.rows / rate for tile, rate in ((wide, _WIDE_RATE), (narrow, _NARROW_RATE))}
    if rows > narrow.rows and time[wide] <= time[narrow] and 4 * _items(descriptor, wide) >= 3 * device.sm_count:
        return wide
    spans = descriptor.max_spans_per_row or -(-descriptor.max_seq_len_kv // descriptor.span_tokens)
    tiles = -(-spans * descriptor.span_tokens // narrow.keys)
    items, trio = _items(descriptor, narrow), TRIO.get(descriptor.head_dim)
    if trio is not None and items >= _TRIO_ITEMS * trio.chains * device.sm_count:
        return trio
    splits = _splits(items, tiles, device.sm_count, narrow.blocks_per_sm)
    return Tile(**asdict(narrow) | {"splits": splits})


def box_tokens(descriptor: SparseBlockDescriptor) -> int:
    """Tokens of one copy: neighbours in one page and in one block."""
    assert descriptor.page_size is not None
    return math.gcd(math.gcd(descriptor.page_size, descriptor.span_tokens), 64)


def _source(descriptor: SparseBlockDescriptor, tile: Tile, box: int) -> KernelSource:
    dtype, d = element_name(descriptor.qk_dtype), descriptor.head_dim
    masks = [name for name in ("causal", "valid_bits") if name in descriptor.masks]
    several = [f"{name}{count}" for name, count in (("chains", tile.chains), ("split", tile.splits)) if count > 1]
    entry = "_".join(["sm90_paged", dtype, f"d{d}", f"m{tile.rows}", f"box{box}", *masks, *several])
    flags = ["causal" in masks, "valid_bits" in masks, tile.queries_in_registers]
    sizes = (d, tile.consumers, tile.chains, tile.keys, box, tile.key_stages, tile.value_stages)
    plan = ", ".join([dtype, *map(str, sizes), *(str(flag).lower() for flag in flags), str(tile.splits), str(tile.blocks_per_sm)])
    cluster = f"__cluster_dims__({tile.splits}, 1, 1) " if tile.splits > 1 else ""
    text = f"""#include "sm90/paged_attention.cuh"
using Plan = PagedPlan<{plan}>;
static_assert(sizeof(PagedMemory<Plan>) * Plan::kChains <= {tile.smem_bytes(d)} && Plan::kThreads == {tile.threads}, "Tile and PagedPlan disagree");
extern "C" __global__ void {cluster}__launch_bounds__({tile.threads}, {tile.blocks_per_sm}) {entry}(
    const __grid_constant__ PagedParams p, const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, u32* drawn) {{
    paged_attention<Plan>(p, keys, values, drawn);
}}
"""
    return KernelSource(entry, text, threads=tile.threads, smem_bytes=tile.smem_bytes(d))


def cache_map(cache: torch.Tensor, box: int) -> bytes:
    """Boxes of `box` tokens x 64 elements in K or V `[P, Hkv, page, D]`."""
    pages, heads, page_size, head_dim = cache.shape
    page_stride = cache.stride(0) if pages > 1 else heads * page_size * head_dim
    element = "BFLOAT16" if cache.dtype is torch.bfloat16 else "FLOAT16"
    return encode_tensor_map(element, cache.data_ptr(), (head_dim, page_size, heads, pages), (2 * head_dim, 2 * page_size * head_dim, 2 * page_stride),
                             (64, box, 1, 1), swizzle=128, l2_promotion=256)


class Sm90PagedDesign:
    """Serves any descriptor of kind csr/paged; `config` overrides the tile, for tuning.

    One launch, whatever the split: the blocks of a cluster merge their shares through shared memory. The workspace is a counter,
    from which chains draw their items where there may be more items than chains."""

    def __init__(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, config: Tile | None = None) -> None:
        self.tile = config or choose_tile(descriptor, device)
        self.box = box_tokens(descriptor)
        self.kernels: Mapping[str, KernelSource] = {"attention": _source(descriptor, self.tile, self.box)}
        self.config: dict[str, Any] = asdict(self.tile) | {"rows": self.tile.rows, "box": self.box}
        self._slots = device.sm_count * self.tile.blocks_per_sm
        self.workspace_bytes = _COUNTER_BYTES if self.tile.splits == 1 and _items(descriptor, self.tile) > self._slots * self.tile.chains else 0
        self._maps: dict[tuple[int, ...], tuple[bytes, bytes]] = {}     # dict operations are atomic: plans are shared by threads

    def _tensor_maps(self, k: torch.Tensor, v: torch.Tensor) -> tuple[bytes, bytes]:
        key = (k.data_ptr(), v.data_ptr(), k.shape[0], k.shape[1], k.stride(0), v.stride(0))
        maps = self._maps.get(key)
        if maps is None:
            if len(self._maps) >= _MAX_TENSOR_MAPS:
                self._maps.clear()
            maps = self._maps[key] = cache_map(k, self.box), cache_map(v, self.box)
        return maps

    def launch(self, kernels: Mapping[str, LoadedKernel], arguments: PagedArguments, workspace: int, stream: int) -> None:
        a, tile = arguments, self.tile
        batch, seq_len_q, num_qo_heads, _ = a.q.shape
        num_kv_heads = a.k.shape[1]
        m_tiles = -(-min(a.q_block_size, seq_len_q) * (num_qo_heads // num_kv_heads) // tile.rows)
        items = batch * num_kv_heads * (a.block_indptr.shape[2] - 1) * m_tiles
        blocks = min(-(-items // tile.chains), self._slots) if tile.splits == 1 else items * tile.splits
        drawn = workspace if tile.splits == 1 and items > blocks * tile.chains else 0
        if drawn:
            zero_memory(drawn, _COUNTER_BYTES, stream)
        params = pack_params(a, num_splits=tile.splits), *self._tensor_maps(a.k, a.v), drawn.to_bytes(8, "little")
        kernels["attention"].launch((blocks, 1, 1), params, stream)
