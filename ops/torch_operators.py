"""The operations as torch operators, for graphs that torch.compile and torch.export make. Importing this file registers them:

  torch.ops.cudnn_graphs.paged_block_sparse_attention    as `BlockSparsePagedTSWrapper.run` -> (out, lse); the sizes that `plan` takes
      are read off the tensors, the others are keywords. A combined cache [P, 2, Hkv, page, D] is given as cache[:, 0], cache[:, 1].
  torch.ops.cudnn_graphs.sage_block_sparse_attention     as the function of that name -> (out, lse)
  torch.ops.cudnn_graphs.qsa_forward, .qsa_indexed_forward    as the functions of those names -> (out, out_fp32, lse)

Shapes, dtypes, semantics and errors are theirs. All are functional: nothing given is written to, results are new and contiguous. The
plan comes from `default_store()`, a hit in steady state; live values are trusted and guarded, so nothing synchronizes. Fake and meta
tensors give shapes, dtypes and devices only: what is wrong with a call is said when it runs, not when it is traced.
The dispatcher adds 15 us of host time under torch.inference_mode(), 38 elsewhere (2-core CPU): its autograd layer is a second way through Python.

No gradient flows: the operators register no autograd formula, and backward through one raises NotImplementedError, also when compiled.
Forward-mode AD (torch.func.jvp) gets zero tangents from the dispatcher, without an error: do not take it for a derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import problem
from ..planning import default_store
from .paged_block_sparse import call_facts
from .paged_signature import PagedBlockSparseSignature
from .query_sparse import qsa_forward, qsa_indexed_forward
from .sage_block_sparse import sage_block_sparse_attention

NAMESPACE = "cudnn_graphs"
# Strides are part of what a call is checked for: a compiler may not pad or reorder what it hands over. Older torch knows their order only.
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))

_paged_signature = functools.lru_cache(maxsize=1024)(PagedBlockSparseSignature)     # making one costs several times its lookup


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as torch.ops.cudnn_graphs.* on CPUs and GPUs."""
    name, _, rest = schema.partition("(")
    qualified = f"{NAMESPACE}::{name}"

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.define(qualified, "(" + rest, tags=_TAGS)
        torch.library.impl(qualified, ("cpu", "cuda"), run)
        torch.library.register_fake(qualified, fake)
        torch.library.register_autograd(qualified, _refuse, setup_context=_remember)
        return run

    return register


def _fake_paged(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _fake_sage(q_int8: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q_int8.new_empty(q_int8.shape, dtype=torch.bfloat16), q_int8.new_empty(q_int8.shape[:3], dtype=torch.float32)


def _fake_qsa(q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape, dtype=torch.float32), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


# -- no autograd --------------------------------------------------------------------------------------

def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Any = None) -> None:
    ctx.save_for_backward(*(x if needed else None for x, needed in zip(inputs, ctx.needs_input_grad)))


def _refuse(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Raises through an operator, since AOTAutograd traces the backward also of a model that only ever runs forward. It takes the
    gradients because what does not depend on them is moved into the forward graph."""
    return tuple(None if x is None else torch.ops.cudnn_graphs.no_autograd(gradients, x) for x in ctx.saved_tensors)


def _raise_no_autograd(gradients: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError(problem("backward", "a gradient through a torch.ops.cudnn_graphs operator", "inputs that require none",
                                      "the operators register no autograd: run them under torch.no_grad(), or detach their inputs"))


torch.library.define(f"{NAMESPACE}::no_autograd", "(Tensor[] gradients, Tensor like) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
torch.library.impl(f"{NAMESPACE}::no_autograd", ("cpu", "cuda"), _raise_no_autograd)
torch.library.register_fake(f"{NAMESPACE}::no_autograd", lambda gradients, like: torch.empty_like(like))


# -- the operators: every tensor is positional, as torch's autograd registration needs -----------------

@_operator("paged_block_sparse_attention("
           "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? paged_kv_indptr, Tensor? paged_kv_indices, Tensor seq_lens_kv, Tensor block_indptr, "
           "Tensor block_indices, Tensor? block_tables=None, Tensor? kv_valid_bits=None, *, int q_block_size, int kv_block_size, SymInt max_seq_len_kv, "
           "SymInt? max_blocks_per_row=None, str mask_type='dense', float? sm_scale=None, str? engine=None) -> (Tensor out, Tensor lse)", _fake_paged)
def _paged(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, paged_kv_indptr: torch.Tensor | None, paged_kv_indices: torch.Tensor | None,
           seq_lens_kv: torch.Tensor, block_indptr: torch.Tensor, block_indices: torch.Tensor, block_tables: torch.Tensor | None = None,
           kv_valid_bits: torch.Tensor | None = None, *, q_block_size: int, kv_block_size: int, max_seq_len_kv: int,
           max_blocks_per_row: int | None = None, mask_type: str = "dense", sm_scale: float | None = None, engine: str | None = None) -> Any:
    cache = (k_cache, v_cache)
    facts = call_facts(q, cache, block_indptr, block_tables, q_block_size, kv_block_size, max_seq_len_kv, kv_valid_bits, mask_type, return_lse=True)
    plan = default_store().get(_paged_signature(**facts, max_blocks_per_row=max_blocks_per_row), q.device, engine)
    return plan.run(q, cache, paged_kv_indptr, paged_kv_indices, seq_lens_kv, block_indptr, block_indices, block_tables=block_tables,
                    kv_valid_bits=kv_valid_bits, sm_scale=sm_scale)


@_operator("sage_block_sparse_attention("
           "Tensor q_int8, Tensor k_int8, Tensor v_fp8, Tensor q_scale, Tensor k_scale, Tensor v_scale, Tensor q2k_block_index, SymInt block_sparse_num, "
           "Tensor? block_sizes=None, Tensor? q2k_block_nums=None, float? softmax_scale=None, *, bool uniform_block_count=False, "
           "bool contiguous_block_indices=False, str v_layout='natural', str? engine=None) -> (Tensor out, Tensor lse)", _fake_sage)
def _sage(*inputs: Any, **settings: Any) -> Any:
    return sage_block_sparse_attention(*inputs, **settings, return_lse=True)


_operator("qsa_forward(Tensor q, Tensor k, Tensor v, Tensor sel_blocks, Tensor lo, Tensor hi, Tensor blk_base, Tensor tok_base, Tensor block_first, "
          "Tensor block_last, float scale=0.0625, int block_size=4, *, str? engine=None) -> (Tensor out, Tensor out_fp32, Tensor lse)",
          _fake_qsa)(qsa_forward)
_operator("qsa_indexed_forward(Tensor q, Tensor k, Tensor v, Tensor indices, float scale=0.0625, *, str? engine=None) "
          "-> (Tensor out, Tensor out_fp32, Tensor lse)", _fake_qsa)(qsa_indexed_forward)
