"""Sage INT8/FP8 block-sparse attention: the documented function, and a drop-in for FlashInfer's."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..errors import problem
from ..planning import PlanStore, store_or_default
from ..runtime.devices import device_facts
from . import checks
from .sage_signature import HEAD_DIM, SageBlockSparseSignature, check_flags, check_v_layout

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_signature = functools.lru_cache(maxsize=256)(SageBlockSparseSignature)     # one object per size: it remembers which calls passed its checks


def sage_block_sparse_attention(
        q_int8: torch.Tensor, k_int8: torch.Tensor, v_fp8: torch.Tensor, q_scale: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor,
        q2k_block_index: torch.Tensor, block_sparse_num: int, block_sizes: torch.Tensor | None = None, q2k_block_nums: torch.Tensor | None = None,
        softmax_scale: float | None = None, *, out: torch.Tensor | None = None, lse: torch.Tensor | None = None, return_lse: bool = False,
        uniform_block_count: bool = False, contiguous_block_indices: bool = False, v_layout: str = "natural", engine: str | None = None,
        store: PlanStore | None = None) -> Result:
    """Sage block-sparse attention; tensors of FlashInfer's or SageAttention's quantizers need v_layout="interleaved16".

    Non-causal attention of every 64 queries over the key blocks of 64 that their row lists, one KV head per query head.
    Everything is contiguous; with N = ceil(Sk / 64) and R = ceil(Sq / 64):
      q_int8 [B, H, Sq, 128], k_int8 [B, H, Sk, 128]; v_fp8 float8_e4m3fn [B, H, 128, N * 64], any bytes past token Sk.
      q_scale fp32 [B, H, ceil(Sq / 128) * 4], one per 32 queries; k_scale [B, H, N]; v_scale [B, H, 128]. All positive.
      q2k_block_index int32 [B, H, R, capacity]: the first `count` ids of a row, in any order; one listed twice counts twice, one
        outside [0, N) is skipped. count is q2k_block_nums int32 [B, H, R], or block_sparse_num where that is None; a count outside
        [0, capacity] makes its row empty.
      block_sizes int32 [N], [B, N] or [B, H, N]: leading tokens of each block that are visible.
    score = q . k * q_scale * k_scale * softmax_scale (None: 1 / sqrt(128)). P is rounded to FP8 on a GPU that has it.
    uniform_block_count: every row has block_sparse_num blocks, q2k_block_nums is ignored. contiguous_block_indices (needs it): only
    the last listed id is read, the ones before it count down by one, modulo N.
    v_layout: the token order of v_fp8, "natural" or "interleaved16". out bf16 [B, H, Sq, 128], lse fp32 [B, H, Sq]: written to when given.

    Returns out, or (out, lse) with return_lse, lse the natural log. A query with no visible key is exactly 0, lse -inf. Bytes
    of V that no query sees never reach the result. Under CUDA graph capture the plan must exist already.
    Raises TypeError (types and dtypes), ValueError (shapes, device, layout, counts, scale, flags), NotImplementedError (no engine
    serves it here), RuntimeError (a build under capture).
    """
    checks.flag("return_lse", return_lse)
    check_v_layout(v_layout)
    check_flags(uniform_block_count, contiguous_block_indices)
    signature = _signature(
        **_sizes(q_int8, k_int8, q2k_block_index), has_counts=q2k_block_nums is not None, block_sizes_rank=_rank(block_sizes),
        uniform=uniform_block_count, contiguous=contiguous_block_indices, v_layout=v_layout, return_lse=return_lse or lse is not None)
    facts = device_facts(q_int8.device)
    arguments = signature.bind(facts, q_int8, k_int8, v_fp8, q_scale, k_scale, v_scale, q2k_block_index, block_sparse_num, block_sizes, q2k_block_nums,
                               softmax_scale, out=out, lse=lse)
    plan = store_or_default(store).get(signature, facts, engine)
    plan.launch(arguments)
    return arguments.result if return_lse else arguments.out


def bsa_attn_sm120_blk64_sage_fwd(
        q_int8: torch.Tensor, k_int8: torch.Tensor, v_fp8: torch.Tensor, q_scale: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor,
        q2k_block_index: torch.Tensor, block_sparse_num: int, block_sizes: torch.Tensor | None = None, q2k_block_nums: torch.Tensor | None = None,
        softmax_scale: float | None = None, *, out: torch.Tensor | None = None, tma_descriptor_workspace: Any = None, uniform_block_count: bool = False,
        contiguous_block_indices: bool = False, backend: str = "cake", v_layout: str = "natural") -> torch.Tensor:
    """Drop-in for FlashInfer's; tensors of FlashInfer's or SageAttention's quantizers need v_layout="interleaved16".

    `sage_block_sparse_attention` on any architecture it serves. backend "cake" needs `out`; "cute_dsl" allocates it when absent and
    ignores both flags. tma_descriptor_workspace is accepted and ignored. Returns out; raises as sage_block_sparse_attention.
    """
    checks.one_of("backend", backend, ("cake", "cute_dsl"))
    for name, value in (("uniform_block_count", uniform_block_count), ("contiguous_block_indices", contiguous_block_indices)):
        checks.flag(name, value)
    if backend == "cake" and out is None:
        raise ValueError(problem("out", None, "a bfloat16 tensor like q_int8 with backend='cake'", "allocate it, or pass backend='cute_dsl'"))
    if backend == "cute_dsl":
        uniform_block_count = contiguous_block_indices = False
    result = sage_block_sparse_attention(
        q_int8, k_int8, v_fp8, q_scale, k_scale, v_scale, q2k_block_index, block_sparse_num, block_sizes, q2k_block_nums, softmax_scale, out=out,
        uniform_block_count=uniform_block_count, contiguous_block_indices=contiguous_block_indices, v_layout=v_layout)
    assert isinstance(result, torch.Tensor)
    return result


def _sizes(q: Any, k: Any, index: Any) -> dict[str, Any]:
    """The sizes of one call, read off its tensors as far as they have the right rank."""
    for name, value, shape in (("q_int8", q, "[B, H, Sq, 128]"), ("k_int8", k, "[B, H, Sk, 128]"), ("q2k_block_index", index, "[B, H, R, capacity]")):
        checks.tensor(name, value)
        if value.dim() != 4 or 0 in value.shape:
            raise ValueError(problem(name, f"shape {list(value.shape)}", f"{shape}, nothing empty", "add the missing dimensions"))
    if q.shape[3] != HEAD_DIM:
        raise ValueError(problem("q_int8", f"head_dim {q.shape[3]}", HEAD_DIM, "pad the heads to 128 before quantizing"))
    return dict(batch_size=q.shape[0], num_heads=q.shape[1], seq_len_q=q.shape[2], seq_len_k=k.shape[2], capacity=index.shape[3])


def _rank(block_sizes: Any) -> int | None:
    if block_sizes is None:
        return None
    rank = checks.tensor("block_sizes", block_sizes).dim()
    if rank not in (1, 2, 3):
        raise ValueError(problem("block_sizes", f"rank {rank}", "[N], [B, N] or [B, H, N]", "one size per key block"))
    return rank
