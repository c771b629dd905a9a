"""The `portable` engine's design for paged block-sparse attention: kernels/portable/paged_attention.cuh, for SM80 and later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..arguments import PagedArguments
from ..descriptor import SparseBlockDescriptor
from ..runtime.devices import DeviceFacts
from ..runtime.launch import LoadedKernel
from ..runtime.nvrtc import KernelSource
from .kernel_values import element_name
from .paged_launch import SplitWorkspace, launch_merge, merge_source

_RESERVED_SMEM = 1024           # bytes the driver keeps of every block's shared memory
_STATE_BYTES = 144              # PagedConfig: CtaState and GatherState
_MAX_SPLITS = 32
_BLOCK_COST = 2                 # of a CTA, in key tiles: prologue and epilogue
_MERGE_COST = 2                 # of the merge launch, in key tiles


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one CTA: the numbers of `PagedConfig` in kernels/portable/paged_config.cuh."""

    rows: int                   # query rows: tokens x heads
    fragments: int              # 16-row fragments of one warp
    keys: int                   # of one key tile
    stages: int                 # key tiles in shared memory
    head_dim: int
    causal: bool
    blocks_per_sm: int          # CTAs that registers and shared memory leave room for

    @property
    def row_warps(self) -> int:
        return self.rows // (16 * self.fragments)

    @property
    def key_warps(self) -> int:
        """What the rows leave of four warps shares out the keys."""
        return max(1, min(4 // self.row_warps, self.keys // 16))

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.key_warps

    @property
    def smem_bytes(self) -> int:
        tiles = 2 * self.head_dim * (self.rows + 2 * self.stages * self.keys)
        exchange = 4 * self.head_dim * self.key_warps * self.rows
        masks = self.stages * (4 * self.keys + self.threads // 4) + (8 * self.head_dim + 4 * self.rows if self.causal else 0)
        return max(tiles, exchange) + masks + 8 * self.key_warps * self.rows + _STATE_BYTES

    def fits(self, device: DeviceFacts, more_bytes: int = 0) -> bool:
        return self.blocks_per_sm * (self.smem_bytes + more_bytes + _RESERVED_SMEM) <= device.smem_per_block + _RESERVED_SMEM


def choose_tile(packed_rows: int, head_dim: int, causal: bool, device: DeviceFacts) -> Tile:
    """The tile for rows of `packed_rows` query rows (tokens x heads): the first in order of preference that fits.

    Warps have 32 rows where the accumulators fit: a fragment of K or V read from shared memory then feeds two
    products. At D 256 they do not, and on Blackwell the compiler needs more registers and spilled.
    """
    rows = next((r for r in (16, 32, 64) if packed_rows <= r), 128)
    wide = head_dim <= 128 and device.capability < (10, 0)
    few = [(3, 16)] if rows == 16 and head_dim <= 128 else []       # reading only: P6 4.06 TB/s with three blocks of 2 stages, 3.91 with two of 3
    two = [(2, rows)] if rows < 128 or wide else []                 # 8 warps of 255 registers leave room for one
    one = [(1, r) for r in (128, 64, 32, 16) if r <= rows]
    for blocks, r in few + two + one:
        for keys, stages in ((64, 3), (64, 2), (32, 3), (32, 2)):
            tile = Tile(r, 2 if wide and r > 16 else 1, keys, stages, head_dim, causal, blocks)
            if tile.fits(device):
                return tile
    raise AssertionError(f"no tile of D {head_dim} fits in {device.smem_per_block} bytes of shared memory")


def choose_splits(tasks: int, tiles: int, tile: Tile, slots: int) -> int:
    """How many CTAs share a row's list, from static capacities alone: the least time, in key tiles walked one after the other."""
    partial = 2 * tile.rows // tile.keys        # a partial result written and read again, in bytes of key tiles

    def cost(splits: int) -> int:
        waves, share = -(-tasks * splits // slots), -(-tiles // splits)
        return waves * (share + _BLOCK_COST) + (waves * partial + _MERGE_COST if splits > 1 else 0)
    return min(range(1, max(1, min(_MAX_SPLITS, tiles // 2)) + 1), key=cost)


_SIGNATURES = {         # of the kernels: parameters and what their function takes
    "paged_attention": ("const __grid_constant__ PagedParams p", "p"),
    "paged_held": ("const __grid_constant__ PagedParams p, i32 pace", "p, pace"),
    "paged_tail": ("const __grid_constant__ FoldParams p", "p"),
}


def paged_source(descriptor: SparseBlockDescriptor, tile: Tile, function: str, *template: str, more_bytes: int = 0) -> KernelSource:
    """`function` of kernels/portable/`function`.cuh with its own `template` arguments, and `more_bytes` of shared memory behind those of the tile."""
    dtype, d = element_name(descriptor.qk_dtype), descriptor.head_dim
    causal, bits = "causal" in descriptor.masks, "valid_bits" in descriptor.masks
    tail, held = function == "paged_tail", function == "paged_held"
    flags = "".join(f"_{name}" for name, on in (("causal", causal), ("bits", bits), ("tail", tail), ("held", held), ("paced", "true" in template)) if on)
    parameters, arguments = _SIGNATURES[function]
    entry = f"portable_paged_{dtype}_d{d}_m{tile.rows}{flags}"
    shape = ", ".join(map(str, (d, tile.fragments, tile.row_warps, tile.key_warps, tile.keys, tile.stages)))
    booleans = ", ".join("true" if on else "false" for on in (causal, bits, tail))
    text = f"""#include "portable/{function}.cuh"
using Config = PagedConfig<{dtype}, {shape}, {booleans}>;
static_assert(Config::kSmemBytes == {tile.smem_bytes}, "Tile.smem_bytes and PagedConfig disagree");
extern "C" __global__ void __launch_bounds__({tile.threads}, {tile.blocks_per_sm}) {entry}({parameters}) {{
    {function}<{", ".join(("Config", *template))}>({arguments});
}}
"""
    return KernelSource(entry, text, threads=tile.threads, smem_bytes=tile.smem_bytes + more_bytes)


def _grid(tile: Tile, a: PagedArguments, splits: int) -> tuple[int, int, int]:
    batch, seq_len_q, num_qo_heads, _ = a.q.shape
    num_kv_heads = a.k.shape[1]
    m_tiles = -(-min(a.q_block_size, seq_len_q) * (num_qo_heads // num_kv_heads) // tile.rows)
    return batch * num_kv_heads * (a.block_indptr.shape[2] - 1) * m_tiles, splits, 1


class PortablePagedDesign:
    """One launch of the attention kernel, and one of the merge where the block list is split."""

    def __init__(self, descriptor: SparseBlockDescriptor, device: DeviceFacts) -> None:
        assert descriptor.max_seq_len_kv is not None
        self.tile = choose_tile(descriptor.packed_rows, descriptor.head_dim, "causal" in descriptor.masks, device)
        m_tiles = -(-descriptor.packed_rows // self.tile.rows)
        tasks = descriptor.batch_size * descriptor.num_kv_heads * descriptor.rows_per_head * m_tiles
        self.spans = descriptor.max_spans_per_row or -(-descriptor.max_seq_len_kv // descriptor.span_tokens)     # of the longest list
        slots = device.sm_count * min(self.tile.blocks_per_sm, 2)       # two already saturate the memory
        self.longest = -(-self.spans * descriptor.span_tokens // self.tile.keys)                                # and in key tiles
        splits = choose_splits(tasks, self.longest, self.tile, slots)
        self.partials = SplitWorkspace.of(descriptor, splits)
        self.workspace_bytes = self.partials.nbytes
        self.kernels: Mapping[str, KernelSource] = {"attention": paged_source(descriptor, self.tile, "paged_attention")}
        if splits > 1:
            self.kernels = {**self.kernels, "merge": merge_source(descriptor)}
        self.config: dict[str, Any] = asdict(self.tile) | {"splits": splits, "threads": self.tile.threads}

    def launch(self, kernels: Mapping[str, LoadedKernel], arguments: PagedArguments, workspace: int, stream: int) -> None:
        params = self.partials.pack(arguments, workspace)
        kernels["attention"].launch(_grid(self.tile, arguments, self.partials.num_splits), (params,), stream)
        if self.partials.num_splits > 1:
            launch_merge(kernels["merge"], arguments, params, stream)


class PortableTailDesign:
    """The partial last block of each row that has one, as one partial result: kernels/portable/paged_tail.cuh.

    For an engine that computes the full blocks elsewhere and merges the two by lse.
    """

    def __init__(self, descriptor: SparseBlockDescriptor, device: DeviceFacts) -> None:
        # Few query rows a CTA: one key tile is soon done, and wider ones leave no register for the walk over the tails.
        self.tile = choose_tile(min(descriptor.packed_rows, 32), descriptor.head_dim, "causal" in descriptor.masks, device)
        self.kernel = paged_source(descriptor, self.tile, "paged_tail")
        self.partials = SplitWorkspace.one(descriptor)
        self.workspace_bytes = self.partials.nbytes
        self._most_blocks = device.sm_count * self.tile.blocks_per_sm

    def launch(self, kernel: LoadedKernel, arguments: PagedArguments, params: bytes, stream: int) -> None:
        """`params`: a packed FoldParams, whose partial_out [1, items, D] and partial_lse [1, items] are written."""
        tiles, _, _ = _grid(self.tile, arguments, 1)
        kernel.launch((min(tiles, self._most_blocks), 1, 1), (params,), stream)


def design_portable_paged(descriptor: SparseBlockDescriptor, device: DeviceFacts) -> PortablePagedDesign:
    """The design that serves any descriptor of kind csr/paged."""
    return PortablePagedDesign(descriptor, device)


def design_tail(descriptor: SparseBlockDescriptor, device: DeviceFacts) -> PortableTailDesign:
    """The partial tail of every row, for an engine that serves the full blocks itself."""
    return PortableTailDesign(descriptor, device)
