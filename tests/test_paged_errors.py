"""Every refusal of the paged operation: its type, and a message that says what came, what is needed and what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from bad_rows import WIDTH, clean_case
from paged_cases import PagedCase

from cudnn_graphs import BlockSparsePagedTSWrapper, PagedBlockSparseSignature, PlanStore, block_sparse_attention_with_paged_kv_cache
from cudnn_graphs.errors import CaptureError, CudnnGraphsError

SIZES = dict(batch_size=2, seq_len_q=16, max_seq_len_kv=200, num_qo_heads=4, num_kv_heads=2, head_dim=64, q_block_size=8, kv_block_size=16, page_size=16)


@pytest.fixture(scope="module")
def store() -> PlanStore:
    return PlanStore()


@pytest.fixture
def case() -> PagedCase:
    return PagedCase().make()


def says(kind: type[BaseException], name: str, got: str, need: str, fix: str) -> Any:
    """`name: got X; need Y; what to do`, each part holding the given text."""
    parts = (re.escape(part) for part in (got, need, fix))
    return pytest.raises(kind, match=re.compile("^{}: got .*{}.*; need .*{}.*; .*{}".format(re.escape(name), *parts), re.DOTALL))


def call(case: PagedCase, store: PlanStore, **changes: Any) -> None:
    """The one-shot with some arguments replaced. Where it raises it must leave `out` alone."""
    arguments: dict[str, Any] = dict(
        q=case.q, paged_kv_cache=case.cache, paged_kv_indptr=case.page_indptr, paged_kv_indices=case.page_indices, block_indptr=case.block_indptr,
        block_indices=case.block_indices, q_block_size=case.q_block_size, kv_block_size=case.kv_block_size, max_seq_len_kv=case.max_seq_len_kv,
        seq_lens_kv=case.seq_lens, mask_type=case.mask_type, out=torch.full(case.q.shape, 3.0, dtype=case.dtype), store=store, block_tables=case.block_tables)
    arguments |= changes
    try:
        block_sparse_attention_with_paged_kv_cache(**arguments)
    except Exception:
        assert "out" in changes or (arguments["out"] == 3.0).all(), "out was written before the error"
        raise


# -- sizes --------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("change", "kind", "name", "got", "need", "fix"), [
    *[({name: value}, TypeError, name, f"{type(value).__name__} {value!r}", "an int", "positive int")
      for name in SIZES for value in (True, 2.0, "8", None)],
    *[({name: value}, ValueError, name, str(value), "at least 1", "positive int") for name in SIZES for value in (0, -3)],
    *[({name: 2**31}, OverflowError, name, str(2**31), "2147483647", "32-bit") for name in SIZES],
    ({"max_blocks_per_row": 0}, ValueError, "max_blocks_per_row", "0", "at least 1", "positive int"),
    ({"max_blocks_per_row": True}, TypeError, "max_blocks_per_row", "bool True", "an int", "positive int"),
    ({"max_blocks_per_row": 2**31}, OverflowError, "max_blocks_per_row", str(2**31), "2147483647", "32-bit"),
    ({"num_qo_heads": 5}, ValueError, "num_qo_heads", "5", "multiple of num_kv_heads (2)", "same group"),
    *[({"head_dim": d}, ValueError, "head_dim", str(d), "(64, 128, 256)", "pad the heads") for d in (32, 96, 512)],
    *[({"page_size": p}, ValueError, "page_size", str(p), "(8, 16, 32, 64, 128, 256)", "pages of such a size") for p in (1, 4, 24, 512)],
    *[({"kv_block_size": b}, ValueError, "kv_block_size", str(b), "8, 16, 32 or a multiple of 64", "such a size") for b in (1, 4, 12, 24, 48, 96, 100)],
    ({"q_block_size": 1}, ValueError, "q_block_size", "1 with 2 heads per KV head", "a multiple of 8", "the smallest that works is 4"),
    ({"q_block_size": 6}, ValueError, "q_block_size", "6 with 2 heads per KV head", "a multiple of 8", "the smallest that works is 4"),
    ({"num_qo_heads": 6, "q_block_size": 4}, ValueError, "q_block_size", "4 with 3 heads per KV head", "a multiple of 8", "the smallest that works is 8"),
    ({"mask_type": "window"}, ValueError, "mask_type", "'window'", "'dense', 'causal'", "pick one"),
    ({"mask_type": 1}, TypeError, "mask_type", "int 1", "a str", "'dense', 'causal'"),
    ({"mask_type": None}, TypeError, "mask_type", "NoneType None", "a str", "'dense', 'causal'"),
    ({"mask_type": "causal", "max_seq_len_kv": 15}, ValueError, "seq_len_q", "16", "at most max_seq_len_kv (15)", "aligned to the last key"),
    ({"dtype": "float32"}, ValueError, "dtype", "'float32'", "'bfloat16', 'float16'", "pick one"),
    ({"kv_layout": "NHD"}, ValueError, "kv_layout", "'NHD'", "'tuple', 'combined'", "pick one"),
    ({"page_table": "list"}, ValueError, "page_table", "'list'", "'indptr', 'block_tables'", "pick one"),
    *[({name: 1}, TypeError, name, "int 1", "a bool", "True or False") for name in ("use_kv_valid_bits", "return_lse", "shared_pattern", "assume_finite")],
    ({"page_stride": 2047}, ValueError, "page_stride", "2047", "from 2048", "16-byte units"),
    ({"page_stride": 2052}, ValueError, "page_stride", "2052", "a multiple of 8", "16-byte units"),
    ({"page_stride": 2048.0}, TypeError, "page_stride", "float 2048.0", "an int", "positive int"),
])
def test_sizes(change, kind, name, got, need, fix):
    with says(kind, name, got, need, fix):
        PagedBlockSparseSignature(**{**SIZES, **change})


@pytest.mark.parametrize("accepted", [
    {"q_block_size": 4}, {"q_block_size": 100}, {"kv_block_size": 64 * 50}, {"page_size": 256, "kv_block_size": 8}, {"page_size": 8, "kv_block_size": 320},
    {"num_qo_heads": 2**10, "num_kv_heads": 1, "q_block_size": 1}, {"seq_len_q": 1, "mask_type": "causal", "max_seq_len_kv": 1}, {"page_stride": 2048},
    {"max_seq_len_kv": 2**31 - 1}, {"max_blocks_per_row": 10**6},
])
def test_sizes_that_peers_refuse_are_accepted(accepted):
    assert PagedBlockSparseSignature(**{**SIZES, **accepted}).lower().kind == "csr/paged"


def test_wrapper_dtypes_must_agree(store):
    wrapper = BlockSparsePagedTSWrapper()
    sizes = (2, 16, 200, 4, 2, 64, 8, 16, 16)
    for name in ("kv_data_type", "o_data_type"):
        with says(ValueError, name, "torch.bfloat16", "q_data_type (torch.float16)", "must agree"):
            wrapper.plan(*sizes, device="cpu", store=store, **{name: torch.bfloat16})
    with says(ValueError, "q_data_type", "torch.float32", "torch.bfloat16 or torch.float16", "convert"):
        wrapper.plan(*sizes, device="cpu", store=store, q_data_type=torch.float32)
    with says(TypeError, "q_data_type", "'bfloat16'", "a torch.dtype", "torch.bfloat16"):
        wrapper.plan(*sizes, device="cpu", store=store, q_data_type="bfloat16")
    with says(TypeError, "plan", "unknown arguments ['page_strid']", "page_stride", "PagedBlockSparseSignature"):
        wrapper.plan(*sizes, device="cpu", store=store, page_strid=4)


# -- tensors ------------------------------------------------------------------------------------------

def shifted(value: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """The same values, `elements` past an aligned address."""
    room = torch.empty(value.numel() + 16, dtype=value.dtype)
    return room[elements:elements + value.numel()].view(value.shape).copy_(value)


TENSORS: list[tuple[str, Any, type[Exception], str, str, str, str]] = [
    # argument, what it becomes, error, then the name and the three parts of its message
    ("q", lambda c: c.q.tolist(), TypeError, "q", "list", "torch.Tensor", "torch.as_tensor"),
    ("q", lambda c: c.q.float(), ValueError, "q", "torch.float32", "torch.bfloat16", "convert"),
    ("q", lambda c: c.q[0], ValueError, "q", "rank 3", "[B, Sq, Hq, D]", "dimensions"),
    ("q", lambda c: shifted(c.q), ValueError, "q", "address", "16-byte alignment", "multiples of 8 elements"),
    ("q", lambda c: c.q.mT.contiguous().mT, ValueError, "q", "strides", "a last dimension of stride 1", "contiguously"),
    ("q", lambda c: torch.empty(2, 16, 4, 68, dtype=c.dtype)[..., :64], ValueError, "q", "strides", "16-byte alignment", "multiples of 8"),
    ("q", lambda c: c.q[:0], ValueError, "q", "shape [0, ", "at least one of everything", "where there are queries"),
    ("q", lambda c: c.q.to("meta"), ValueError, "device", "meta", "cuda or cpu", "move"),
    ("paged_kv_cache", lambda c: list(c.cache) + [None], TypeError, "paged_kv_cache", "list", "(K, V) tuple", "pass one"),
    ("paged_kv_cache", lambda c: None, TypeError, "paged_kv_cache", "NoneType", "(K, V) tuple", "pass one"),
    ("paged_kv_cache", lambda c: (None, c.v_cache), TypeError, "paged_kv_cache", "NoneType", "torch.Tensor", "as_tensor"),
    ("paged_kv_cache", lambda c: (c.k_cache, 3), TypeError, "paged_kv_cache[1]", "int", "torch.Tensor", "as_tensor"),
    ("paged_kv_cache", lambda c: c.k_cache, ValueError, "paged_kv_cache", "rank 4", "[P, 2, Hkv, page, D]", "pass one"),
    ("paged_kv_cache", lambda c: (c.k_cache, c.v_cache.half()), ValueError, "paged_kv_cache[1]", "torch.float16", "torch.bfloat16", "must agree"),
    ("paged_kv_cache", lambda c: (c.k_cache, c.v_cache[:, :1]), ValueError, "paged_kv_cache[1]", "shape", "[P, 2, 16, 64]", "plan for"),
    ("paged_kv_cache", lambda c: (c.k_cache, c.v_cache[:-1]), ValueError, "paged_kv_cache", "V pages", "as many", "one cache"),
    ("paged_kv_cache", lambda c: (c.k_cache[:0], c.v_cache[:0]), ValueError, "paged_kv_cache[0]", "shape [0,", "[P, 2, 16, 64]", "plan for"),
    ("paged_kv_cache", lambda c: (shifted(c.k_cache), c.v_cache), ValueError, "paged_kv_cache[0]", "at 0x", "16-byte aligned", "compact inside"),
    ("paged_kv_cache", lambda c: (c.k_cache, c.v_cache.transpose(1, 2).contiguous().transpose(1, 2)), ValueError, "paged_kv_cache[1]", "strides", "strides",
     "compact inside"),
    ("paged_kv_cache", lambda c: (c.k_cache, c.v_cache.repeat(1, 2, 1, 1)[:, :2]), ValueError, "paged_kv_cache[1]", "strides [4096", "strides [2048",
     "page_stride"),
    ("paged_kv_cache", lambda c: torch.stack(c.cache, 1)[:, :1], ValueError, "paged_kv_cache", "shape", "[P, 2, 2, 16, 64]", "plan for"),
    ("paged_kv_indptr", lambda c: c.page_indptr.tolist(), TypeError, "paged_kv_indptr", "list", "torch.Tensor", "as_tensor"),
    ("paged_kv_indptr", lambda c: None, TypeError, "paged_kv_indptr", "NoneType", "torch.Tensor", "as_tensor"),
    ("paged_kv_indptr", lambda c: c.page_indptr.long(), TypeError, "paged_kv_indptr", "torch.int64", "torch.int32", ".to(torch.int32)"),
    ("paged_kv_indptr", lambda c: c.page_indptr[:-1], ValueError, "paged_kv_indptr", "shape [2]", "shape [3]", "docstring"),
    ("paged_kv_indptr", lambda c: c.page_indptr.repeat_interleave(2)[::2], ValueError, "paged_kv_indptr", "strides [2]", "contiguous", ".contiguous()"),
    ("paged_kv_indptr", lambda c: c.page_indptr.to("meta"), ValueError, "paged_kv_indptr", "meta", "cpu", ".to('cpu')"),
    ("paged_kv_indices", lambda c: c.page_indices.float(), TypeError, "paged_kv_indices", "torch.float32", "torch.int32", ".to(torch.int32)"),
    ("paged_kv_indices", lambda c: c.page_indices[None], ValueError, "paged_kv_indices", "shape [1,", "shape [n]", "docstring"),
    ("paged_kv_indices", lambda c: c.page_indices.repeat_interleave(2)[::2], ValueError, "paged_kv_indices", "strides [2]", "contiguous", ".contiguous()"),
    ("block_indptr", lambda c: c.block_indptr.numpy(), TypeError, "block_indptr", "ndarray", "torch.Tensor", "as_tensor"),
    ("block_indptr", lambda c: c.block_indptr.short(), TypeError, "block_indptr", "torch.int16", "torch.int32", ".to(torch.int32)"),
    ("block_indptr", lambda c: c.block_indptr.flatten(), ValueError, "block_indptr", "shape [12]", "shape [2, 2, 3]", "docstring"),
    ("block_indptr", lambda c: c.block_indptr[..., :-1].contiguous(), ValueError, "block_indptr", "shape [2, 2, 2]", "shape [2, 2, 3]", "docstring"),
    ("block_indptr", lambda c: c.block_indptr.mT.contiguous().mT, ValueError, "block_indptr", "strides", "contiguous", ".contiguous()"),
    ("block_indices", lambda c: c.block_indices.long(), TypeError, "block_indices", "torch.int64", "torch.int32", ".to(torch.int32)"),
    ("block_indices", lambda c: c.block_indices.view(1, -1), ValueError, "block_indices", "shape [1,", "shape [nnz]", "docstring"),
    ("block_indices", lambda c: c.block_indices.repeat_interleave(2)[::2], ValueError, "block_indices", "strides [2]", "contiguous", ".contiguous()"),
    ("seq_lens_kv", lambda c: [200, 3], TypeError, "seq_lens_kv", "list", "torch.Tensor", "as_tensor"),
    ("seq_lens_kv", lambda c: c.seq_lens.long(), TypeError, "seq_lens_kv", "torch.int64", "torch.int32", ".to(torch.int32)"),
    ("seq_lens_kv", lambda c: c.seq_lens[:1], ValueError, "seq_lens_kv", "shape [1]", "shape [2]", "docstring"),
    ("kv_valid_bits", lambda c: torch.zeros(2, 7, dtype=torch.int32), TypeError, "kv_valid_bits", "torch.int32", "torch.uint32", ".to(torch.uint32)"),
    ("kv_valid_bits", lambda c: torch.zeros(2, 6, dtype=torch.uint32), ValueError, "kv_valid_bits", "shape [2, 6]", "shape [2, 7]", "docstring"),
    ("kv_valid_bits", lambda c: torch.zeros(7, 2, dtype=torch.uint32).T, ValueError, "kv_valid_bits", "strides [1, 2]", "contiguous words", ".contiguous()"),
    ("block_tables", lambda c: torch.zeros(2, 13, dtype=torch.int32), ValueError, "paged_kv_indptr", "beside block_tables", "None for both", "one form"),
    ("sm_scale", lambda c: 0.0, ValueError, "sm_scale", "0.0", "finite number > 0", "None for 0.125"),
    ("sm_scale", lambda c: -1, ValueError, "sm_scale", "-1", "finite number > 0", "None for 0.125"),
    ("sm_scale", lambda c: float("nan"), ValueError, "sm_scale", "nan", "finite number > 0", "None for 0.125"),
    ("sm_scale", lambda c: float("inf"), ValueError, "sm_scale", "inf", "finite number > 0", "None for 0.125"),
    ("sm_scale", lambda c: True, TypeError, "sm_scale", "bool True", "a number", "None for 0.125"),
    ("sm_scale", lambda c: "0.1", TypeError, "sm_scale", "str '0.1'", "a number", "None for 0.125"),
    ("mask_type", lambda c: "full", ValueError, "mask_type", "'full'", "'dense', 'causal'", "pick one"),
    ("q_block_size", lambda c: 3, ValueError, "q_block_size", "3 with 2 heads", "a multiple of 8", "smallest that works is 4"),
    ("kv_block_size", lambda c: 17, ValueError, "kv_block_size", "17", "8, 16, 32 or a multiple of 64", "such a size"),
    ("max_seq_len_kv", lambda c: 2**40, OverflowError, "max_seq_len_kv", str(2**40), "2147483647", "32-bit"),
    ("out", lambda c: torch.empty_like(c.q).tolist(), TypeError, "out", "list", "torch.Tensor", "as_tensor"),
    ("out", lambda c: torch.empty_like(c.q)[:1], ValueError, "out", "[1, 16, 4, 64]", "[2, 16, 4, 64]", "like q"),
    ("out", lambda c: torch.empty_like(c.q, dtype=torch.float16), ValueError, "out", "torch.float16", "torch.bfloat16", "like q"),
    ("out", lambda c: torch.empty_like(c.q, device="meta"), ValueError, "out", "meta", "cpu", "like q"),
    ("out", lambda c: shifted(c.q), ValueError, "out", "address", "16-byte alignment", "multiples of 8"),
    ("out", lambda c: torch.empty(1, 16, 4, 64, dtype=c.dtype).expand(2, -1, -1, -1), ValueError, "out", "expanded", "one address per element", "torch.empty"),
    ("out", lambda c: c.q, ValueError, "out", "memory shared with q", "memory of its own", "another buffer"),
    ("out", lambda c: c.k_cache.flatten()[:c.q.numel()].view(c.q.shape), ValueError, "out", "paged_kv_cache (K)", "memory of its own", "another buffer"),
    ("out", lambda c: c.v_cache.flatten()[:c.q.numel()].view(c.q.shape), ValueError, "out", "paged_kv_cache (V)", "memory of its own", "another buffer"),
    ("engine", lambda c: "flash", ValueError, "engine", "'flash'", "reference, cudnn, portable, sm90", "leave it out"),
]


@pytest.mark.parametrize(("argument", "make", "kind", "name", "got", "need", "fix"), TENSORS, ids=[f"{i}-{row[0]}" for i, row in enumerate(TENSORS)])
def test_one_shot_tensors(case, store, argument, make, kind, name, got, need, fix):
    with says(kind, name, got, need, fix):
        call(case, store, **{argument: make(case)})


RUN_NAMES = {"q", "paged_kv_cache", "paged_kv_indptr", "paged_kv_indices", "seq_lens_kv", "block_indptr", "block_indices", "sm_scale", "out"}


@pytest.mark.parametrize(("argument", "make", "kind", "got"), [(r[0], r[1], r[2], r[4]) for r in TENSORS if r[0] in RUN_NAMES],
                         ids=[f"{i}-{r[0]}" for i, r in enumerate(TENSORS) if r[0] in RUN_NAMES])
def test_run_checks_the_same_structure(case, store, argument, make, kind, got):
    """run() with a correct call before the wrong one, so that a remembered structure cannot let it through."""
    positional, keywords = case.arguments()
    names = ("q", "paged_kv_cache", "paged_kv_indptr", "paged_kv_indices", "seq_lens_kv", "block_indptr", "block_indices")
    arguments = {**dict(zip(names, positional, strict=True)), **keywords}
    plan = store.get(case.signature(), "cpu")
    plan.run(**arguments)
    plan.run(**arguments, out=torch.empty_like(case.q))
    with pytest.raises(kind, match=": got .*; need .*; "):
        plan.run(**{**arguments, argument: make(case)})


def test_a_stride_that_only_one_element_may_have(case, store):
    """One element is contiguous at any stride; a longer list of that stride is not."""
    positional, keywords = case.arguments()
    plan = store.get(case.signature(), "cpu")
    case.block_indptr.zero_()
    spread = torch.zeros(20, dtype=torch.int32)[::2]
    plan.run(*positional[:-1], spread[:1], **keywords)
    with says(ValueError, "block_indices", "strides [2]", "contiguous", ".contiguous()"):
        plan.run(*positional[:-1], spread, **keywords)


def test_run_of_another_form_than_planned(case, store):
    positional, keywords = case.arguments()
    plan = store.get(case.signature(), "cpu")
    bits, table = torch.zeros(2, 7, dtype=torch.uint32), torch.zeros(2, 20, dtype=torch.int32)
    with says(ValueError, "kv_valid_bits", "a tensor", "None", "use_kv_valid_bits=True"):
        plan.run(*positional, kv_valid_bits=bits)
    with says(TypeError, "kv_valid_bits", "NoneType", "torch.Tensor", "as_tensor"):
        store.get(case.signature(use_kv_valid_bits=True), "cpu").run(*positional)
    with says(ValueError, "block_tables", "a tensor", "None", "page_table='block_tables'"):
        plan.run(*positional, block_tables=table)
    tables = store.get(case.signature(page_table="block_tables"), "cpu")
    with says(ValueError, "paged_kv_indptr", "beside block_tables", "None for both", "one form"):
        tables.run(*positional, block_tables=table)
    without = (*positional[:2], None, None, *positional[4:])
    with says(TypeError, "block_tables", "NoneType", "torch.Tensor", "as_tensor"):
        tables.run(*without)
    with says(ValueError, "block_tables", "strides [1, 2]", "contiguous rows", "row stride is free"):
        tables.run(*without, block_tables=torch.zeros(20, 2, dtype=torch.int32).T)
    with says(ValueError, "paged_kv_cache", "one tensor", "kv_layout='tuple'", "layout you run"):
        plan.run(positional[0], torch.stack(case.cache, 1), *positional[2:])
    with says(ValueError, "paged_kv_cache", "a tuple", "kv_layout='combined'", "layout you run"):
        store.get(case.signature(kv_layout="combined"), "cpu").run(*positional)
    with says(ValueError, "block_indptr", "shape [2, 2, 3]", "shape [2, 1, 3]", "docstring"):
        store.get(case.signature(shared_pattern=True), "cpu").run(*positional)
    with says(ValueError, "q", "shape [2, 16, 4, 64]", "[1..1, 16, 4, 64]", "shape you run"):
        PlanStore().get(case.signature(batch_size=1), "cpu").run(*positional)


def test_lse_given(case, store):
    positional, keywords = case.arguments()
    lse = torch.empty(2, 4, 16)
    with says(ValueError, "lse", "a tensor", "None", "return_lse=True"):
        store.get(case.signature(return_lse=False), "cpu").run(*positional, **keywords, lse=lse)
    plan = store.get(case.signature(), "cpu")
    for bad, got in ((lse.half(), "torch.float16"), (lse[:1], "[1, 4, 16]"), (lse.to("meta"), "meta")):
        with says(ValueError, "lse", got, "[2, 4, 16] torch.float32 on cpu", "allocate it so"):
            plan.run(*positional, **keywords, lse=bad)
    with says(ValueError, "lse", "strides", "contiguous", ".contiguous()"):
        plan.run(*positional, **keywords, lse=torch.empty(2, 16, 4).mT)
    room = torch.empty(2 * 16 * 4 * 64, dtype=case.dtype)
    with says(ValueError, "lse", "memory shared with out", "memory of its own", "another buffer"):
        plan.run(*positional, **keywords, out=room.view(case.q.shape), lse=room.view(torch.float32)[:128].view(2, 4, 16))
    with says(TypeError, "lse", "int", "torch.Tensor", "as_tensor"):
        plan.run(*positional, **keywords, lse=5)


def test_validate_false_skips_the_structure_checks(case, store):
    positional, keywords = case.arguments()
    plan = store.get(case.signature(), "cpu")
    out, _ = plan.run(*positional, **keywords)
    again, _ = plan.run(*positional, **keywords, validate=False)
    assert torch.equal(out, again)
    odd = shifted(case.q)
    plan.run(odd, *positional[1:], **keywords, validate=False)       # the reference engine needs no alignment
    with pytest.raises(ValueError, match="16-byte alignment"):
        plan.run(odd, *positional[1:], **keywords)


def test_interleaved_out_that_shares_no_byte_is_accepted(case, store):
    """q and out as halves of one fused buffer overlap in extent, not in bytes."""
    fused = torch.zeros(2, 16, 8, 64, dtype=case.dtype)
    fused[:, :, :4] = case.q
    positional, keywords = case.arguments()
    plan = store.get(case.signature(), "cpu")
    out, _ = plan.run(fused[:, :, :4], *positional[1:], **keywords, out=fused[:, :, 4:])
    assert torch.equal(out, plan.run(*positional, **keywords)[0])
    with says(ValueError, "out", "memory shared with q", "memory of its own", "another buffer"):
        plan.run(fused[:, :, :4], *positional[1:], **keywords, out=fused[:, :, 3:7])


# -- live values --------------------------------------------------------------------------------------

def _first_row(case: PagedCase) -> int:
    return int(case.block_indptr[0, 0, 0])


FAULTS: dict[str, tuple[Any, tuple[str, str, str, str]]] = {      # strongest first
    "page_id": (lambda c: c.page_indices.index_fill_(0, torch.tensor([int(c.page_indptr[1]) + 1]), -4),
                ("paged_kv_indices", "page -4 in request 1", "ids in [0, 14)", "live prefix")),
    "length": (lambda c: c.seq_lens[:1].fill_(0), ("seq_lens_kv", "0 for request 0", "lengths in [1, 96]", "max_seq_len_kv")),
    "page_table": (lambda c: c.page_indptr[2:].sub_(4), ("paged_kv_indptr", "3 as an end or as the number of pages of request 1", "span every live token",
                                                             "ceil(length / page_size) pages")),
    "block_indptr": (lambda c: c.block_indptr[1, 1, -1:].fill_(10**6),
                     ("block_indptr", "1000000 as the end of request 1, head 1, row 2", "0 <= begin <= end", "rebuild")),
    "block_id": (lambda c: c.block_indices[_first_row(c) + 2:_first_row(c) + 3].fill_(6),
                 ("block_indices", "block 6 in request 0, head 0, row 0", "inside the live length", "drop it")),
    "block_order": (lambda c: c.block_indices[_first_row(c) + 4:_first_row(c) + 5].copy_(c.block_indices[_first_row(c) + 3]),
                    ("block_indices", "out of order in request 0, head 0, row 1", "strictly increasing", "sort the row")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_live_faults_of_the_one_shot(store, fault):
    case = clean_case()
    call(case, store)
    break_it, parts = FAULTS[fault]
    break_it(case)
    with says(ValueError, *parts):
        call(case, store)


@pytest.mark.parametrize(("strong", "weak"), [(s, w) for i, s in enumerate(FAULTS) for w in list(FAULTS)[i + 1:]])
def test_the_strongest_fault_is_named(store, strong, weak):
    case = clean_case()
    for fault in (weak, strong):
        FAULTS[fault][0](case)
    with says(ValueError, *FAULTS[strong][1]):
        call(case, store)


@pytest.mark.parametrize(("change", "parts"), [
    (lambda c: c.page_indices[:1].fill_(c.k_cache.shape[0]), ("paged_kv_indices", "page 14 in request 0", "ids in [0, 14)", "live prefix")),
    (lambda c: c.seq_lens[1:].fill_(-7), ("seq_lens_kv", "-7 for request 1", "lengths in [1, 96]", "correct it")),
    (lambda c: (c.seq_lens[:1].fill_(97), c.page_indices[6:7].fill_(0)), ("seq_lens_kv", "97 for request 0", "lengths in [1, 96]", "raise max_seq_len_kv")),
    (lambda c: c.page_indptr[:1].fill_(1), ("paged_kv_indptr", "request 0", "offsets from 0", "pages")),
    (lambda c: c.page_indptr[1:2].fill_(100), ("paged_kv_indptr", "request 0", "never falling", "pages")),
    (lambda c: c.block_indptr[0, 1, :1].fill_(-1), ("block_indptr", "request 0, head 1, row 0", "0 <= begin", "rebuild")),
    (lambda c: c.block_indptr[0, 1, 1:2].fill_(0), ("block_indptr", "0 as the end of request 0, head 1, row 0", "0 <= begin <= end", "rebuild")),
    (lambda c: c.block_indices[3:4].fill_(-1), ("block_indices", "block -1 in request 0, head 0, row 0", "inside the live length", "drop it")),
])
def test_more_live_faults(store, change, parts):
    case = clean_case()
    change(case)
    with says(ValueError, *parts):
        call(case, store)


def test_causal_needs_as_many_keys_as_queries(store):
    case = clean_case("causal")
    case.seq_lens[1] = 23
    with says(ValueError, "seq_lens_kv", "23 for request 1", "lengths in [24, 96]", "correct it"):
        call(case, store)


def test_live_faults_with_a_rectangular_page_table(store):
    case = clean_case(page_table="block_tables")
    call(case, store)
    case.block_tables[1, 4] = -1
    with says(ValueError, "block_tables", "page -1 in request 1", "ids in [0, 14)", "live prefix"):
        call(case, store)
    case = clean_case(page_table="block_tables")
    with says(ValueError, "block_tables", "5 columns for request 0", "ceil(length / page_size)", "widen the table"):
        call(case, store, block_tables=case.block_tables[:, :5])


def test_pages_past_the_live_prefix_and_ids_in_gaps_are_never_judged(store):
    case = clean_case()
    assert (case.page_indices > case.k_cache.shape[0]).any() and (case.block_indices > 96).any()
    call(case, store)
    assert int(case.block_indptr.diff(dim=-1).max()) == WIDTH


# -- state --------------------------------------------------------------------------------------------

def test_run_before_plan():
    case = PagedCase().make()
    positional, keywords = case.arguments()
    with says(CudnnGraphsError, "BlockSparsePagedTSWrapper", "no plan", "a plan", "plan() first"):
        BlockSparsePagedTSWrapper().run(*positional, **keywords)
    assert issubclass(CudnnGraphsError, RuntimeError)


def test_a_failed_re_plan_keeps_the_old_plan(case, store):
    wrapper = BlockSparsePagedTSWrapper()
    sizes = dict(SIZES, device="cpu", store=store, q_data_type=torch.bfloat16)
    wrapper.plan(**sizes)
    old = wrapper.current_plan
    for change, kind in (({"head_dim": 100}, ValueError), ({"batch_size": True}, TypeError), ({"engine": "cudnn"}, NotImplementedError),
                         ({"engine": "none"}, ValueError), ({"device": "meta"}, ValueError)):
        with pytest.raises(kind):
            wrapper.plan(**{**sizes, **change})
        assert wrapper.current_plan is old
    positional, keywords = case.arguments()
    assert wrapper.run(*positional, **keywords).shape == case.q.shape


def test_an_engine_that_cannot_serve_names_every_engines_reason(case, store):
    with pytest.raises(NotImplementedError) as caught:
        call(case, store, engine="portable")
    text = str(caught.value)
    for part in ("engine 'portable' does not serve this", "csr/paged on cpu", "cudnn: ", "portable: portable on cpu needs a CUDA device", "sm90: "):
        assert part in text


def test_capture_refuses_the_one_shot_and_plan(case, monkeypatch):
    own = PlanStore()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with says(CaptureError, "block_sparse_attention_with_paged_kv_cache", "under CUDA graph capture", "before capture", "BlockSparsePagedTSWrapper"):
        call(case, own)
    with says(CaptureError, "plan", "under CUDA graph capture", "before capture", "capture run()"):
        BlockSparsePagedTSWrapper().plan(**SIZES, device="cpu", store=own)
    with says(CaptureError, "CUDA graph capture", "building paged", "before capture begins", "store.build(...)"):
        own.get(case.signature(), "cpu")
    assert own.stats().builds == 0
    assert issubclass(CaptureError, RuntimeError)


def test_a_plan_made_before_capture_is_found_and_runs_inside(case, monkeypatch):
    own = PlanStore()
    plan = own.get(case.signature(), "cpu")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert own.get(case.signature(), "cpu").built_for is plan.built_for
    positional, keywords = case.arguments()
    plan.run(*positional, **keywords)


def test_a_plan_is_immutable(case, store):
    plan = store.get(case.signature(), "cpu")
    with pytest.raises(AttributeError, match="immutable"):
        plan.signature = None
    with pytest.raises(TypeError):
        plan._built.header["engine"] = "other"


# -- what an adversary tried ----------------------------------------------------------------------------

def test_a_tuple_of_one_is_not_taken_for_the_combined_cache_that_passed_before(store):
    case = PagedCase(kv_layout="combined").make()
    positional, keywords = case.arguments()
    plan = store.get(case.signature(), "cpu")
    plan.run(*positional, **keywords)
    for cache in ((positional[1],), [positional[1]], (), (positional[1],) * 3):
        with says(TypeError, "paged_kv_cache", type(cache).__name__, "(K, V) tuple", "pass one"):
            plan.run(positional[0], cache, *positional[2:], **keywords)


@pytest.mark.parametrize("change", [
    lambda a: {"q": a["q"][..., ::1].mT.contiguous().mT}, lambda a: {"q": shifted(a["q"])}, lambda a: {"q": a["q"].half()},
    lambda a: {"cache": (a["cache"][0], shifted(a["cache"][1]))}, lambda a: {"cache": (a["cache"][0][:-1], a["cache"][1])},
    lambda a: {"seq_lens": a["seq_lens"].long()}, lambda a: {"seq_lens": a["seq_lens"][:1]}, lambda a: {"seq_lens": None},
    lambda a: {"block_indptr": a["block_indptr"][:, :1]}, lambda a: {"block_indptr": a["block_indptr"].mT.contiguous().mT},
    lambda a: {"block_indices": a["block_indices"].repeat_interleave(2)[::2]}, lambda a: {"block_indices": a["block_indices"][None]},
    lambda a: {"block_indices": a["block_indices"].float()}, lambda a: {"page_indices": a["page_indices"].repeat_interleave(2)[::2]},
    lambda a: {"page_indptr": a["page_indptr"][:-1]}, lambda a: {"page_indptr": None, "page_indices": None},
])
def test_nothing_that_is_refused_alone_is_accepted_after_a_call_that_passed(case, store, change):
    """`KnownCalls` skips checks for what has passed; every refusal must differ from it."""
    positional, keywords = case.arguments()
    given = dict(zip(("q", "cache", "page_indptr", "page_indices", "seq_lens", "block_indptr", "block_indices"), positional))
    for _ in range(2):
        store.get(case.signature(), "cpu").run(*positional, **keywords)
    with pytest.raises((TypeError, ValueError), match=": got .*; need .*; "):
        store.get(case.signature(), "cpu").run(*{**given, **change(given)}.values(), **keywords)


@pytest.mark.parametrize("scale", [10**400, 1e300, 1e-300])
def test_a_scale_that_fp32_does_not_hold(case, store, scale):
    with says(ValueError, "sm_scale", str(scale)[:40], "finite number > 0", "None for 0.125"):
        call(case, store, sm_scale=scale)


def test_an_out_that_overlaps_itself(case, store):
    room = torch.empty(case.q.numel(), dtype=case.dtype)
    for strides in ((64, 64, 64, 1), (4096, 256, 32, 1), (0, 256, 64, 1)):
        with says(ValueError, "out", f"overlapping tensor, strides {list(strides)}", "one address per element", "torch.empty"):
            call(case, store, out=room.as_strided(case.q.shape, strides))
    interleaved = torch.empty(2 * case.q.numel(), dtype=case.dtype).as_strided(case.q.shape, (64, 512, 128, 1))
    assert interleaved.shape[0] == 2
    call(case, store, out=interleaved.fill_(3.0))


def test_a_cuda_device_that_is_not_here(case, store, monkeypatch):
    def absent(*args: Any) -> Any:
        raise AssertionError("Torch not compiled with CUDA enabled")
    for name in ("get_device_properties", "current_device"):
        monkeypatch.setattr(torch.cuda, name, absent)
    for device in ("cuda", "cuda:77"):
        with says(CudnnGraphsError, "device", device, "a CUDA device that torch can use", "not compiled with CUDA"):
            store.get(case.signature(), device)
