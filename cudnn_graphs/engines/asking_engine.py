"""A kernel engine that asks cuDNN first: where no cuDNN graph serves a kind, its plans quote cuDNN's own refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..descriptor import SparseBlockDescriptor
from ..runtime.cubins import CubinCache
from ..runtime.devices import DeviceFacts
from .base import Compiled
from .kernel_engine import Designer, KernelEngine

Ask = Callable[[SparseBlockDescriptor, DeviceFacts], dict[str, str]]


class AskingKernelEngine(KernelEngine):
    """`ask` maps a descriptor kind to what builds the cuDNN graph and returns its answer, kept as the fact "cudnn"."""

    def __init__(self, name: str, designers: Mapping[str, Designer], ask: Mapping[str, Ask]) -> None:
        super().__init__(name, designers)
        self.ask = dict(ask)

    def compile(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, cubins: CubinCache) -> Compiled:
        compiled = super().compile(descriptor, device, cubins)
        if descriptor.kind not in self.ask:
            return compiled
        return Compiled(compiled.facts | {"cudnn": self.ask[descriptor.kind](descriptor, device)}, compiled.parts)
