"""The signature of Sage block-sparse attention: its facts, its descriptor, and the checks of one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..arguments import SageArguments
from ..descriptor import SparseBlockDescriptor
from ..errors import problem
from ..planning.signature import Signature, register_signature
from ..reference.sage_layout import V_LAYOUTS
from ..runtime.devices import DeviceFacts
from . import checks
from .known_calls import RemembersCalls

HEAD_DIM, BLOCK = 128, 64
V_LAYOUT_HELP = "v_layout='natural' for quantize_sage_qkv's default, 'interleaved16' for tensors of FlashInfer's or SageAttention's quantizers"


def check_v_layout(value: Any) -> str:
    """TypeError for what is no str; ValueError, which says whose tensors have which layout."""
    if isinstance(value, str) and value not in V_LAYOUTS:
        raise ValueError(problem("v_layout", repr(value), " or ".join(map(repr, V_LAYOUTS)), f"pass {V_LAYOUT_HELP}: the two are silently different data"))
    return checks.one_of("v_layout", value, V_LAYOUTS)


def check_flags(uniform: Any, contiguous: Any) -> None:
    checks.flag("uniform_block_count", uniform)
    checks.flag("contiguous_block_indices", contiguous)
    if contiguous and not uniform:
        raise ValueError(problem("contiguous_block_indices", True, "uniform_block_count=True with it", "only rows of one count can be read from their last id"))


@register_signature
@dataclass(frozen=True)
class SageBlockSparseSignature(RemembersCalls, Signature):
    """Facts of one Sage block-sparse attention that change the plan built for it.

    batch_size, seq_len_k (tokens) and capacity (listed blocks per row) are upper bounds: a plan runs anything smaller.
    block_sizes_rank: None (no block_sizes), 1, 2 or 3. Raises TypeError and ValueError for what no engine could serve.
    """

    batch_size: int
    num_heads: int
    seq_len_q: int
    seq_len_k: int
    capacity: int
    has_counts: bool = False
    block_sizes_rank: int | None = None
    uniform: bool = False
    contiguous: bool = False
    v_layout: str = "natural"
    return_lse: bool = False
    assume_finite: bool = False

    capacities: ClassVar[tuple[str, ...]] = ("seq_len_k", "capacity", "batch_size")

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_heads", "seq_len_q", "seq_len_k", "capacity"):
            checks.integer(name, getattr(self, name))
        for name in ("has_counts", "return_lse", "assume_finite"):
            checks.flag(name, getattr(self, name))
        check_flags(self.uniform, self.contiguous)
        check_v_layout(self.v_layout)
        if self.block_sizes_rank is not None and (type(self.block_sizes_rank) is not int or self.block_sizes_rank not in (1, 2, 3)):
            raise ValueError(problem("block_sizes_rank", self.block_sizes_rank, "None, 1, 2 or 3", "shapes [N], [B, N] or [B, H, N]"))

    @property
    def label(self) -> str:
        extras = ["counts"] * self.has_counts + [f"sizes{self.block_sizes_rank}"] * (self.block_sizes_rank is not None)
        extras += ["uniform"] * self.uniform + ["contiguous"] * self.contiguous + ["lse"] * self.return_lse + ["finite"] * self.assume_finite
        sizes = f"sage B{self.batch_size} H{self.num_heads} q{self.seq_len_q} kv{self.seq_len_k} blocks 64x64 (max {self.capacity})"
        return " ".join([sizes, f"V {self.v_layout}", *extras])

    def lower(self) -> SparseBlockDescriptor:
        masks = {"length"} | ({"block_sizes"} if self.block_sizes_rank is not None else set())
        return SparseBlockDescriptor(
            row="q_block", batch_size=self.batch_size, seq_len_q=self.seq_len_q, num_qo_heads=self.num_heads, num_kv_heads=self.num_heads,
            head_dim=HEAD_DIM, q_block_size=BLOCK, listing="padded", span_tokens=BLOCK, max_spans_per_row=self.capacity,
            has_counts=self.has_counts and not self.uniform, contiguous_spans=self.contiguous, memory="strided", max_seq_len_kv=self.seq_len_k,
            v_layout=self.v_layout, masks=frozenset(masks), block_sizes_rank=self.block_sizes_rank, qk_dtype="int8",  # type: ignore[arg-type]
            v_dtype="float8_e4m3fn", out_dtype="bfloat16", return_lse=self.return_lse, assume_finite=self.assume_finite)

    # -- one call -------------------------------------------------------------------------------------

    def bind(self, device: DeviceFacts, q_int8: torch.Tensor, k_int8: torch.Tensor, v_fp8: torch.Tensor, q_scale: torch.Tensor,  # type: ignore[override]
             k_scale: torch.Tensor, v_scale: torch.Tensor, q2k_block_index: torch.Tensor, block_sparse_num: int, block_sizes: torch.Tensor | None = None,
             q2k_block_nums: torch.Tensor | None = None, softmax_scale: float | None = None, *, out: torch.Tensor | None = None,
             lse: torch.Tensor | None = None, validate: bool = True) -> SageArguments:
        """The arguments of `sage_block_sparse_attention`, checked and with outputs allocated."""
        scale = checks.positive_scale("softmax_scale", softmax_scale, HEAD_DIM ** -0.5)
        if validate:
            outputs, inputs = (out, lse), (q_int8, k_int8, v_fp8, q_scale, k_scale, v_scale, q2k_block_index, block_sizes, q2k_block_nums)
            call = self._passed.look(device, outputs, inputs)
            if not call.known:
                self._check(device.torch_device, *inputs)
            _check_count(block_sparse_num, q2k_block_index)
        if out is None:
            out = torch.empty(q_int8.shape, dtype=torch.bfloat16, device=q_int8.device)
        if lse is None and self.return_lse:
            lse = torch.empty(q_int8.shape[:3], dtype=torch.float32, device=q_int8.device)
        arguments = SageArguments(q_int8, k_int8, v_fp8, q_scale, k_scale, v_scale, out, lse, q2k_block_index, None if self.uniform else q2k_block_nums,
                                  block_sparse_num, block_sizes, scale, self.contiguous, self.v_layout)
        if validate and not call.apart():
            self._check_outputs(arguments, *outputs, known=call.known)
            self._passed.remember(call, outputs, inputs)
        return arguments

    def _check(self, device: torch.device, q: Any, k: Any, v: Any, q_scale: Any, k_scale: Any, v_scale: Any, index: Any, sizes: Any, counts: Any) -> None:
        _check_data("q_int8", q, torch.int8, device)
        _check_data("k_int8", k, torch.int8, device)
        _check_data("v_fp8", v, torch.float8_e4m3fn, device)
        if q.dim() != 4 or q.shape[1:] != (self.num_heads, self.seq_len_q, HEAD_DIM) or not 1 <= q.shape[0] <= self.batch_size:
            raise ValueError(problem("q_int8", f"shape {list(q.shape)}", f"[1..{self.batch_size}, {self.num_heads}, {self.seq_len_q}, {HEAD_DIM}]",
                                     "plan for the shape you run"))
        batch, heads = q.shape[:2]
        if k.dim() != 4 or k.shape[:2] != (batch, heads) or k.shape[3] != HEAD_DIM or not 1 <= k.shape[2] <= self.seq_len_k:
            raise ValueError(problem("k_int8", f"shape {list(k.shape)}", f"[{batch}, {heads}, 1..{self.seq_len_k}, {HEAD_DIM}]", "one KV head per query head"))
        blocks, rows = -(-k.shape[2] // BLOCK), -(-self.seq_len_q // BLOCK)
        if v.shape != (batch, heads, HEAD_DIM, blocks * BLOCK):
            raise ValueError(problem("v_fp8", f"shape {list(v.shape)}", f"[{batch}, {heads}, {HEAD_DIM}, {blocks * BLOCK}]",
                                     f"transpose V, pad its tokens to a multiple of {BLOCK}, and say {V_LAYOUT_HELP}"))
        for name, value, size in (("q_scale", q_scale, -(-self.seq_len_q // 128) * 4), ("k_scale", k_scale, blocks), ("v_scale", v_scale, HEAD_DIM)):
            _check_data(name, value, torch.float32, device)
            if value.shape != (batch, heads, size):
                raise ValueError(problem(name, f"shape {list(value.shape)}", f"[{batch}, {heads}, {size}]", "quantize with quantize_sage_qkv"))
        _check_int32("q2k_block_index", index, device)
        if index.dim() != 4 or index.shape[:3] != (batch, heads, rows) or not 1 <= index.shape[3] <= self.capacity:
            raise ValueError(problem("q2k_block_index", f"shape {list(index.shape)}", f"[{batch}, {heads}, {rows}, 1..{self.capacity}]",
                                     "one list per 64 queries"))
        self._check_lists(device, batch, heads, rows, blocks, sizes, counts)

    def _check_lists(self, device: torch.device, batch: int, heads: int, rows: int, blocks: int, sizes: Any, counts: Any) -> None:
        if counts is not None:
            _check_int32("q2k_block_nums", counts, device)
            if counts.shape != (batch, heads, rows):
                raise ValueError(problem("q2k_block_nums", f"shape {list(counts.shape)}", f"[{batch}, {heads}, {rows}]", "one count per list"))
        if (counts is not None) != self.has_counts:
            raise ValueError(problem("q2k_block_nums", "a tensor" if counts is not None else None, f"has_counts={self.has_counts}", "plan for what you run"))
        rank = None
        if sizes is not None:
            _check_int32("block_sizes", sizes, device)
            rank = sizes.dim()
            if tuple(sizes.shape) not in ((blocks,), (batch, blocks), (batch, heads, blocks)):
                raise ValueError(problem("block_sizes", f"shape {list(sizes.shape)}", f"[{blocks}], [{batch}, {blocks}] or [{batch}, {heads}, {blocks}]",
                                         "one size per key block"))
        if rank != self.block_sizes_rank:
            raise ValueError(problem("block_sizes", f"rank {rank}", f"block_sizes_rank={self.block_sizes_rank}", "plan for what you run"))

    def _check_outputs(self, a: SageArguments, out: Any, lse: Any, *, known: bool) -> None:
        """`known`: an equal call has passed; then only addresses are left to check."""
        inputs = {"q_int8": a.q, "k_int8": a.k, "v_fp8": a.v, "q_scale": a.q_scale, "k_scale": a.k_scale, "v_scale": a.v_scale,
                  "q2k_block_index": a.block_index, "q2k_block_nums": a.counts, "block_sizes": a.block_sizes}
        if not known:
            checks.in_memory(inputs)
        if out is not None:
            if not known:
                _check_output("out", out, torch.bfloat16, a.q.shape, a.q.device)
            checks.no_overlap("out", out, inputs)
        if lse is not None:
            if not self.return_lse:
                raise ValueError(problem("lse", "a tensor", None, "ask for it with return_lse=True"))
            if not known:
                _check_output("lse", lse, torch.float32, a.q.shape[:3], a.q.device)
            checks.no_overlap("lse", lse, {**inputs, "out": a.out})


def _check_output(name: str, value: Any, dtype: torch.dtype, shape: torch.Size, device: torch.device) -> None:
    _check_data(name, value, dtype, device)
    if value.shape != shape:
        raise ValueError(problem(name, f"shape {list(value.shape)}", f"{list(shape)}", f"allocate it so, in {dtype}"))
    checks.in_memory({name: value})


def _check_count(count: Any, index: torch.Tensor) -> None:
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(problem("block_sparse_num", f"{type(count).__name__} {count!r}", "an int", "pass the number of blocks per row"))
    if not 0 <= count <= index.shape[3]:
        raise ValueError(problem("block_sparse_num", count, f"0 to the {index.shape[3]} ids of a row", "also where q2k_block_nums gives the counts"))


def _check_data(name: str, value: Any, dtype: torch.dtype, device: torch.device) -> None:
    """TypeError for another type or dtype; ValueError for another device, gaps, or an address the copy engine cannot take."""
    checks.tensor(name, value)
    if value.dtype != dtype:
        raise TypeError(problem(name, value.dtype, dtype, f"allocate it in {dtype}" if name in ("out", "lse") else "quantize with quantize_sage_qkv"))
    _check_place(name, value, device)
    if value.data_ptr() % 16:
        raise ValueError(problem(name, f"address {value.data_ptr():#x}", "16-byte alignment", "copy it with .clone()"))


def _check_int32(name: str, value: Any, device: torch.device) -> None:
    checks.tensor(name, value)
    if value.dtype != torch.int32:
        raise ValueError(problem(name, value.dtype, torch.int32, "convert it with .to(torch.int32)"))
    _check_place(name, value, device)


def _check_place(name: str, value: torch.Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ValueError(problem(name, value.device, device, f"move it with .to('{device}')"))
    if not value.is_contiguous():
        checks.contiguous(name, value)
