"""Loaded kernels and their launch, through cupy's driver bindings.

cupy's RawKernel call costs 9 to 12 us of host time; the driver call below it, with the parameters
already packed as bytes, about 3.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import threading
from typing import Any

import torch

from .nvrtc import Cubin
from .streams import bind_context

_EARLY = 6                              # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_EARLY_CAPABILITY, _EARLY_DRIVER = (9, 0), 12030        # it exists from SM90 on; CUDA graphs record it from CUDA 12.3 on
_ATTRIBUTE = struct.Struct("<i4xi60x")                  # CUlaunchAttribute
_CONFIG = struct.Struct("<7I4xQQI4x")                   # CUlaunchConfig: grid, block, shared memory, stream, attributes, how many

_lock = threading.Lock()
_modules: dict[tuple[int, str], int] = {}       # (device, cubin digest) -> CUmodule, for the process's life


class _Arguments:
    """Where one thread puts launch parameters of some sizes: the driver copies them before the launch returns."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        buffers = [ctypes.create_string_buffer(size) for size in sizes]
        self.views = [memoryview(buffer).cast("B") for buffer in buffers]       # 0.1 us to fill, where ctypes.memmove takes 0.6
        self.pointers = (ctypes.c_void_p * len(sizes))(*map(ctypes.addressof, buffers))
        self.pointers_at = ctypes.addressof(self.pointers)
        self._attribute = ctypes.create_string_buffer(_ATTRIBUTE.pack(_EARLY, 1), _ATTRIBUTE.size)
        self.attribute_at = ctypes.addressof(self._attribute)
        self.config = ctypes.create_string_buffer(_CONFIG.size)
        self.config_at = ctypes.addressof(self.config)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.arguments: dict[tuple[int, ...], _Arguments] = {}


_thread = _Thread()


class LoadedKernel:
    """One kernel on one device. Immutable, so any thread may launch it."""

    def __init__(self, cubin: Cubin, entry: str, device: int) -> None:
        from cuda.bindings import driver as cuda
        from cupy_backends.cuda.api import driver
        self._launch = driver.launchKernel
        self._smem = cubin.resources.smem_bytes
        self._threads = cubin.resources.threads
        self.entry, self.device, self.resources = entry, device, cubin.resources
        self._launch_early = _early_launch(device)
        with torch.cuda.device(device):
            bind_context(device)
            module = _load_module(driver, cubin.image, device)
            self.function = driver.moduleGetFunction(module, entry)
            if self._smem > 48 * 1024:
                attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                (status,) = cuda.cuFuncSetAttribute(cuda.CUfunction(self.function), attribute, self._smem)
                if status != cuda.CUresult.CUDA_SUCCESS:
                    raise RuntimeError(f"shared memory of {entry}: got {self._smem} bytes; need at most what the device allows; {status}")

    def launch(self, grid: tuple[int, int, int], params: tuple[bytes, ...], stream: int, *, early: bool = False) -> None:
        """Launch on a raw stream of this kernel's device, which must be current. Each of `params` is one packed argument.

        early: it may start before the launch before it on the stream has ended, where the device can; the kernel waits for that itself
        (kernels/common/launch_chain.cuh).
        """
        sizes = tuple(map(len, params))
        arguments = _thread.arguments.get(sizes)
        if arguments is None:
            arguments = _thread.arguments[sizes] = _Arguments(sizes)
        for view, packed in zip(arguments.views, params):
            view[:] = packed
        if not early or self._launch_early is None:
            self._launch(self.function, *grid, self._threads, 1, 1, self._smem, stream, arguments.pointers_at, 0)
            return
        _CONFIG.pack_into(arguments.config, 0, *grid, self._threads, 1, 1, self._smem, stream, arguments.attribute_at, 1)
        if status := self._launch_early(arguments.config_at, self.function, arguments.pointers_at, None):
            raise RuntimeError(f"launch of {self.entry}: got CUDA error {status}; need 0; see whether an earlier launch failed")


@functools.cache
def _early_launch(device: int) -> Any:
    """The driver's cuLaunchKernelEx, or None where launches of one stream cannot overlap."""
    from cuda.bindings import driver as cuda
    status, version = cuda.cuDriverGetVersion()
    if status != cuda.CUresult.CUDA_SUCCESS or version < _EARLY_DRIVER or torch.cuda.get_device_capability(device) < _EARLY_CAPABILITY:
        return None
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx        # cuda.bindings takes the config as objects of its own
    function.argtypes = (ctypes.c_void_p,) * 4
    return function


def zero_memory(address: int, nbytes: int, stream: int) -> None:
    """Fill device memory with zeros, in the order of the stream, whose device must be current."""
    from cupy_backends.cuda.api import runtime
    runtime.memsetAsync(address, 0, nbytes, stream)


def _load_module(driver, image: bytes, device: int) -> int:
    key = (device, hashlib.sha256(image).hexdigest())
    with _lock:
        if key not in _modules:
            _modules[key] = driver.moduleLoadData(image)
        return _modules[key]
