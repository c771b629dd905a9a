"""Sage block-sparse attention for compute capability 8.0 and later, on mma.sync: FP8 products from 8.9, fp16 ones before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..arguments import SageArguments
from ..descriptor import SparseBlockDescriptor
from ..runtime.devices import DeviceFacts
from ..runtime.launch import LoadedKernel
from ..runtime.nvrtc import KernelSource
from .sage_launch import pack_params

THREADS, SMEM_BYTES, CTAS_PER_SM = 128, 32768, 2         # SageConfig of kernels/portable/sage_attention.cuh


@dataclass(frozen=True, slots=True)
class PortableSageDesign:
    kernels: Mapping[str, KernelSource]
    config: dict[str, Any]
    workspace_bytes: int = 0

    def launch(self, kernels: Mapping[str, LoadedKernel], arguments: SageArguments, workspace: int, stream: int) -> None:
        batch, heads, rows, _ = arguments.block_index.shape
        kernels["attend"].launch((batch * heads * rows, 1, 1), (pack_params(arguments),), stream)


def design_portable_sage(descriptor: SparseBlockDescriptor, device: DeviceFacts) -> PortableSageDesign:
    entry = f"portable_sage_{descriptor.v_layout}"
    text = f"""#include "portable/sage_attention.cuh"
extern "C" __global__ void __launch_bounds__({THREADS}, {CTAS_PER_SM}) {entry}(const __grid_constant__ SageParams p) {{
    extern __shared__ __align__(128) u8 shared[];
    static_assert(SageConfig::kThreads == {THREADS} && SageConfig::kSmemBytes == {SMEM_BYTES});
    SageAttention<{str(descriptor.v_layout == 'interleaved16').lower()}>(p, shared).run();
}}
"""
    products = "e4m3" if device.capability >= (8, 9) else "fp16"
    return PortableSageDesign({"attend": KernelSource(entry, text, THREADS, SMEM_BYTES)},
                              {"tile": [64, 64], "stages": 2, "ctas_per_sm": CTAS_PER_SM, "pv_products": products})
