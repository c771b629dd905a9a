"""cuDNN graphs to plan blobs and back, and the handles they run on.

One handle per (thread, device), never destroyed: a handle destroyed during capture poisons later launches. Threads must
not share one at a time, so a thread's handles go to later threads when it ends.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..errors import problem
from .devices import DeviceFacts

log = logging.getLogger("cudnn_graphs")

_KERNEL_NAME = re.compile(rb"cudnn_generated_[A-Za-z0-9_]*?sm(\d+)_[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True)
class CudnnPlan:
    """One built execution plan as data."""

    blob: bytes
    kernels: tuple[str, ...]        # names of the kernels in the blob
    workspace_bytes: int


_left: defaultdict[int | None, deque[Any]] = defaultdict(deque)    # by device index: handles of threads that have ended


class _Handles:
    """One thread's, by device index."""

    def __init__(self) -> None:
        self.by_device: dict[int | None, Any] = {}

    def __del__(self) -> None:
        for index, handle in self.by_device.items():
            _left[index].append(handle)


_thread = threading.local()


def handle_for(device: DeviceFacts, stream: int) -> Any:
    """This thread's handle on `device`, which must be current, set to `stream`."""
    import cudnn
    try:
        known = _thread.handles.by_device
    except AttributeError:
        _thread.handles = _Handles()
        known = _thread.handles.by_device
    handle = known.get(device.index)
    if handle is None:
        try:
            handle = _left[device.index].popleft()
        except IndexError:
            handle = cudnn.create_handle()
        known[device.index] = handle
    cudnn.set_stream(handle=handle, stream=stream)
    return handle


def build_plan(describe: Callable[..., Any], device: DeviceFacts) -> CudnnPlan:
    """Build the graph that `describe(**where)` describes, on the device itself or, for an absent one, from its properties.

    Raises NotImplementedError, with cuDNN's own reason, where this cuDNN has no execution plan for it.
    """
    import cudnn
    _preload_nvrtc()
    if device.index is None:
        major, minor = device.capability
        graph = describe(device_property=cudnn.create_device_properties(device.properties), sm_version=10 * major + minor)
    else:
        with torch.cuda.device(device.index):
            graph = describe(handle=handle_for(device, 0))
            return _build(cudnn, graph, device)
    return _build(cudnn, graph, device)


def _build(cudnn: Any, graph: Any, device: DeviceFacts) -> CudnnPlan:
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
    except cudnn.cudnnGraphNotSupportedError as error:
        raise NotImplementedError(problem("engine 'cudnn'", f"a graph that cuDNN {cudnn.backend_version()} has no execution plan for on {device.name}",
                                          "one that it serves", f"use another engine; cuDNN says: {error}")) from error
    if graph.selected_engine is not None:
        raise RuntimeError(f"cuDNN graph: got the Python engine {graph.selected_engine}; need a plan of the cuDNN library; use another engine")
    blob = graph.serialize(as_bytes=True)
    matches = list(_KERNEL_NAME.finditer(blob))
    kernels = tuple(sorted({m.group(0).decode() for m in matches}))
    older = {int(m.group(1)) for m in matches if int(m.group(1)) // 10 < device.capability[0]}
    if older:
        log.warning("cuDNN picked a kernel made for sm_%s on compute capability %d.%d: %s; expect a fraction of the speed", max(older),
                    *device.capability, ", ".join(kernels))
    return CudnnPlan(blob, kernels, graph.get_workspace_size())


class LoadedPlan:
    """A graph ready to execute on one device, which is present. Immutable; any thread may execute it, each on its own handle."""

    def __init__(self, graph: Any, device: DeviceFacts) -> None:
        self._graph, self._device = graph, device

    def execute(self, buffers: dict[int, int], workspace: int, stream: int) -> None:
        """Launch on the device, which must be current. buffers: device pointers by tensor uid."""
        if torch.cuda.is_current_stream_capturing():
            _captured.add(self)
        self._graph.execute(buffers, workspace, handle=handle_for(self._device, stream))


_captured: set[LoadedPlan] = set()      # for the process's life: cuDNN may unload kernels with their graph
_alive: WeakValueDictionary[Hashable, LoadedPlan] = WeakValueDictionary()       # by device and identity: so that few are captured
_registering = threading.Lock()


def load_plan(blob: bytes, device: DeviceFacts, identity: Hashable) -> LoadedPlan:
    """The plan of a `CudnnPlan.blob` on `device`, which must be present. Raises what cuDNN does for a blob of another version or device,
    unless an equal plan is alive.

    identity: what any two plans have in common that may stand in for each other; one that is alive does. Not their bytes: cuDNN
    leaves addresses of its process in them, so that those of every build differ, and captured plans would pile up with the builds.
    """
    import cudnn
    key = (device.index, identity)
    if (known := _alive.get(key)) is not None:
        return known
    _preload_nvrtc()
    with torch.cuda.device(device.index):
        graph = cudnn.pygraph(handle=handle_for(device, 0))
        graph.deserialize(handle_for(device, 0), blob)
    with _registering:
        return _alive.setdefault(key, LoadedPlan(graph, device))


def _preload_nvrtc() -> None:
    """cuDNN loads NVRTC by path, and NVRTC then looks for its builtins by bare name: have them loaded already."""
    import importlib.util
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        for library in sorted(Path(root).glob("*/lib/libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
