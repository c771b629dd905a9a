"""Paged block-sparse attention, under FlashInfer's names: a one-shot function and a plan-then-run wrapper."""

from __future__ import annotations

from typing import Any

import torch

from ..engines.paged_inspection import Inspection, inspect_paged
from ..errors import CaptureError, CudnnGraphsError, problem
from ..planning import Plan, PlanStore, store_or_default
from ..runtime.devices import device_facts
from ..runtime.streams import is_capturing
from . import checks
from .paged_signature import DTYPES, PagedBlockSparseSignature, PagedKVCache

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def block_sparse_attention_with_paged_kv_cache(
        q: torch.Tensor, paged_kv_cache: PagedKVCache, paged_kv_indptr: torch.Tensor | None, paged_kv_indices: torch.Tensor | None,
        block_indptr: torch.Tensor, block_indices: torch.Tensor, q_block_size: int, kv_block_size: int, *, max_seq_len_kv: int,
        seq_lens_kv: torch.Tensor, kv_valid_bits: torch.Tensor | None = None, mask_type: str = "dense", sm_scale: float | None = None,
        out: torch.Tensor | None = None, block_tables: torch.Tensor | None = None, return_lse: bool = False, engine: str | None = None,
        store: PlanStore | None = None) -> Result:
    """Attention of q over the KV blocks that each block of query tokens lists, in a paged cache. Checks live values first.

    Shapes, with G = Hq / Hkv and R = ceil(Sq / q_block_size):
      q [B, Sq, Hq, D] bf16 or fp16, D 64, 128 or 256, last dim contiguous, 16-byte aligned rows; q_block_size * G % 8 == 0.
      paged_kv_cache [P, 2, Hkv, page, D] (K, V along dim 1) or a tuple (K, V) of [P, Hkv, page, D]; page 8 to 256, a power
        of two; pages compact inside, dim 0 may be padded.
      paged_kv_indptr int32 [B + 1], paged_kv_indices int32 [n]: token t of request b lies in page
        indices[indptr[b] + t // page], slot t % page. Or block_tables int32 [B, C] and None for both.
      block_indptr int32 [B, Hkv or 1, R + 1], block_indices int32 [nnz]: row r of (b, h) lists blocks
        indices[indptr[b, h, r] : indptr[b, h, r + 1]], strictly increasing; block j is tokens [j * kv_block_size,
        (j + 1) * kv_block_size), cut at the live length. kv_block_size 8, 16, 32 or a multiple of 64.
      seq_lens_kv int32 [B], 1 to max_seq_len_kv tokens; kv_valid_bits uint32 [B, ceil(max_seq_len_kv / 32)], 1 = attend.
    mask_type "causal": query i sees token t iff t <= seq_lens_kv[b] - Sq + i. sm_scale: None for 1 / sqrt(D).
    out: a tensor like q to write to. Keys that are not visible never reach the result, whatever bytes they hold.

    Returns out [B, Sq, Hq, D], or (out, lse [B, Hq, Sq] fp32 natural log) with return_lse. A query with no visible key
    is exactly 0 with lse -inf. No gradient flows: out is detached.

    Raises TypeError (not a tensor, wrong integer dtype), ValueError (shape, device, strides, alignment, sizes outside the
    surface, live values: page ids, lengths, page tables, block ranges, ids, order), OverflowError (a size above int32),
    NotImplementedError (no engine serves it on this device; each engine's reason), RuntimeError (CUDA graph capture).
    """
    if is_capturing():
        raise CaptureError(problem("block_sparse_attention_with_paged_kv_cache", "a call under CUDA graph capture", "a plan made before capture",
                                   "use BlockSparsePagedTSWrapper: plan() before, run() inside"))
    checks.tensor("q", q)
    facts = device_facts(q.device)
    store = store_or_default(store)
    widest = PagedBlockSparseSignature(**call_facts(q, paged_kv_cache, block_indptr, block_tables, q_block_size, kv_block_size, max_seq_len_kv,
                                                    kv_valid_bits, mask_type, return_lse))
    arguments = widest.bind(facts, q, paged_kv_cache, paged_kv_indptr, paged_kv_indices, seq_lens_kv, block_indptr, block_indices,
                            block_tables=block_tables, kv_valid_bits=kv_valid_bits, sm_scale=sm_scale, out=out)
    found = inspect_paged(arguments, facts, store.cubins)
    _raise_fault(found, widest, arguments.k.shape[0], arguments.block_indptr.shape)
    capacity = min(1 << max(found.widest_row - 1, 0).bit_length(), widest.max_blocks_per_row)  # type: ignore[type-var]
    plan = store.get(widest.replace(max_blocks_per_row=capacity), facts, engine)
    plan.launch(arguments)
    return arguments.result


class BlockSparsePagedTSWrapper:
    """Plan once, run per batch. `run` is capturable in a CUDA graph, never synchronizes and trusts live values safely."""

    def __init__(self) -> None:
        self._plan: Plan | None = None

    @property
    def current_plan(self) -> Plan:
        """The plan that `run` uses. RuntimeError before `plan()`."""
        if self._plan is None:
            raise CudnnGraphsError(problem("BlockSparsePagedTSWrapper", "no plan", "a plan", "call plan() first"))
        return self._plan

    def plan(self, batch_size: int, seq_len_q: int, max_seq_len_kv: int, num_qo_heads: int, num_kv_heads: int, head_dim: int, q_block_size: int,
             kv_block_size: int, page_size: int, *, device: Any, max_blocks_per_row: int | None = None, use_kv_valid_bits: bool = False,
             mask_type: str = "dense", q_data_type: torch.dtype = torch.float16, kv_data_type: torch.dtype | None = None,
             o_data_type: torch.dtype | None = None, return_lse: bool = False, assume_finite: bool = False, engine: str | None = None,
             store: PlanStore | None = None, **signature_fields: Any) -> None:
        """Build or look up the plan. Sizes are tokens and heads; batch_size, max_seq_len_kv and max_blocks_per_row are capacities.

        The three dtypes must agree. signature_fields: kv_layout, page_stride, page_table, shared_pattern. Raises as the
        one-shot does for sizes; RuntimeError under CUDA graph capture. A failed re-plan leaves the old plan usable.
        """
        if is_capturing():
            raise CaptureError(problem("plan", "a call under CUDA graph capture", "a plan made before capture", "call plan() first, capture run()"))
        for name, value in (("kv_data_type", kv_data_type), ("o_data_type", o_data_type)):
            if value is not None and value != q_data_type:
                raise ValueError(problem(name, value, f"q_data_type ({q_data_type})", "the three dtypes must agree"))
        dtype = _dtype_name("q_data_type", q_data_type)
        allowed = {"kv_layout", "page_stride", "page_table", "shared_pattern"}
        if unknown := set(signature_fields) - allowed:
            raise TypeError(problem("plan", f"unknown arguments {sorted(unknown)}", f"any of {sorted(allowed)}", "see PagedBlockSparseSignature"))
        signature = PagedBlockSparseSignature(
            batch_size, seq_len_q, max_seq_len_kv, num_qo_heads, num_kv_heads, head_dim, q_block_size, kv_block_size, page_size, mask_type=mask_type,
            use_kv_valid_bits=use_kv_valid_bits, dtype=dtype, return_lse=return_lse, max_blocks_per_row=max_blocks_per_row, assume_finite=assume_finite,
            **signature_fields)
        self._plan = store_or_default(store).get(signature, device, engine)

    def run(self, q: torch.Tensor, paged_kv_cache: PagedKVCache, paged_kv_indptr: torch.Tensor | None, paged_kv_indices: torch.Tensor | None,
            seq_lens_kv: torch.Tensor, block_indptr: torch.Tensor, block_indices: torch.Tensor, *, block_tables: torch.Tensor | None = None,
            kv_valid_bits: torch.Tensor | None = None, sm_scale: float | None = None, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
            workspace: torch.Tensor | None = None, validate: bool = True) -> Result:
        """Run on the caller's current stream; shapes as in `block_sparse_attention_with_paged_kv_cache`, batch at most the plan's.

        Live values are trusted yet guarded on the device: a row with a bad range, id, page or length gives zeros and lse
        -inf and touches nothing else; length 0 is legal. validate=False skips the host's structure checks. workspace: uint8,
        at least `current_plan.workspace_bytes`, of one run at a time. Returns out, or (out, lse); the given tensors themselves when given.
        """
        return self.current_plan.run(q, paged_kv_cache, paged_kv_indptr, paged_kv_indices, seq_lens_kv, block_indptr, block_indices,
                                     block_tables=block_tables, kv_valid_bits=kv_valid_bits, sm_scale=sm_scale, out=out, lse=lse, workspace=workspace,
                                     validate=validate)


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    """A signature's name of `dtype`, which came as the argument `name`."""
    for known, value in DTYPES.items():
        if value == dtype:
            return known
    if not isinstance(dtype, torch.dtype):
        raise TypeError(problem(name, repr(dtype), "a torch.dtype", "pass torch.bfloat16 or torch.float16"))
    raise ValueError(problem(name, dtype, "torch.bfloat16 or torch.float16", "convert q and the cache"))


def call_facts(q: torch.Tensor, cache: Any, block_indptr: Any, block_tables: Any, q_block_size: int, kv_block_size: int, max_seq_len_kv: int,
               valid_bits: Any, mask_type: str, return_lse: bool) -> dict[str, Any]:
    """The signature fields of one call, read off its tensors as far as they have the right rank."""
    combined = isinstance(cache, torch.Tensor)
    if not combined and not (isinstance(cache, (tuple, list)) and len(cache) == 2):
        raise TypeError(problem("paged_kv_cache", type(cache).__name__, "a tensor [P, 2, Hkv, page, D] or a (K, V) tuple", "pass one of the two"))
    k = checks.tensor("paged_kv_cache", cache if combined else cache[0])
    if q.dim() != 4:
        raise ValueError(problem("q", f"rank {q.dim()}", "[B, Sq, Hq, D]", "add the missing dimensions"))
    if not q.numel():
        raise ValueError(problem("q", f"shape {list(q.shape)}", "at least one of everything", "call it where there are queries"))
    if k.dim() != (5 if combined else 4):
        raise ValueError(problem("paged_kv_cache", f"rank {k.dim()}", "[P, 2, Hkv, page, D], or a tuple of [P, Hkv, page, D]", "pass one of the two"))
    num_kv_heads, page_size = k.shape[-3], k.shape[-2]
    indptr = checks.tensor("block_indptr", block_indptr)
    shared = indptr.dim() == 3 and indptr.shape[1] == 1 and num_kv_heads > 1
    return dict(batch_size=q.shape[0], seq_len_q=q.shape[1], max_seq_len_kv=max_seq_len_kv, num_qo_heads=q.shape[2], num_kv_heads=num_kv_heads,
                head_dim=q.shape[3], q_block_size=q_block_size, kv_block_size=kv_block_size, page_size=page_size, mask_type=mask_type,
                use_kv_valid_bits=valid_bits is not None, dtype=_dtype_name("q", q.dtype), return_lse=return_lse,
                kv_layout="combined" if combined else "tuple", page_stride=k.stride(0) if k.shape[0] > 1 else None,
                page_table="indptr" if block_tables is None else "block_tables", shared_pattern=shared)


def _raise_fault(found: Inspection, signature: PagedBlockSparseSignature, num_pages: int, indptr_shape: torch.Size) -> None:
    """ValueError for the strongest fault of the live values."""
    if found.fault is None:
        return
    least = signature.seq_len_q if signature.mask_type == "causal" else 1
    _, heads, ends = indptr_shape
    request, row = divmod(found.where, heads * (ends - 1))
    at = f"request {request}, head {row // (ends - 1)}, row {row % (ends - 1)}"
    if signature.page_table == "block_tables":
        pages, page_table = "block_tables", ("block_tables", f"{found.value} columns for request {found.where}", "ceil(length / page_size)", "widen the table")
    else:
        pages, page_table = "paged_kv_indices", (
            "paged_kv_indptr", f"{found.value} as an end or as the number of pages of request {found.where}",
            "offsets from 0, never falling, inside paged_kv_indices, that span every live token", "give each request ceil(length / page_size) pages")
    name, got, need, fix = {
        "page_id": (pages, f"page {found.value} in request {found.where}", f"ids in [0, {num_pages})", "fill the live prefix of every page list"),
        "length": ("seq_lens_kv", f"{found.value} for request {found.where}", f"lengths in [{least}, {signature.max_seq_len_kv}]",
                   "correct it or raise max_seq_len_kv"),
        "page_table": page_table,
        "block_indptr": ("block_indptr", f"{found.value} as the end of {at}", "0 <= begin <= end <= block_indices.numel()", "rebuild the offsets"),
        "block_id": ("block_indices", f"block {found.value} in {at}", "blocks that begin inside the live length", "drop it"),
        "block_order": ("block_indices", f"block {found.value} out of order in {at}", "strictly increasing ids within a row", "sort the row and drop repeats"),
    }[found.fault]
    raise ValueError(problem(name, got, need, fix))
