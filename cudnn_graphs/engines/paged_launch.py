"""What every kernel of paged block-sparse attention is launched with: the packed `PagedParams`, and the merge of splits.

`PagedParams` in kernels/common/paged_params.cuh has the fields that `pack_params` packs, in the same order.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..arguments import PagedArguments
from ..descriptor import SparseBlockDescriptor
from ..runtime.launch import LoadedKernel
from ..runtime.nvrtc import KernelSource
from .kernel_values import LOG2_E, element_name

_MERGE_WARPS = 4                                        # kMergeWarps in kernels/common/merge_splits.cuh

_PARAMS = struct.Struct("<13Q12q12ifi")                 # every field falls on its natural alignment


def pack_params(a: PagedArguments, partial_out: int = 0, partial_lse: int = 0, num_splits: int = 1) -> bytes:
    """The kernel's one argument. Partials are device pointers, shapes as in kernels/common/merge_splits.cuh."""
    q, k, out, pages, block_indptr, bits, lse, page_indptr = a.q, a.k, a.out, a.pages, a.block_indptr, a.valid_bits, a.lse, a.page_indptr
    batch, seq_len_q, num_qo_heads, _ = q.shape
    num_pages, num_kv_heads, page_size, _ = k.shape
    _, pattern_heads, row_ends = block_indptr.shape
    q_b, q_t, q_h, _ = q.stride()
    out_b, out_t, out_h, _ = out.stride()
    return _PARAMS.pack(
        q.data_ptr(), k.data_ptr(), a.v.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(),
        0 if page_indptr is None else page_indptr.data_ptr(), pages.data_ptr(), block_indptr.data_ptr(), a.block_indices.data_ptr(),
        a.seq_lens.data_ptr(), 0 if bits is None else bits.data_ptr(), partial_out, partial_lse,
        q_b, q_t, q_h, out_b, out_t, out_h,
        k.stride(0), num_pages, pages.shape[-1], pages.stride(0) if page_indptr is None else 0, a.block_indices.shape[0],
        0 if bits is None else bits.stride(0),
        batch, seq_len_q, num_kv_heads, num_qo_heads // num_kv_heads, row_ends - 1, a.q_block_size, a.kv_block_size, page_size,
        pattern_heads, a.max_seq_len_kv, a.max_blocks_per_row, num_splits, a.sm_scale * LOG2_E, a.causal)


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """Where a plan's partial results lie: `partial_out` at 0, `partial_lse` at `lse_offset`. One split needs none."""

    num_splits: int
    lse_offset: int
    nbytes: int

    @staticmethod
    def of(descriptor: SparseBlockDescriptor, num_splits: int) -> SplitWorkspace:
        """Sized by the descriptor's capacities, so that every smaller batch fits."""
        return SplitWorkspace._sized(descriptor, num_splits) if num_splits > 1 else SplitWorkspace(1, 0, 0)

    @staticmethod
    def one(descriptor: SparseBlockDescriptor) -> SplitWorkspace:
        """For a kernel that always writes its result as one partial."""
        return SplitWorkspace._sized(descriptor, 1)

    @staticmethod
    def _sized(descriptor: SparseBlockDescriptor, num_splits: int) -> SplitWorkspace:
        assert descriptor.seq_len_q is not None
        items = num_splits * descriptor.batch_size * descriptor.seq_len_q * descriptor.num_qo_heads
        lse_offset = 4 * items * descriptor.head_dim
        return SplitWorkspace(num_splits, lse_offset, lse_offset + 4 * items)

    def pack(self, arguments: PagedArguments, workspace: int) -> bytes:
        if self.num_splits == 1:
            return pack_params(arguments)
        return pack_params(arguments, workspace, workspace + self.lse_offset, self.num_splits)


def merge_source(descriptor: SparseBlockDescriptor) -> KernelSource:
    """The kernel that merges the splits of one launch: same params, launched by `launch_merge`."""
    dtype, d = element_name(descriptor.out_dtype), descriptor.head_dim
    entry = f"paged_merge_splits_{dtype}_d{d}"
    text = f"""#include "common/merge_splits.cuh"
#include "common/paged_params.cuh"
extern "C" __global__ void __launch_bounds__({32 * _MERGE_WARPS}) {entry}(const __grid_constant__ PagedParams p) {{
    const i32 heads = p.num_kv_heads * p.group;
    merge_splits<{dtype}, {d}>({{p.partial_out, p.partial_lse, p.out, p.lse, p.out_stride_b, p.out_stride_t, p.out_stride_h,
                                i64(p.batch) * p.seq_len_q * heads, p.seq_len_q, heads, p.num_splits}});
}}
"""
    return KernelSource(entry, text, threads=32 * _MERGE_WARPS)


def launch_merge(kernel: LoadedKernel, arguments: PagedArguments, params: bytes, stream: int) -> None:
    batch, seq_len_q, heads, _ = arguments.q.shape
    kernel.launch((-(-batch * seq_len_q * heads // _MERGE_WARPS), 1, 1), (params,), stream, early=True)
