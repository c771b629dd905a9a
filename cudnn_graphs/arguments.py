"""What one launch is handed: the tensors and live sizes of a call, already checked by its operation.

An operation's signature makes these (`Signature.bind`), a plan carries them to its engine's executable,
and nothing in between looks inside, but to see that a workspace meets none of its tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class PagedArguments:
    """One paged block-sparse launch. Shapes as in `cudnn_graphs.ops.paged_block_sparse`."""

    q: torch.Tensor                     # [B, Sq, Hq, D], last dim contiguous
    k: torch.Tensor                     # [P, Hkv, page, D], compact within a page
    v: torch.Tensor
    out: torch.Tensor                   # like q
    lse: torch.Tensor | None            # [B, Hq, Sq] fp32, contiguous
    page_indptr: torch.Tensor | None    # [B + 1] int32; None: pages is a table
    pages: torch.Tensor                 # [n] int32, or [B, C] with any row stride
    block_indptr: torch.Tensor          # [B, Hkv or 1, R + 1] int32, contiguous
    block_indices: torch.Tensor         # [nnz] int32
    seq_lens: torch.Tensor              # [B] int32
    valid_bits: torch.Tensor | None     # [B, words] uint32 or int32, row stride free
    sm_scale: float
    max_seq_len_kv: int                 # of this call's signature, not of the plan that serves it
    max_blocks_per_row: int
    q_block_size: int
    kv_block_size: int
    causal: bool

    @property
    def result(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return self.out if self.lse is None else (self.out, self.lse)


@dataclass(slots=True)
class SageArguments:
    """One Sage block-sparse launch. Shapes as in `cudnn_graphs.ops.sage_block_sparse`; everything contiguous."""

    q: torch.Tensor                     # [B, H, Sq, 128] int8
    k: torch.Tensor                     # [B, H, Sk, 128] int8
    v: torch.Tensor                     # [B, H, 128, N * 64] float8_e4m3fn
    q_scale: torch.Tensor               # [B, H, ceil(Sq / 128) * 4] fp32
    k_scale: torch.Tensor               # [B, H, N] fp32
    v_scale: torch.Tensor               # [B, H, 128] fp32
    out: torch.Tensor                   # [B, H, Sq, 128] bf16
    lse: torch.Tensor | None            # [B, H, Sq] fp32
    block_index: torch.Tensor           # [B, H, R, capacity] int32
    counts: torch.Tensor | None         # [B, H, R] int32; None: `count` blocks in every row
    count: int
    block_sizes: torch.Tensor | None    # [N], [B, N] or [B, H, N] int32
    softmax_scale: float
    contiguous: bool                    # only the last listed id is read, the others count down to it
    v_layout: str

    @property
    def result(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return self.out if self.lse is None else (self.out, self.lse)


@dataclass(slots=True)
class QuerySparseArguments:
    """One packed query-sparse launch. Shapes as in `cudnn_graphs.ops.query_sparse`; everything contiguous."""

    q: torch.Tensor                     # [T, Hq, 256] bf16
    k: torch.Tensor                     # [T, Hkv, 256] bf16
    v: torch.Tensor
    out: torch.Tensor                   # like q
    out_fp32: torch.Tensor              # [T, Hq, 256] fp32
    lse: torch.Tensor                   # [Hq, T] fp32
    scale: float
    sel_blocks: torch.Tensor | None = None      # [T, NB] uint8, with the six below; None: indices lists tokens
    lo: torch.Tensor | None = None              # [T] int32
    hi: torch.Tensor | None = None
    blk_base: torch.Tensor | None = None
    tok_base: torch.Tensor | None = None
    block_first: torch.Tensor | None = None     # [NB] int32
    block_last: torch.Tensor | None = None
    indices: torch.Tensor | None = None         # [T, W] int32

    @property
    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.out, self.out_fp32, self.lse
