"""The signature of paged block-sparse attention: its facts, its descriptor, and the checks of one call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from ..arguments import PagedArguments
from ..descriptor import SparseBlockDescriptor
from ..errors import problem
from ..planning.signature import Signature, register_signature
from ..runtime.devices import DeviceFacts
from . import checks
from .known_calls import RemembersCalls

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
PagedKVCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@register_signature
@dataclass(frozen=True)
class PagedBlockSparseSignature(RemembersCalls, Signature):
    """Facts of one paged block-sparse attention that change the plan built for it.

    batch_size, max_seq_len_kv (tokens) and max_blocks_per_row are capacities: a plan runs anything smaller.
    page_stride is in elements between pages of the cache, None when pages are compact. max_blocks_per_row
    None means every block of max_seq_len_kv. Raises the errors of the operation for what no engine could serve.
    """

    batch_size: int
    seq_len_q: int
    max_seq_len_kv: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    q_block_size: int
    kv_block_size: int
    page_size: int
    mask_type: str = "dense"
    use_kv_valid_bits: bool = False
    dtype: str = "bfloat16"
    return_lse: bool = False
    max_blocks_per_row: int | None = None
    kv_layout: str = "tuple"
    page_stride: int | None = None
    page_table: str = "indptr"
    shared_pattern: bool = False
    assume_finite: bool = False

    capacities: ClassVar[tuple[str, ...]] = ("max_seq_len_kv", "max_blocks_per_row", "batch_size")

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len_q", "max_seq_len_kv", "num_qo_heads", "num_kv_heads", "head_dim", "q_block_size", "kv_block_size", "page_size"):
            checks.integer(name, getattr(self, name))
        for name in ("use_kv_valid_bits", "return_lse", "shared_pattern", "assume_finite"):
            checks.flag(name, getattr(self, name))
        checks.one_of("mask_type", self.mask_type, ("dense", "causal"))
        checks.one_of("dtype", self.dtype, tuple(DTYPES))
        checks.one_of("kv_layout", self.kv_layout, ("tuple", "combined"))
        checks.one_of("page_table", self.page_table, ("indptr", "block_tables"))
        self._check_surface()
        if self.max_blocks_per_row is None:
            object.__setattr__(self, "max_blocks_per_row", self.all_blocks)
        else:
            checks.integer("max_blocks_per_row", self.max_blocks_per_row)
        if self.page_stride is not None:
            self._normalize_page_stride(checks.integer("page_stride", self.page_stride))

    def _check_surface(self) -> None:
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(problem("num_qo_heads", self.num_qo_heads, f"a multiple of num_kv_heads ({self.num_kv_heads})",
                                     "give every KV head the same group"))
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(problem("head_dim", self.head_dim, f"one of {HEAD_DIMS}", "pad the heads to one of them"))
        if self.page_size not in PAGE_SIZES:
            raise ValueError(problem("page_size", self.page_size, f"one of {PAGE_SIZES}", "lay the cache out in pages of such a size"))
        if self.kv_block_size not in (8, 16, 32) and self.kv_block_size % 64:
            raise ValueError(problem("kv_block_size", self.kv_block_size, "8, 16, 32 or a multiple of 64", "choose blocks of such a size"))
        group = self.num_qo_heads // self.num_kv_heads
        if self.q_block_size * group % 8:
            smallest = 8 // math.gcd(8, group)
            raise ValueError(problem("q_block_size", f"{self.q_block_size} with {group} heads per KV head",
                                     "q_block_size * (num_qo_heads / num_kv_heads) a multiple of 8", f"the smallest that works is {smallest}"))
        if self.mask_type == "causal" and self.seq_len_q > self.max_seq_len_kv:
            raise ValueError(problem("seq_len_q", self.seq_len_q, f"at most max_seq_len_kv ({self.max_seq_len_kv}) under the causal mask",
                                     "the last query is aligned to the last key"))

    def _normalize_page_stride(self, stride: int) -> None:
        if stride == self.compact_page_stride:
            object.__setattr__(self, "page_stride", None)
        elif stride < self.compact_page_stride or stride % 8:
            raise ValueError(problem("page_stride", stride, f"a multiple of 8 elements from {self.compact_page_stride}", "pad pages in whole 16-byte units"))

    def replace(self, **changes: Any) -> Self:
        """A changed copy. One that listed every block lists every block of the new sizes, unless max_blocks_per_row is named."""
        if self.max_blocks_per_row == self.all_blocks:
            changes = {"max_blocks_per_row": None, **changes}
        return super().replace(**changes)

    @property
    def all_blocks(self) -> int:
        """Blocks of a request of max_seq_len_kv tokens."""
        return -(-self.max_seq_len_kv // self.kv_block_size)

    @property
    def rows(self) -> int:
        return -(-self.seq_len_q // self.q_block_size)

    @property
    def compact_page_stride(self) -> int:
        return self.num_kv_heads * self.page_size * self.head_dim * (2 if self.kv_layout == "combined" else 1)

    @property
    def label(self) -> str:
        extras = [self.mask_type] if self.mask_type != "dense" else []
        extras += ["bits"] * self.use_kv_valid_bits + ["lse"] * self.return_lse + ["combined"] * (self.kv_layout == "combined")
        extras += ["padded"] * (self.page_stride is not None) + ["table"] * (self.page_table == "block_tables") + ["shared"] * self.shared_pattern
        extras += ["finite"] * self.assume_finite
        return (f"paged B{self.batch_size} q{self.seq_len_q} kv{self.max_seq_len_kv} H{self.num_qo_heads}/{self.num_kv_heads} D{self.head_dim} "
                f"blocks {self.q_block_size}x{self.kv_block_size} (max {self.max_blocks_per_row}) page {self.page_size} "
                + " ".join([{"bfloat16": "bf16", "float16": "fp16"}[self.dtype], *extras]))

    def lower(self) -> SparseBlockDescriptor:
        masks = {"length"}
        if self.mask_type == "causal" and self.seq_len_q > 1:       # one query sees every live token: causal is dense
            masks.add("causal")
        if self.use_kv_valid_bits:
            masks.add("valid_bits")
        return SparseBlockDescriptor(
            row="q_block", batch_size=self.batch_size, seq_len_q=self.seq_len_q, num_qo_heads=self.num_qo_heads, num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim, q_block_size=self.q_block_size, listing="csr", span_tokens=self.kv_block_size,
            max_spans_per_row=self.max_blocks_per_row, shared_pattern=self.shared_pattern, memory="paged", max_seq_len_kv=self.max_seq_len_kv,
            page_size=self.page_size, page_stride=self.page_stride, kv_layout=self.kv_layout, page_table=self.page_table,  # type: ignore[arg-type]
            masks=frozenset(masks), qk_dtype=self.dtype, v_dtype=self.dtype, out_dtype=self.dtype, return_lse=self.return_lse,  # type: ignore[arg-type]
            assume_finite=self.assume_finite)

    # -- one call -------------------------------------------------------------------------------------

    def bind(self, device: DeviceFacts, q: torch.Tensor, paged_kv_cache: PagedKVCache, paged_kv_indptr: torch.Tensor | None,  # type: ignore[override]
             paged_kv_indices: torch.Tensor | None, seq_lens_kv: torch.Tensor, block_indptr: torch.Tensor, block_indices: torch.Tensor, *,
             block_tables: torch.Tensor | None = None, kv_valid_bits: torch.Tensor | None = None, sm_scale: float | None = None,
             out: torch.Tensor | None = None, lse: torch.Tensor | None = None, validate: bool = True) -> PagedArguments:
        """The run arguments of `BlockSparsePagedTSWrapper.run`, checked and with outputs allocated."""
        scale = checks.positive_scale("sm_scale", sm_scale, self.head_dim ** -0.5)
        if validate:
            caches = paged_kv_cache if isinstance(paged_kv_cache, tuple) and len(paged_kv_cache) == 2 else (paged_kv_cache,)
            outputs, inputs = (out, lse), (q, *caches, paged_kv_indptr, seq_lens_kv, block_indptr, block_tables, kv_valid_bits)
            call = self._passed.look(device, outputs, inputs, (paged_kv_indices, block_indices))
            if not call.known:
                self._check_tensors(device.torch_device, q, paged_kv_cache, paged_kv_indptr, paged_kv_indices, seq_lens_kv, block_indptr, block_indices,
                                    block_tables, kv_valid_bits)
        k, v = (paged_kv_cache.select(1, 0), paged_kv_cache.select(1, 1)) if isinstance(paged_kv_cache, torch.Tensor) else paged_kv_cache
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if lse is None and self.return_lse:
            lse = torch.empty((q.shape[0], self.num_qo_heads, self.seq_len_q), dtype=torch.float32, device=q.device)
        arguments = PagedArguments(q, k, v, out, lse, paged_kv_indptr, paged_kv_indices if block_tables is None else block_tables,  # type: ignore[arg-type]
                                   block_indptr, block_indices, seq_lens_kv, kv_valid_bits, scale, self.max_seq_len_kv,
                                   self.max_blocks_per_row,  # type: ignore[arg-type]
                                   self.q_block_size, self.kv_block_size, self.mask_type == "causal")
        if validate and not call.apart():
            self._check_outputs(arguments, *outputs, known=call.known)
            self._passed.remember(call, outputs, inputs)
        return arguments

    def _check_tensors(self, device: torch.device, q: Any, cache: Any, page_indptr: Any, page_indices: Any, seq_lens: Any, block_indptr: Any,
                       block_indices: Any, block_tables: Any, valid_bits: Any) -> None:
        checks.tensor("q", q)
        if q.dtype != DTYPES[self.dtype]:
            raise ValueError(problem("q", q.dtype, DTYPES[self.dtype], "plan for the dtype you run"))
        if q.device != device:
            raise ValueError(problem("q", q.device, device, f"move it with .to('{device}'), or plan for {q.device}"))
        shape = q.shape
        if len(shape) != 4 or shape[1:] != (self.seq_len_q, self.num_qo_heads, self.head_dim) or not 1 <= shape[0] <= self.batch_size:
            raise ValueError(problem("q", f"shape {list(shape)}", f"[1..{self.batch_size}, {self.seq_len_q}, {self.num_qo_heads}, {self.head_dim}]",
                                     "plan for the shape you run"))
        checks.row_aligned("q", q)
        self._check_cache(device, cache)
        batch = shape[0]
        self._check_pages(device, batch, page_indptr, page_indices, block_tables)
        checks.contiguous("seq_lens_kv", checks.metadata("seq_lens_kv", seq_lens, torch.int32, (batch,), device))
        heads = 1 if self.shared_pattern else self.num_kv_heads
        checks.contiguous("block_indptr", checks.metadata("block_indptr", block_indptr, torch.int32, (batch, heads, self.rows + 1), device))
        checks.contiguous("block_indices", checks.metadata("block_indices", block_indices, torch.int32, ("nnz",), device))
        if self.use_kv_valid_bits:
            bits = checks.metadata("kv_valid_bits", valid_bits, torch.uint32, (batch, -(-self.max_seq_len_kv // 32)), device)
            if bits.stride(1) != 1 and bits.shape[1] > 1:
                raise ValueError(problem("kv_valid_bits", f"strides {list(bits.stride())}", "contiguous words", "call .contiguous() on it once"))
        elif valid_bits is not None:
            raise ValueError(problem("kv_valid_bits", "a tensor", "None", "plan with use_kv_valid_bits=True to use it"))

    def _check_cache(self, device: torch.device, cache: Any) -> None:
        combined = isinstance(cache, torch.Tensor)
        if not combined and not (isinstance(cache, (tuple, list)) and len(cache) == 2):
            raise TypeError(problem("paged_kv_cache", type(cache).__name__, "a tensor [P, 2, Hkv, page, D] or a (K, V) tuple", "pass one of the two"))
        if combined != (self.kv_layout == "combined"):
            raise ValueError(problem("paged_kv_cache", "one tensor" if combined else "a tuple", f"kv_layout={self.kv_layout!r}", "plan for the layout you run"))
        inner = (self.num_kv_heads, self.page_size, self.head_dim)
        page_stride = self.page_stride or self.compact_page_stride
        parts = {"paged_kv_cache": cache} if combined else {"paged_kv_cache[0]": cache[0], "paged_kv_cache[1]": cache[1]}
        for name, part in parts.items():
            checks.tensor(name, part)
            need, want = ((2, *inner) if combined else inner), _compact_strides(inner, combined)
            if part.dtype != DTYPES[self.dtype] or part.device != device:
                raise ValueError(problem(name, f"{part.dtype} on {part.device}", f"{DTYPES[self.dtype]} on {device}", "q and the cache must agree"))
            checks.in_memory({name: part})
            if part.dim() != len(need) + 1 or part.shape[1:] != need or part.shape[0] < 1:
                raise ValueError(problem(name, f"shape {list(part.shape)}", f"[P, {', '.join(map(str, need))}]", "plan for the cache you run"))
            strides = part.stride()
            if part.data_ptr() % 16 or (part.shape[0] > 1 and strides[0] != page_stride) or any(
                    s != w for s, w, n in zip(strides[1:], want, need) if n > 1):
                raise ValueError(problem(name, f"strides {list(strides)} at {part.data_ptr():#x}", f"strides {[page_stride, *want]}, 16-byte aligned",
                                         "pages must be compact inside; pass page_stride to plan for a padded first dimension"))
        if not combined and cache[0].shape[0] != cache[1].shape[0]:
            raise ValueError(problem("paged_kv_cache", f"{cache[0].shape[0]} K pages and {cache[1].shape[0]} V pages", "as many of each", "pass one cache"))

    def _check_pages(self, device: torch.device, batch: int, page_indptr: Any, page_indices: Any, block_tables: Any) -> None:
        if self.page_table == "block_tables":
            if page_indptr is not None or page_indices is not None:
                raise ValueError(problem("paged_kv_indptr", "a tensor beside block_tables", "None for both paged_kv_indptr and paged_kv_indices",
                                         "give the page table in one form"))
            table = checks.metadata("block_tables", block_tables, torch.int32, (batch, "C"), device)
            if table.stride(1) != 1 and table.shape[1] > 1:
                raise ValueError(problem("block_tables", f"strides {list(table.stride())}", "contiguous rows", "only the row stride is free"))
            return
        if block_tables is not None:
            raise ValueError(problem("block_tables", "a tensor", "None", "plan with page_table='block_tables' to use it"))
        if isinstance(page_indptr, torch.Tensor) and page_indptr.dim() == 2:
            raise ValueError(problem("paged_kv_indptr", f"shape {list(page_indptr.shape)}", f"[{batch + 1}] offsets", "pass a page table as block_tables="))
        checks.contiguous("paged_kv_indptr", checks.metadata("paged_kv_indptr", page_indptr, torch.int32, (batch + 1,), device))
        checks.contiguous("paged_kv_indices", checks.metadata("paged_kv_indices", page_indices, torch.int32, ("n",), device))

    def _check_outputs(self, arguments: PagedArguments, out: Any, lse: Any, *, known: bool) -> None:
        """`known`: shapes, dtypes and strides passed before; whether memory is shared depends on addresses and is always checked."""
        q = arguments.q
        if not known and out is not None:
            checks.tensor("out", out)
            if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
                raise ValueError(problem("out", f"{list(out.shape)} {out.dtype} on {out.device}", f"{list(q.shape)} {q.dtype} on {q.device}",
                                         "allocate it like q"))
            checks.row_aligned("out", out)
        if not known and lse is not None:
            self._check_lse(q, lse)
        a = arguments
        inputs = {"q": q, "paged_kv_cache (K)": a.k, "paged_kv_cache (V)": a.v, "seq_lens_kv": a.seq_lens, "block_indptr": a.block_indptr,
                  "block_indices": a.block_indices, "the page table": a.pages, "paged_kv_indptr": a.page_indptr, "kv_valid_bits": a.valid_bits}
        if not known:
            checks.in_memory({**inputs, "out": out, "lse": lse})
        if out is not None:
            checks.no_overlap("out", out, inputs)
        if lse is not None:
            checks.no_overlap("lse", lse, {**inputs, "out": a.out})

    def _check_lse(self, q: torch.Tensor, lse: Any) -> None:
        if not self.return_lse:
            raise ValueError(problem("lse", "a tensor", "None", "plan with return_lse=True to get it"))
        checks.tensor("lse", lse)
        need = (q.shape[0], self.num_qo_heads, self.seq_len_q)
        if lse.shape != need or lse.dtype != torch.float32 or lse.device != q.device:
            raise ValueError(problem("lse", f"{list(lse.shape)} {lse.dtype} on {lse.device}", f"{list(need)} torch.float32 on {q.device}", "allocate it so"))
        checks.contiguous("lse", lse)


def _compact_strides(inner: tuple[int, int, int], combined: bool) -> tuple[int, ...]:
    heads, page, dim = inner
    strides = (page * dim, dim, 1)
    return (heads * page * dim, *strides) if combined else strides
