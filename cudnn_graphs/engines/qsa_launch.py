"""What every kernel of packed query-sparse attention is launched with.

`QsaParams` in kernels/common/qsa_params.cuh has the fields that `pack_params` packs, in the same order.
"""

from __future__ import annotations

import struct

from ..arguments import QuerySparseArguments
from ..runtime.nvrtc import KernelSource
from .kernel_values import LOG2_E

_FP32_MAX, _FP32_LEAST = 3.4028234663852886e38, 1.1754943508222875e-38
_SIGN_FACTORS = {1: 0x3F803F80, -1: 0xBF80BF80, 0: 0}      # two bf16 of the scale's sign
_PARAMS = struct.Struct("<17Q5iIf4x")                        # every field falls on its natural alignment


def pack_params(a: QuerySparseArguments, sm_count: int, schedule: int = 0, item_mode: int = 0, gather_items: int = 0) -> bytes:
    """The kernels' one argument. The last three are device pointers into the workspace, 0 where there is none."""
    total, heads_kv, _ = a.k.shape
    indices = a.indices
    if indices is None:
        source = (a.sel_blocks.data_ptr(), a.lo.data_ptr(), a.hi.data_ptr(), a.blk_base.data_ptr(), a.tok_base.data_ptr(),  # type: ignore[union-attr]
                  a.block_first.data_ptr(), a.block_last.data_ptr(), 0)  # type: ignore[union-attr]
        blocks, width = a.sel_blocks.shape[1], 0  # type: ignore[union-attr]
    else:
        source, blocks, width = (0, 0, 0, 0, 0, 0, 0, indices.data_ptr()), 0, indices.shape[1]
    scale_log2 = min(abs(a.scale) * LOG2_E, _FP32_MAX)
    sign = 0 if scale_log2 < _FP32_LEAST else 1 if a.scale > 0 else -1
    return _PARAMS.pack(a.q.data_ptr(), a.k.data_ptr(), a.v.data_ptr(), a.out.data_ptr(), a.out_fp32.data_ptr(), a.lse.data_ptr(), *source,
                        schedule, item_mode, gather_items, total, blocks, width, heads_kv, sm_count,
                        _SIGN_FACTORS[sign], scale_log2 if sign else 1.0)


def gather_source(group: int, indexed: bool, warps: int, queries_per_item: int = 0) -> KernelSource:
    """The per-query kernel of kernels/portable/qsa_gather.cuh; with queries_per_item, over listed items only."""
    entry = f"qsa_gather_g{group}_{'indices' if indexed else 'bitmap'}_w{warps}" + (f"_listed{queries_per_item}" if queries_per_item else "")
    is_indexed, is_listed = (str(bool(flag)).lower() for flag in (indexed, queries_per_item))
    ctas_per_sm = 2 if warps == 4 else 1
    text = f"""#include "portable/qsa_gather.cuh"
using Config = QsaGatherConfig<{group}, {is_indexed}, {is_listed}, {warps}, {queries_per_item or 1}>;
static_assert(Config::kSmemBytes == {gather_smem_bytes(indexed, warps)});
extern "C" __global__ void __launch_bounds__(Config::kThreads, {ctas_per_sm}) {entry}(const __grid_constant__ QsaParams p) {{ qsa_gather<Config>(p); }}
"""
    return KernelSource(entry, text, threads=32 * warps, smem_bytes=gather_smem_bytes(indexed, warps))


def gather_smem_bytes(indexed: bool, warps: int) -> int:
    """`QsaGatherConfig::kSmemBytes`."""
    scan = 16 * 32 * warps
    entries = 2064 + scan if indexed else scan + 1024
    return warps * 3 * 16 * 512 + entries * (4 if indexed else 5) + warps * (4 + 64 + 64) + 28
