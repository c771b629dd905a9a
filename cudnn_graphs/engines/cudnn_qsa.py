"""The `cudnn` engine of packed query-sparse attention: cuDNN Frontend's own operation, on the parts that it serves.

It allocates its results and scratch itself (T x NB int32 of it, 16 GiB at T = 131072 with every block listed), so a
run copies the results to where they belong and a plan reports no workspace.
"""

from __future__ import annotations

from typing import Any

from ..arguments import QuerySparseArguments
from ..descriptor import SparseBlockDescriptor
from ..runtime.cubins import CubinCache
from ..runtime.devices import DeviceFacts
from .base import Compiled

OPERATIONS = {"bitmap": "qsa_forward", "token_ids": "qsa_indexed_forward"}


class CudnnQsaEngine:
    """Nothing to build here: cuDNN Frontend compiles and caches its kernels."""

    name = "cudnn"

    def compile(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, cubins: CubinCache) -> Compiled:
        return Compiled({"config": {}, "workspace_bytes": 0, "kernels": [{"name": f"cudnn.ops.{OPERATIONS[descriptor.listing]}"}]})

    def load(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, compiled: Compiled) -> CudnnQsaExecutable:
        return CudnnQsaExecutable(OPERATIONS[descriptor.listing])

    def source_digest(self, descriptor: SparseBlockDescriptor, device: DeviceFacts) -> str:
        import cudnn
        return f"cudnn-frontend {cudnn.__version__}"


class CudnnQsaExecutable:
    workspace_bytes = 0

    def __init__(self, operation: str) -> None:
        import cudnn.ops
        self._operation = getattr(cudnn.ops, operation)

    def launch(self, arguments: QuerySparseArguments, workspace: int, stream: int) -> None:
        """On torch's current stream, which is `stream`."""
        a = arguments
        selection: tuple[Any, ...] = (a.indices,) if a.indices is not None else (
            a.sel_blocks, a.lo, a.hi, a.blk_base, a.tok_base, a.block_first, a.block_last)
        result = self._operation(a.q, a.k, a.v, *selection, a.scale)
        for name in ("out", "out_fp32", "lse"):
            getattr(a, name).copy_(result[name])
