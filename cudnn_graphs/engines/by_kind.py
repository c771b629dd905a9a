"""One engine name over several engines, each for the descriptor kinds it was made for."""

from __future__ import annotations

from collections.abc import Mapping

from ..descriptor import SparseBlockDescriptor
from ..runtime.cubins import CubinCache
from ..runtime.devices import DeviceFacts
from .base import Compiled, Engine, Executable


class EngineByKind:
    def __init__(self, name: str, engines: Mapping[str, Engine]) -> None:
        self.name, self.engines = name, dict(engines)

    def compile(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, cubins: CubinCache) -> Compiled:
        return self.engines[descriptor.kind].compile(descriptor, device, cubins)

    def load(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, compiled: Compiled) -> Executable:
        return self.engines[descriptor.kind].load(descriptor, device, compiled)

    def source_digest(self, descriptor: SparseBlockDescriptor, device: DeviceFacts) -> str:
        return self.engines[descriptor.kind].source_digest(descriptor, device)
