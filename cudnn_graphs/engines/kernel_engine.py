"""Engines made of our own CUDA kernels: one design per descriptor kind, one way to compile and load them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..descriptor import SparseBlockDescriptor
from ..runtime.cubins import CubinCache
from ..runtime.devices import DeviceFacts
from ..runtime.launch import LoadedKernel
from ..runtime.nvrtc import Cubin, KernelSource, Resources, source_digest
from .base import Compiled


class KernelDesign(Protocol):
    """What serves one descriptor on one device: a pure function of both, decided before anything is compiled."""

    kernels: Mapping[str, KernelSource]     # role -> source, in launch order
    workspace_bytes: int
    config: dict[str, Any]                  # tile sizes, stages, splits: for describe()

    def launch(self, kernels: Mapping[str, LoadedKernel], arguments: Any, workspace: int, stream: int) -> None: ...


Designer = Callable[[SparseBlockDescriptor, DeviceFacts], KernelDesign]


def kernel_facts(sources: Mapping[str, KernelSource], built: Mapping[str, Cubin]) -> list[dict[str, Any]]:
    """What a plan says of its kernels: `load_kernels` reads it again."""
    return [{"role": role, "name": sources[role].entry} | cubin.resources.to_json() for role, cubin in built.items()]


def load_kernels(sources: Mapping[str, KernelSource], compiled: Compiled, device: DeviceFacts) -> dict[str, LoadedKernel]:
    """The kernels of a plan's parts on its device, by role."""
    facts = {k["role"]: k for k in compiled.facts["kernels"]}
    resources = {role: Resources(**{field: facts[role][field] for field in Resources.__slots__}) for role in sources}
    return {role: LoadedKernel(Cubin(compiled.parts[role], resources[role], ""), source.entry, device.torch_device.index)
            for role, source in sources.items()}


class KernelEngine:
    """An engine whose plans are cubins. `designers` maps a descriptor kind to what designs it."""

    def __init__(self, name: str, designers: Mapping[str, Designer]) -> None:
        self.name = name
        self.designers = dict(designers)

    def design(self, descriptor: SparseBlockDescriptor, device: DeviceFacts) -> KernelDesign:
        return self.designers[descriptor.kind](descriptor, device)

    def compile(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, cubins: CubinCache) -> Compiled:
        design = self.design(descriptor, device)
        built = {role: cubins.get(source, device.arch) for role, source in design.kernels.items()}
        facts = {"config": design.config, "workspace_bytes": design.workspace_bytes, "kernels": kernel_facts(design.kernels, built)}
        return Compiled(facts, {role: cubin.image for role, cubin in built.items()})

    def load(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, compiled: Compiled) -> KernelExecutable:
        design = self.design(descriptor, device)
        return KernelExecutable(design, load_kernels(design.kernels, compiled, device))

    def source_digest(self, descriptor: SparseBlockDescriptor, device: DeviceFacts) -> str:
        digests = [source_digest(source) for source in self.design(descriptor, device).kernels.values()]
        return hashlib.sha256("".join(digests).encode()).hexdigest()


class KernelExecutable:
    """Loaded kernels with the design that launches them."""

    def __init__(self, design: KernelDesign, kernels: Mapping[str, LoadedKernel]) -> None:
        self.design, self.kernels = design, kernels
        self.workspace_bytes = design.workspace_bytes

    def launch(self, arguments: Any, workspace: int, stream: int) -> None:
        self.design.launch(self.kernels, arguments, workspace, stream)
