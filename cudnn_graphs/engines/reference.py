"""The CPU engine: plain torch, for development and as a second opinion. On a GPU only when asked by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..descriptor import SparseBlockDescriptor
from ..reference.paged import attend_paged
from ..reference.query_sparse import query_sparse
from ..reference.sage import attend_sage
from ..runtime.cubins import CubinCache
from ..runtime.devices import DeviceFacts
from .base import Compiled

ATTEND: dict[str, Callable[[Any], None]] = {"csr/paged": attend_paged, "padded/strided": attend_sage,
                                           "bitmap/packed": query_sparse, "token_ids/packed": query_sparse}


class ReferenceEngine:
    """Nothing to build: a plan is the function that serves the descriptor's kind."""

    name = "reference"

    def compile(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, cubins: CubinCache) -> Compiled:
        return Compiled({"config": {}, "workspace_bytes": 0, "kernels": [{"name": ATTEND[descriptor.kind].__name__}]})

    def load(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, compiled: Compiled) -> ReferenceExecutable:
        return ReferenceExecutable(ATTEND[descriptor.kind])

    def source_digest(self, descriptor: SparseBlockDescriptor, device: DeviceFacts) -> str:
        return "torch"


class ReferenceExecutable:
    workspace_bytes = 0

    def __init__(self, attend: Callable[[Any], None]) -> None:
        self._attend = attend

    def launch(self, arguments: Any, workspace: int, stream: int) -> None:
        # The caller's autocast would halve the precision of every product, and its grad mode would tie `out` to a graph.
        with torch.no_grad(), torch.autocast(arguments.q.device.type, enabled=False):
            self._attend(arguments)
