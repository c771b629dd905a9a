"""Sage block-sparse attention for Hopper: INT8 and FP8 wgmma, keys and values by bulk tensor copies."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..arguments import SageArguments
from ..descriptor import SparseBlockDescriptor
from ..runtime.devices import DeviceFacts
from ..runtime.launch import LoadedKernel
from ..runtime.nvrtc import KernelSource
from .sage_launch import pack_params
from .tensor_maps import encode_tensor_map

THREADS, CONSUMERS, STAGES = 512, 3, 2                  # SagePlan of kernels/sm90/sage_plan.cuh
SMEM_BYTES = CONSUMERS * ((1 + 4 * STAGES) * 8192 + 2 * STAGES * 512) + 4096    # SageMemory

_encode = functools.partial(encode_tensor_map, "UINT8", l2_promotion=128)


@dataclass(frozen=True, slots=True)
class Sm90SageDesign:
    kernels: Mapping[str, KernelSource]
    config: dict[str, Any]
    natural: bool
    sm_count: int
    workspace_bytes: int = 0

    def launch(self, kernels: Mapping[str, LoadedKernel], arguments: SageArguments, workspace: int, stream: int) -> None:
        batch, heads, rows, _ = arguments.block_index.shape
        all_heads = batch * heads
        maps = (rows_map(arguments.q.data_ptr(), all_heads * arguments.q.shape[2], False),
                rows_map(arguments.k.data_ptr(), all_heads * arguments.k.shape[2], self.natural),
                channels_map(arguments.v.data_ptr(), all_heads, arguments.v.shape[3]))
        grid = min(all_heads * rows, self.sm_count)
        kernels["attend"].launch((grid, 1, 1), (pack_params(arguments), b"".join(maps)), stream)


def design_sm90_sage(descriptor: SparseBlockDescriptor, device: DeviceFacts) -> Sm90SageDesign:
    natural, lse = descriptor.v_layout == "natural", descriptor.return_lse
    entry = f"sm90_sage_{descriptor.v_layout}" + "_lse" * lse
    text = f"""#include "sm90/sage_attention.cuh"
extern "C" __global__ void __launch_bounds__({THREADS}, 1) {entry}(const __grid_constant__ SageParams p, const __grid_constant__ SageMaps maps) {{
    static_assert(SagePlan::kThreads == {THREADS} && SagePlan::kStages == {STAGES} && sizeof(SageMemory) == {SMEM_BYTES});
    sage_attention<{str(not natural).lower()}, {str(lse).lower()}>(p, maps);
}}
"""
    return Sm90SageDesign({"attend": KernelSource(entry, text, THREADS, SMEM_BYTES)},
                          {"tile": [64, 128], "rows_in_flight": CONSUMERS, "stages": STAGES}, natural, device.sm_count)


@functools.lru_cache(maxsize=1024)
def rows_map(pointer: int, rows: int, permuted: bool) -> bytes:
    """Q or K of all heads as rows of 128 bytes; a box is 64 rows from any row on, permuted for natural V as SageTile says."""
    if not permuted:
        return _encode(pointer, (128, rows), (128,), (128, 64), swizzle=128)
    return _encode(pointer, (128, rows, 4, 2, 4), (128, 4 * 128, 2 * 128, 16 * 128), (128, 2, 4, 2, 4), swizzle=128)


@functools.lru_cache(maxsize=1024)
def channels_map(pointer: int, heads: int, padded: int) -> bytes:
    """V of all heads as rows of `padded` tokens; a box is one block of 64 tokens, all 128 channels."""
    return _encode(pointer, (padded, heads * 128), (padded,), (64, 128), swizzle=64)
