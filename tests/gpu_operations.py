"""The three operations on a GPU behind one face: what capture, stream and thread tests run on every engine that serves them."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cases_qsa import HEAD_PAIRS, cut_windows, qkv, random_bitmap
from compile_worker import fill_cache
from paged_cases import PagedCase
from sage_cases import SageCase

from cudnn_graphs import Plan, PlanStore, QuerySparseSignature, SageBlockSparseSignature, build_qsa_metadata
from cudnn_graphs.planning import Signature, verdict
from cudnn_graphs.planning.engines import engine_named
from cudnn_graphs.runtime.cubins import CubinCache
from cudnn_graphs.runtime.devices import device_facts
from cudnn_graphs.runtime.nvrtc import KernelSource

Tensors = dict[str, torch.Tensor]

METADATA = ("lo", "hi", "blk_base", "tok_base", "block_first", "block_last")


# -- paged cases on the device ------------------------------------------------------------------------

def on_gpu(case: PagedCase) -> PagedCase:
    """The same call with its tensors on the device, strides kept."""
    def move(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(move, value))
        if not isinstance(value, torch.Tensor):
            return value
        extent = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1 if value.numel() else 0
        return value.as_strided((extent,), (1,)).to("cuda").as_strided(value.shape, value.stride())
    moved = {name: move(value) for name, value in case.tensors.items()}
    moved["k_cache"], moved["v_cache"] = (moved["cache"][:, 0], moved["cache"][:, 1]) if case.kv_layout == "combined" else moved["cache"]
    return PagedCase(**{f: getattr(case, f) for f in case.__dataclass_fields__ if f not in ("tensors", "device")}, tensors=moved, device="cuda")


def busy_case(engine: str, seed: int = 0, **changes: Any) -> PagedCase:
    """One call with a ragged tail and several blocks a row; with bits and causal where the engine serves them."""
    masks = {} if engine == "cudnn" else {"bits": True, "mask_type": "causal"}
    facts = dict(head_dim=128, seq_len_q=40, q_block_size=16, kv_block_size=32, page_size=16, max_seq_len_kv=300, num_qo_heads=4, num_kv_heads=2, seed=seed)
    return PagedCase(**{**facts, **masks, **changes}).make()


# -- operations ---------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Operation:
    """`make(engine, seed)` gives calls that differ in everything a run may change, equal in all that a signature fixes."""

    engines: tuple[str, ...]
    outputs: tuple[str, ...]
    make: Callable[[str, int], tuple[Signature, Tensors]]
    arguments: Callable[[Tensors], tuple[tuple[Any, ...], dict[str, Any]]]

    def run(self, plan: Plan, tensors: Tensors, **given: Any) -> Tensors:
        """The results by name."""
        positional, keywords = self.arguments(tensors)
        return dict(zip(self.outputs, plan.run(*positional, **keywords, **given), strict=True))


def _paged(engine: str, seed: int) -> tuple[Signature, Tensors]:
    """Other lengths, pages, block lists and masks for each seed; a cache of another number of pages."""
    case = on_gpu(busy_case(engine, seed))
    return case.signature(), paged_tensors(case)


def paged_tensors(case: PagedCase) -> Tensors:
    names = ("q", "k_cache", "v_cache", "page_indptr", "page_indices", "seq_lens", "block_indptr", "block_indices", "valid_bits")
    return {name: getattr(case, name) for name in names if getattr(case, name) is not None}


def _paged_arguments(t: Tensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((t["q"], (t["k_cache"], t["v_cache"]), t["page_indptr"], t["page_indices"], t["seq_lens"], t["block_indptr"], t["block_indices"]),
            {"kv_valid_bits": t.get("valid_bits")})


def _sage(engine: str, seed: int) -> tuple[Signature, Tensors]:
    """Other lists, counts and block sizes for each seed."""
    case = SageCase(heads=3, seq_q=700, counts=True, sizes_rank=3, seed=seed).make().to("cuda")
    names = ("q", "k", "v", "q_scale", "k_scale", "v_scale", "index", "sizes", "nums")
    return (SageBlockSparseSignature(1, 3, 700, case.seq_k, case.capacity, has_counts=True, block_sizes_rank=3, return_lse=True),
            {name: getattr(case, name) for name in names})


def _sage_arguments(t: Tensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (t["q"], t["k"], t["v"], t["q_scale"], t["k_scale"], t["v_scale"], t["index"], 4, t["sizes"], t["nums"]), {}


def _bitmap(engine: str, seed: int) -> tuple[Signature, Tensors]:
    """Other sequences, windows and bitmaps for each seed, as many tokens and blocks."""
    lengths = [1100, 61, 900, 3, 407, 1130]
    random.Random(seed).shuffle(lengths)
    metadata = cut_windows(build_qsa_metadata([sum(lengths[:i]) for i in range(len(lengths) + 1)]), seed)
    q, k, v = qkv(sum(lengths), HEAD_PAIRS[0], seed)
    tensors = {"q": q, "k": k, "v": v, "sel_blocks": random_bitmap(metadata, 0.3, seed), **metadata._asdict()}
    return QuerySparseSignature(*HEAD_PAIRS[0], "bitmap", len(q)), {name: x.cuda() for name, x in tensors.items()}


def _bitmap_arguments(t: Tensors) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (t["q"], t["k"], t["v"], t["sel_blocks"], *(t[name] for name in METADATA)), {}


def _indices(engine: str, seed: int) -> tuple[Signature, Tensors]:
    q, k, v = qkv(500, HEAD_PAIRS[1], seed)
    ids = torch.rand(500, 500, generator=torch.Generator().manual_seed(seed)).argsort(-1)[:, :64].int()
    ids[:, ::7] = -1
    return QuerySparseSignature(*HEAD_PAIRS[1], "indices", 500), {name: x.cuda() for name, x in {"q": q, "k": k, "v": v, "indices": ids}.items()}


PAGED = Operation(("cudnn", "portable", "sm90"), ("out", "lse"), _paged, _paged_arguments)
OPERATIONS = {
    "paged": PAGED,
    "sage": Operation(("portable", "sm90"), ("out", "lse"), _sage, _sage_arguments),
    "qsa": Operation(("portable", "sm90"), ("out", "out_fp32", "lse"), _bitmap, _bitmap_arguments),
    "qsa_indexed": Operation(("portable", "sm90"), ("out", "out_fp32", "lse"), _indices, lambda t: ((t["q"], t["k"], t["v"], t["indices"]), {})),
}
SERVED = [(name, engine) for name, operation in OPERATIONS.items() for engine in operation.engines]


@functools.cache
def inputs_of(name: str, engine: str, seed: int) -> tuple[Signature, Tensors]:
    """One call's signature and tensors. Shared: nothing writes to them."""
    return OPERATIONS[name].make(engine, seed)


# -- plans --------------------------------------------------------------------------------------------

def kernel_sources(engine: str, signature: Signature) -> list[KernelSource]:
    """What a plan compiles. Nothing where the engine does not serve it here."""
    from cudnn_graphs.engines import cudnn_paged
    descriptor, facts = signature.lower(), device_facts("cuda")
    if not verdict(engine, descriptor, facts).ok:
        return []
    if engine == "cudnn":
        return list(cudnn_paged.kernel_sources(descriptor, facts).values())
    return list(engine_named(engine).design(descriptor, facts).kernels.values())  # type: ignore[attr-defined]


def compiled_store(directory: Path, wanted: Iterable[tuple[Signature, str]]) -> PlanStore:
    """A store on disk whose cubins several processes have compiled: one process would take a minute."""
    _compile(directory / "kernels", wanted)
    return PlanStore(directory / "plans")


def _compile(directory: Path, wanted: Iterable[tuple[Signature, str]]) -> None:
    sources = {source.text: source for signature, engine in wanted for source in kernel_sources(engine, signature)}
    fill_cache(directory, sources.values(), device_facts("cuda").arch)


@functools.cache
def cubins_of_operations() -> CubinCache:
    """The kernels of everything in `SERVED`, compiled once a session: for `store.cubins` of any store."""
    directory = Path(os.environ["CUDNN_GRAPHS_CACHE_DIR"]) / "operations"
    _compile(directory, [(inputs_of(name, engine, 0)[0], engine) for name, engine in SERVED])
    return CubinCache(directory)


def new_store(root: Path) -> PlanStore:
    """An empty store whose plans need no compiler."""
    store = PlanStore(root / "plans")
    store.cubins = cubins_of_operations()
    return store


def equal(got: Tensors, want: Tensors) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


# -- graphs -------------------------------------------------------------------------------------------

def graph_of(record: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """What `record` launches, on a stream of the current device: torch's own capture stream stays on the device of a process's first capture."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        record()
    return graph


class Captured:
    """A graph of one run. Its tensors stay where they are; the contents of any of `calls` fit into them."""

    def __init__(self, operation: Operation, plan: Plan, calls: list[Tensors]) -> None:
        self.buffers = {name: max((tensors[name] for tensors in calls), key=torch.numel).clone() for name in calls[0]}
        self._fill(calls[0])
        self.outputs = operation.run(plan, self.buffers)            # loads whatever is loaded lazily
        torch.cuda.synchronize()
        self.graph = graph_of(lambda: operation.run(plan, self.buffers, **self.outputs))

    def _fill(self, tensors: Tensors) -> None:
        for name, buffer in self.buffers.items():
            buffer[:len(tensors[name])].copy_(tensors[name])

    def prepare(self, tensors: Tensors) -> None:
        self._fill(tensors)
        for output in self.outputs.values():
            output.fill_(float("nan"))
