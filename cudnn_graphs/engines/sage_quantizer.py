"""The host half of the Sage quantizer kernel: outputs, scratch, one launch. `kernels/portable/sage_quantize.cuh` is the other."""

from __future__ import annotations

import functools
import struct

import torch

from ..runtime.cubins import CubinCache
from ..runtime.devices import DeviceFacts
from ..runtime.nvrtc import KernelSource
from ..runtime.streams import current_raw_stream, on_device
from .kernel_values import element_name

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
THREADS, SUM_LANES = 128, 32                # SageQuantizeConfig
_PARAMS = struct.Struct("<14Q12q7i4x")           # SageQuantizeParams


@functools.cache
def quantizer_source(dtype: torch.dtype, vector: bool) -> KernelSource:
    """vector: every row is contiguous and starts on 16 bytes."""
    element = element_name(dtype)
    entry = f"sage_quantize_{element}" + ("" if vector else "_strided")
    return KernelSource(entry, f"""#include "portable/sage_quantize.cuh"
extern "C" __global__ void __launch_bounds__({THREADS}, {_blocks_per_sm(dtype, vector)}) {entry}(const __grid_constant__ SageQuantizeParams p) {{
    static_assert(SageQuantizeConfig::kThreads == {THREADS} && SageQuantizeConfig::kSumLanes == {SUM_LANES});
    sage_quantize<{element}, {str(vector).lower()}>(p);
}}
""", threads=THREADS)


def _blocks_per_sm(dtype: torch.dtype, vector: bool) -> int:
    """Five keep enough loads in flight; with more, heads are read so far ahead that they leave L2. fp32 and gathered rows need registers."""
    return 3 if not vector else 4 if dtype == torch.float32 else 5


def quantize_on_gpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, v_layout: str, smooth_k: bool, device: DeviceFacts,
                    cubins: CubinCache) -> tuple[torch.Tensor, ...]:
    """As `reference.sage_quantize.quantize_on_cpu`, the same bits, in one pass over the head at a time."""
    batch, heads, seq_len_q, dim = q.shape
    seq_len_k = k.shape[2]
    blocks, all_heads = -(-seq_len_k // 64), batch * heads
    new = functools.partial(torch.empty, device=q.device)
    q_int8, k_int8 = (new((batch, heads, n, dim), dtype=torch.int8) for n in (seq_len_q, seq_len_k))
    v_fp8 = new((batch, heads, dim, blocks * 64), dtype=torch.float8_e4m3fn)
    q_scale, k_scale, v_scale = (new((batch, heads, n), dtype=torch.float32) for n in (-(-seq_len_q // 128) * 4, blocks, dim))
    zeroed = torch.zeros(2 * all_heads * dim + (3 + SUM_LANES) * all_heads + 1, dtype=torch.int32, device=q.device)
    k_mean = zeroed[:all_heads * dim].view(torch.float32).view(batch, heads, dim)
    block_sums, lane_sums = (new((all_heads, n, dim), dtype=torch.float32) for n in (blocks, SUM_LANES))
    v_amax = zeroed.data_ptr() + 4 * all_heads * dim
    params = _PARAMS.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), q_int8.data_ptr(), k_int8.data_ptr(), v_fp8.data_ptr(), q_scale.data_ptr(), k_scale.data_ptr(),
        v_scale.data_ptr(), k_mean.data_ptr(), block_sums.data_ptr(), lane_sums.data_ptr(), v_amax, v_amax + 4 * all_heads * dim,
        *q.stride(), *k.stride(), *v.stride(), heads, all_heads, seq_len_q, seq_len_k, blocks, smooth_k, v_layout == "interleaved16")
    with on_device(device):
        vector = all(_vector(t) for t in (q, k, v))
        kernel = cubins.loaded(quantizer_source(q.dtype, vector), device)
        kernel.launch((device.sm_count * _blocks_per_sm(q.dtype, vector), 1, 1), (params,), current_raw_stream(device))
    return q_int8, k_int8, v_fp8, q_scale, k_scale, v_scale, k_mean


def _vector(x: torch.Tensor) -> bool:
    per_16_bytes = 16 // x.element_size()
    return x.stride(3) == 1 and x.data_ptr() % 16 == 0 and not any(s % per_16_bytes for s, n in zip(x.stride()[:3], x.shape, strict=False) if n > 1)
