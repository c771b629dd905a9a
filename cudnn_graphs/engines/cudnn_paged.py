"""The `cudnn` engine: full blocks by a folded cuDNN graph, tables, packing and partial tails by small kernels around it.

Four launches: fold (tables, lengths, packed q), the graph, the partial tail block of each row, unfold (merge by
lse, scatter, zeros for empty and bad rows). All of it in the reported workspace.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from dataclasses import dataclass

from ..arguments import PagedArguments
from ..descriptor import SparseBlockDescriptor
from ..graphs import paged_sdpa
from ..graphs.paged_sdpa import FoldedShape, Uid
from ..runtime.cubins import CubinCache
from ..runtime.cudnn_plans import LoadedPlan, build_plan, load_plan
from ..runtime.devices import DeviceFacts
from ..runtime.launch import LoadedKernel
from ..runtime.nvrtc import KernelSource, source_digest
from .base import Compiled
from .kernel_engine import kernel_facts, load_kernels
from .kernel_values import element_name
from .paged_launch import pack_params
from .portable_paged import PortableTailDesign, design_tail

_FOLD_THREADS = 256             # kFoldThreads in kernels/portable/fold_rows.cuh
_FOLD = struct.Struct("<7Qq4i")         # what FoldParams adds to PagedParams


@dataclass(frozen=True, slots=True)
class FoldWorkspace:
    """Byte offsets of everything a run keeps between its launches."""

    q: int
    out: int
    stats: int
    table: int
    seq_q: int
    seq_kv: int
    row_notes: int
    tail: int
    graph: int
    nbytes: int

    @classmethod
    def of(cls, shape: FoldedShape, tail_bytes: int, graph_bytes: int) -> FoldWorkspace:
        packed = shape.rows * shape.packed_rows
        sizes = (2 * packed * shape.head_dim, 2 * packed * shape.head_dim, 4 * packed, 4 * shape.rows * shape.columns, 4 * shape.rows, 4 * shape.rows,
                 4 * shape.rows, tail_bytes, graph_bytes)
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // 256) * 256)
        return cls(*offsets)


def fold_sources(descriptor: SparseBlockDescriptor) -> dict[str, KernelSource]:
    dtype, d = element_name(descriptor.out_dtype), descriptor.head_dim
    wrapper = 'extern "C" __global__ void __launch_bounds__(%d) %s(const __grid_constant__ FoldParams f) { %s(f); }\n'
    text = '#include "portable/fold_rows.cuh"\n'
    fold, unfold = f"paged_fold_rows_d{d}", f"paged_unfold_rows_{dtype}_d{d}"
    return {"fold": KernelSource(fold, text + wrapper % (_FOLD_THREADS, fold, f"fold_row<{d}>"), _FOLD_THREADS),
            "unfold": KernelSource(unfold, text + wrapper % (_FOLD_THREADS, unfold, f"unfold_row<{dtype}, {d}>"), _FOLD_THREADS)}


def tail_design(descriptor: SparseBlockDescriptor, device: DeviceFacts) -> PortableTailDesign | None:
    """The partial last block's kernel; none where the caller promises finite bytes and the graph takes it."""
    return None if descriptor.assume_finite else design_tail(descriptor, device)


def kernel_sources(descriptor: SparseBlockDescriptor, device: DeviceFacts) -> dict[str, KernelSource]:
    tail = tail_design(descriptor, device)
    return fold_sources(descriptor) | ({} if tail is None else {"tail": tail.kernel})


class CudnnPagedEngine:
    name = "cudnn"

    def compile(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, cubins: CubinCache) -> Compiled:
        import cudnn
        shape = FoldedShape.of(descriptor)
        plan = build_plan(lambda **where: paged_sdpa.build_graph(cudnn, shape, descriptor.qk_dtype, **where), device)
        sources = kernel_sources(descriptor, device)
        built = {role: cubins.get(source, device.arch) for role, source in sources.items()}
        tail = tail_design(descriptor, device)
        workspace = FoldWorkspace.of(shape, 0 if tail is None else tail.workspace_bytes, plan.workspace_bytes)
        facts = {
            "config": {"folded_rows": shape.rows, "packed_rows": shape.packed_rows, "sub_page": shape.sub_page, "table_columns": shape.columns,
                       "graph_workspace_bytes": plan.workspace_bytes},
            "workspace_bytes": workspace.nbytes,
            "kernels": [{"role": "graph", "name": name} for name in plan.kernels] + kernel_facts(sources, built),
        }
        return Compiled(facts, {"graph": plan.blob, **{role: cubin.image for role, cubin in built.items()}})

    def load(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, compiled: Compiled) -> CudnnPagedExecutable:
        kernels = load_kernels(kernel_sources(descriptor, device), compiled, device)
        graph_bytes = compiled.facts["config"]["graph_workspace_bytes"]
        names = tuple(kernel["name"] for kernel in compiled.facts["kernels"] if kernel["role"] == "graph")
        graph = load_plan(compiled.parts["graph"], device, (FoldedShape.of(descriptor), descriptor.qk_dtype, graph_bytes, names))
        return CudnnPagedExecutable(descriptor, device, graph, kernels, graph_bytes)

    def source_digest(self, descriptor: SparseBlockDescriptor, device: DeviceFacts) -> str:
        digest = hashlib.sha256(graph_source().encode())
        for source in kernel_sources(descriptor, device).values():
            digest.update(source_digest(source).encode())
        return digest.hexdigest()


def graph_source() -> str:
    """The text that decides what graph is built: part of a plan's identity, like a kernel's source."""
    from importlib.resources import files
    return files("cudnn_graphs.graphs").joinpath("paged_sdpa.py").read_text()


class CudnnPagedExecutable:
    """A loaded graph and the kernels around it. Immutable; runs from any thread."""

    def __init__(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, graph: LoadedPlan, kernels: dict[str, LoadedKernel],
                 graph_bytes: int) -> None:
        self.graph, self.kernels = graph, kernels
        self.shape = FoldedShape.of(descriptor)
        self.tail = tail_design(descriptor, device)
        self.workspace = FoldWorkspace.of(self.shape, 0 if self.tail is None else self.tail.workspace_bytes, graph_bytes)
        self.workspace_bytes = self.workspace.nbytes

    def launch(self, arguments: PagedArguments, workspace: int, stream: int) -> None:
        w, shape = self.workspace, self.shape
        tail_at = workspace + w.tail
        params = pack_params(arguments, tail_at, tail_at + (0 if self.tail is None else self.tail.partials.lse_offset)) + _FOLD.pack(
            workspace + w.q, workspace + w.out, workspace + w.stats, workspace + w.table, workspace + w.seq_q, workspace + w.seq_kv,
            workspace + w.row_notes, arguments.k.stride(0) // (shape.sub_page * shape.head_dim), shape.columns, shape.sub_page, shape.packed_rows,
            self.tail is None)
        grid = (shape.rows, 1, 1)
        self.kernels["fold"].launch(grid, (params,), stream)
        self._execute_graph(arguments, workspace, stream)
        if self.tail is not None:
            self.tail.launch(self.kernels["tail"], arguments, params, stream)
        self.kernels["unfold"].launch(grid, (params,), stream)

    def _execute_graph(self, arguments: PagedArguments, workspace: int, stream: int) -> None:
        w, scale = self.workspace, ctypes.c_float(arguments.sm_scale)
        buffers = {Uid.Q: workspace + w.q, Uid.K: arguments.k.data_ptr(), Uid.V: arguments.v.data_ptr(), Uid.K_TABLE: workspace + w.table,
                   Uid.V_TABLE: workspace + w.table, Uid.SEQ_Q: workspace + w.seq_q, Uid.SEQ_KV: workspace + w.seq_kv, Uid.OUT: workspace + w.out,
                   Uid.STATS: workspace + w.stats, Uid.SCALE: ctypes.addressof(scale)}
        self.graph.execute(buffers, workspace + w.graph, stream)
