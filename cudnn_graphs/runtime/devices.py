"""The facts about a device that decide what is built for it, without initializing anything on import."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CudnnGraphsError, problem


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device as planning sees it. ``index`` is None for a device described in a file, not present here."""

    kind: str                           # "cuda" or "cpu"
    index: int | None
    name: str
    capability: tuple[int, int]
    sm_count: int = 0
    smem_per_block: int = 0             # bytes a block may opt in to
    l2_bytes: int = 0
    total_bytes: int = 0
    properties: str | None = None       # cuDNN's serialized device properties, for deviceless builds

    @property
    def arch(self) -> str:
        """NVRTC's name of the architecture: sm_90a on Hopper (wgmma), plain elsewhere."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")

    @property
    def torch_device(self) -> torch.device:
        if self.kind == "cpu":
            return torch.device("cpu")
        if self.index is None:
            raise RuntimeError(f"device: got {self.name} described in a file; need the device itself; load plans on the machine that has it")
        return torch.device("cuda", self.index)

    def identity(self) -> dict[str, Any]:
        """What must agree between the device a plan was built for and the one that would load it."""
        return {"kind": self.kind, "name": self.name, "capability": list(self.capability), "sm_count": self.sm_count,
                "smem_per_block": self.smem_per_block, "l2_bytes": self.l2_bytes}


CPU = DeviceFacts(kind="cpu", index=None, name="cpu", capability=(0, 0))


@functools.cache
def _cuda_facts(index: int) -> DeviceFacts:
    p = torch.cuda.get_device_properties(index)
    return DeviceFacts(kind="cuda", index=index, name=p.name, capability=(p.major, p.minor), sm_count=p.multi_processor_count,
                       smem_per_block=p.shared_memory_per_block_optin, l2_bytes=p.L2_cache_size, total_bytes=p.total_memory)  # type: ignore[attr-defined]


def device_facts(device: torch.device | str | int | DeviceFacts | None) -> DeviceFacts:
    """Facts of a live device. None: the current CUDA device, or the CPU where there is none. RuntimeError for a CUDA device that is not here."""
    if isinstance(device, DeviceFacts):
        return device
    if device is None:
        return _cuda_facts(torch.cuda.current_device()) if torch.cuda.is_available() else CPU
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise ValueError(f"device: got {device}; need a cuda or cpu device; move the tensors there")
    try:
        return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)
    except (AssertionError, RuntimeError) as error:
        raise CudnnGraphsError(problem("device", device, "a CUDA device that torch can use here", f"torch says: {error}")) from error


def facts_from_properties(text: str) -> DeviceFacts:
    """Facts of an absent device from cuDNN's serialized device properties (`python -m cudnn_graphs device-props`). ValueError for any other text."""
    try:
        p = json.loads(text)
        version = int(p["deviceVer"])
        return DeviceFacts(kind="cuda", index=None, name=p["deviceName"], capability=(version // 100, version % 100 // 10),
                           sm_count=p["multiProcessorCount"], smem_per_block=p["maxSharedMemoryPerBlockOptin"],
                           l2_bytes=p["l2CacheSize"], total_bytes=p["totalGlobalMem"], properties=text)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(problem("device properties", f"a text without {error}" if isinstance(error, KeyError) else error,
                                 "the output of `python -m cudnn_graphs device-props`", "run it on the machine that has the GPU")) from error
