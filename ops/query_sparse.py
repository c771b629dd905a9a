"""Packed query-sparse attention: every query token attends the blocks, or the tokens, that its own row selects."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..arguments import QuerySparseArguments
from ..descriptor import SparseBlockDescriptor
from ..errors import problem
from ..planning import PlanStore, store_or_default
from ..planning.signature import Signature, register_signature
from ..runtime.devices import DeviceFacts, device_facts
from . import checks
from .known_calls import RemembersCalls
from .qsa_metadata import BLOCK_TOKENS

HEAD_DIM = 256
HEAD_PAIRS = ((12, 1), (24, 2), (6, 1), (3, 1))
SOURCES = ("bitmap", "indices")
MAX_INDICES = 2052
_LEAST_CLASS = 512
_METADATA = ("lo", "hi", "blk_base", "tok_base", "block_first", "block_last")
_SELECTION = {"bitmap": ("sel_blocks", *_METADATA), "indices": ("indices",)}

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def qsa_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sel_blocks: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, blk_base: torch.Tensor,
                tok_base: torch.Tensor, block_first: torch.Tensor, block_last: torch.Tensor, scale: float = 1 / 16, block_size: int = 4, *,
                out: torch.Tensor | None = None, out_fp32: torch.Tensor | None = None, lse: torch.Tensor | None = None,
                workspace: torch.Tensor | None = None, engine: str | None = None, store: PlanStore | None = None) -> Result:
    """Attention of a packed batch in which each query token selects blocks of four tokens by a bitmap.

    q [T, Hq, 256] bf16, k and v [T, Hkv, 256] bf16, 16-byte aligned; (Hq, Hkv) one of (12, 1), (24, 2), (6, 1), (3, 1): query head h reads
    KV head h // (Hq / Hkv). sel_blocks uint8 [T, NB], one row per query token for all its heads, any nonzero byte selects. lo, hi,
    blk_base, tok_base int32 [T] and block_first, block_last int32 [NB], as `build_qsa_metadata` makes them. Everything contiguous.

    Query t attends token j iff lo[t] <= j <= hi[t], 0 <= j < T and a selected block b has block_first[b] <= j <= min(block_last[b],
    block_first[b] + 3). Not causal by itself: hi decides, and the causal tail block is the caller's bit to set. Unattended keys and
    values never reach a result, whatever bytes they hold. Every run gives the same bits. Use `qsa_indexed_forward` where token ids exist
    already: it has no bitmap to read, which at long T is the larger part of the input.

    scale: any number of magnitude up to 1e37. out, out_fp32, lse: tensors to write to. workspace: uint8, at least the plan's workspace_bytes, of one run
    at a time.
    Returns out [T, Hq, 256] bf16, out_fp32 the same in fp32 (out is its rounding), lse [Hq, T] fp32, natural log, scale included. A query
    that attends nothing gives 0 and lse -inf. No gradient flows: an input that requires grad gives a detached output.

    Raises TypeError (not a tensor), ValueError (rank, shape, dtype, device, strides, alignment, scale, NB), NotImplementedError (T < 1,
    head_dim other than 256, another head pair, q not bf16, block_size not the int 4, no engine on this device: each engine's reason).
    """
    if type(block_size) is not int or block_size != BLOCK_TOKENS:
        raise NotImplementedError(problem("block_size", repr(block_size), f"the int {BLOCK_TOKENS}", "cut sequences into blocks of four tokens"))
    rows = (sel_blocks, lo, hi, blk_base, tok_base, block_first, block_last)
    return _forward("bitmap", (q, k, v, *rows, scale), {"out": out, "out_fp32": out_fp32, "lse": lse}, workspace, engine, store)


def qsa_indexed_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor, scale: float = 1 / 16, *,
                        out: torch.Tensor | None = None, out_fp32: torch.Tensor | None = None, lse: torch.Tensor | None = None,
                        workspace: torch.Tensor | None = None, engine: str | None = None, store: PlanStore | None = None) -> Result:
    """As `qsa_forward`, with the attended tokens listed: prefer it for long sequences when the ids exist already.

    indices int32 [T, W], contiguous, W a positive multiple of four up to 2052: absolute ids in the packed batch, in any order, -1
    anywhere; ids above t (and below 0) are dropped. No id may stand twice in a row: it would count twice. Everything else, the results
    and the errors are those of `qsa_forward`; W out of range is a NotImplementedError.
    """
    return _forward("indices", (q, k, v, indices, scale), {"out": out, "out_fp32": out_fp32, "lse": lse}, workspace, engine, store)


def _forward(source: str, inputs: tuple[Any, ...], outputs: dict[str, Any], workspace: torch.Tensor | None, engine: str | None,
             store: PlanStore | None) -> Result:
    q, k = inputs[:2]
    for name, value in zip(("q", "k"), (q, k)):
        if checks.tensor(name, value).dim() != 3:
            raise ValueError(problem(name, f"rank {value.dim()}", "[T, heads, 256]", "pack the batch along dim 0"))
    _check_query(q)
    signature = _signature(q.shape[1], k.shape[1], source, q.shape[0])
    facts = device_facts(q.device)
    arguments = signature.bind(facts, *inputs, **outputs)
    plan = store_or_default(store).get(signature, facts, engine)
    plan.launch(arguments, workspace)
    return arguments.result


@functools.lru_cache(maxsize=256)
def _signature(num_qo_heads: int, num_kv_heads: int, source: str, tokens: int) -> QuerySparseSignature:
    """One object per size, since it is the signature that remembers which structures have passed its checks: 40 us of a call."""
    return QuerySparseSignature(num_qo_heads, num_kv_heads, source, tokens)


def _check_query(q: torch.Tensor) -> None:
    """What only q can break and no engine serves."""
    if q.shape[0] < 1:
        raise NotImplementedError(problem("q", "T = 0", "at least one token", "skip the call"))
    if q.shape[2] != HEAD_DIM:
        raise NotImplementedError(problem("q", f"head_dim {q.shape[2]}", f"head_dim {HEAD_DIM}", "this operation serves one head_dim"))
    if q.dtype != torch.bfloat16:
        raise NotImplementedError(problem("q", q.dtype, "torch.bfloat16", "convert q, k and v"))


@register_signature
@dataclass(frozen=True)
class QuerySparseSignature(RemembersCalls, Signature):
    """Facts of one packed query-sparse attention that change the plan built for it.

    source: "bitmap" or "indices". max_tokens is a capacity and is rounded up to a power of two (512 at least): T is a run-time size, the
    kernels of every class are the same, and only the scratch (under one byte a token and KV head) grows with it.
    assume_finite: bytes that no query sees are promised finite. Raises NotImplementedError for a head pair that is not served.
    """

    num_qo_heads: int
    num_kv_heads: int
    source: str = "bitmap"
    max_tokens: int = _LEAST_CLASS
    assume_finite: bool = False

    capacities: ClassVar[tuple[str, ...]] = ("max_tokens",)

    def __post_init__(self) -> None:
        pair = self.num_qo_heads, self.num_kv_heads
        if pair not in HEAD_PAIRS or any(type(n) is not int for n in pair):      # 12.0 is equal to 12, and would have another key
            raise NotImplementedError(problem("heads", f"{self.num_qo_heads!r} query and {self.num_kv_heads!r} KV heads", f"one of {HEAD_PAIRS}",
                                              "this operation serves one model"))
        checks.one_of("source", self.source, SOURCES)
        checks.flag("assume_finite", self.assume_finite)
        tokens = checks.integer("max_tokens", self.max_tokens)
        object.__setattr__(self, "max_tokens", min(max(1 << (tokens - 1).bit_length(), _LEAST_CLASS), checks.INT32_MAX))

    @property
    def label(self) -> str:
        return f"qsa {self.source} T<={self.max_tokens} H{self.num_qo_heads}/{self.num_kv_heads} D{HEAD_DIM} bf16" + " finite" * self.assume_finite

    def lower(self) -> SparseBlockDescriptor:
        bitmap = self.source == "bitmap"
        return SparseBlockDescriptor(
            row="token", batch_size=1, seq_len_q=None, num_qo_heads=self.num_qo_heads, num_kv_heads=self.num_kv_heads, head_dim=HEAD_DIM, q_block_size=1,
            listing="bitmap" if bitmap else "token_ids", span_tokens=BLOCK_TOKENS if bitmap else 1, max_spans_per_row=None if bitmap else MAX_INDICES,
            memory="packed", max_seq_len_kv=self.max_tokens, masks=frozenset({"window" if bitmap else "causal"}), return_lse=True,
            assume_finite=self.assume_finite)

    # -- one call -------------------------------------------------------------------------------------

    def bind(self, device: DeviceFacts, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rows: Any, out: torch.Tensor | None = None,  # type: ignore[override]
             out_fp32: torch.Tensor | None = None, lse: torch.Tensor | None = None, validate: bool = True, **named: Any) -> QuerySparseArguments:
        """The run arguments of `qsa_forward` or `qsa_indexed_forward`, by `source`, checked and with outputs allocated."""
        selection, scale = self._selection(rows, named)
        if validate:
            scale = _finite(scale)
            outputs, inputs = (out, out_fp32, lse), (q, k, v, *selection.values())
            call = self._passed.look(device, outputs, inputs)
            if not call.known:
                self._check_tensors(device.torch_device, q, k, v, selection)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        out_fp32 = torch.empty(q.shape, dtype=torch.float32, device=q.device) if out_fp32 is None else out_fp32
        lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device) if lse is None else lse
        arguments = QuerySparseArguments(q, k, v, out, out_fp32, lse, scale, **selection)
        if validate and not call.apart():
            _check_outputs(arguments, outputs, selection, known=call.known)
            self._passed.remember(call, outputs, inputs)
        return arguments

    def _selection(self, rows: tuple[Any, ...], named: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """The tensors that select, by name, and the scale, however the caller passed them."""
        names, given = _SELECTION[self.source], dict(zip((*_SELECTION[self.source], "scale"), rows))
        if named or len(rows) < len(names) or len(rows) > len(names) + 1:
            need = f"q, k, v, {', '.join(names)}, scale"
            if len(rows) > len(names) + 1 or not set(named) <= {*names, "scale"} - set(given):
                raise TypeError(problem("run", f"{len(rows) + 3} arguments and {sorted(named)}", need, "see the operation's docstring"))
            given |= named
            if missing := [name for name in names if name not in given]:
                raise TypeError(problem("run", f"no {', '.join(missing)}", need, "see the operation's docstring"))
        return {name: given[name] for name in names}, given.get("scale", 1 / 16)

    def _check_tensors(self, device: torch.device, q: Any, k: Any, v: Any, selection: dict[str, Any]) -> None:
        for name, value in {"q": q, "k": k, "v": v, **selection}.items():
            checks.tensor(name, value)
        if q.dim() != 3:
            raise ValueError(problem("q", f"rank {q.dim()}", "[T, Hq, 256]", "pack the batch along dim 0"))
        _check_query(q)
        total = q.shape[0]
        if q.shape[1] != self.num_qo_heads or total > self.max_tokens:
            raise ValueError(problem("q", f"shape {list(q.shape)}", f"[1..{self.max_tokens}, {self.num_qo_heads}, {HEAD_DIM}]", "plan for the shape you run"))
        for name, value, heads in (("q", q, self.num_qo_heads), ("k", k, self.num_kv_heads), ("v", v, self.num_kv_heads)):
            _check(name, value, torch.bfloat16, (total, heads, HEAD_DIM), device)
            if value.data_ptr() % 16:
                raise ValueError(problem(name, f"address {value.data_ptr():#x}", "16-byte alignment", "start at a multiple of 8 elements"))
        if self.source == "bitmap":
            _check_bitmap(selection, total, device)
        else:
            _check_indices(selection["indices"], total, device)


def _finite(scale: Any) -> float:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= checks.SCALES[1]:
        raise ValueError(problem("scale", f"{repr(scale):.40}", f"a finite number, of magnitude up to {checks.SCALES[1]:g}", "pass a float, 1 / 16 by default"))
    return float(scale)


def _check(name: str, value: torch.Tensor, dtype: torch.dtype, shape: tuple[int | str, ...], device: torch.device) -> None:
    """Everything about an input that is a ValueError. A str in `shape` is a free size."""
    checks.contiguous(name, checks.metadata(name, value, dtype, shape, device, wrong_dtype=ValueError))


def _check_bitmap(selection: dict[str, Any], total: int, device: torch.device) -> None:
    bitmap = selection["sel_blocks"]
    _check("sel_blocks", bitmap, torch.uint8, (total, "NB"), device)
    blocks = bitmap.shape[1]
    if not 1 <= blocks <= checks.INT32_MAX:
        raise ValueError(problem("sel_blocks", f"NB = {blocks}", f"NB in [1, {checks.INT32_MAX}]", "every token lies in a block"))
    for name in _METADATA:
        _check(name, selection[name], torch.int32, (blocks if name.startswith("block") else total,), device)


def _check_indices(indices: torch.Tensor, total: int, device: torch.device) -> None:
    _check("indices", indices, torch.int32, (total, "W"), device)
    width = indices.shape[1]
    if width < 1 or width > MAX_INDICES or width % BLOCK_TOKENS:
        raise NotImplementedError(problem("indices", f"W = {width}", f"a positive multiple of {BLOCK_TOKENS} up to {MAX_INDICES}", "pad rows with -1"))


def _check_outputs(a: QuerySparseArguments, given: tuple[Any, Any, Any], selection: dict[str, torch.Tensor], known: bool) -> None:
    """`known`: an equal call has passed; then only addresses are left to check."""
    shape = tuple(a.q.shape)
    needs = {"out": (torch.bfloat16, shape), "out_fp32": (torch.float32, shape), "lse": (torch.float32, (shape[1], shape[0]))}
    others: dict[str, torch.Tensor | None] = {"q": a.q, "k": a.k, "v": a.v, **selection}
    if not known:
        checks.in_memory(others)
    for (name, (dtype, need)), value in zip(needs.items(), given):
        if value is not None:
            if not known:
                _check(name, checks.tensor(name, value), dtype, need, a.q.device)
                checks.in_memory({name: value})
                if name != "lse" and value.data_ptr() % 16:
                    raise ValueError(problem(name, f"address {value.data_ptr():#x}", "16-byte alignment", "allocate it with torch.empty"))
            checks.no_overlap(name, value, others)
            others[name] = value
