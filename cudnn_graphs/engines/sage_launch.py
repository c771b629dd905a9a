"""What every kernel of Sage block-sparse attention is launched with: the packed `SageParams` of kernels/common/sage_params.cuh."""

from __future__ import annotations

import struct

from ..arguments import SageArguments
from .kernel_values import LOG2_E

_PARAMS = struct.Struct("<11Q11if")


def pack_params(a: SageArguments) -> bytes:
    batch, heads, seq_len_q, _ = a.q.shape
    rows, capacity = a.block_index.shape[2:]
    sizes, blocks = a.block_sizes, a.k_scale.shape[2]
    stride_b, stride_h = (0, 0) if sizes is None else ((0, 0), (blocks, 0), (heads * blocks, blocks))[sizes.dim() - 1]
    return _PARAMS.pack(
        a.q.data_ptr(), a.k.data_ptr(), a.v.data_ptr(), a.q_scale.data_ptr(), a.k_scale.data_ptr(), a.v_scale.data_ptr(), a.out.data_ptr(),
        0 if a.lse is None else a.lse.data_ptr(), a.block_index.data_ptr(), 0 if a.counts is None else a.counts.data_ptr(),
        0 if sizes is None else sizes.data_ptr(),
        heads, batch * heads, seq_len_q, a.k.shape[2], rows, blocks, capacity, a.count, stride_b, stride_h, a.contiguous, a.softmax_scale * LOG2_E)
