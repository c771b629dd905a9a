"""Loaded kernels and their launch, through cupy's driver bindings.

cupy's RawKernel call costs 9 to 12 us of host time; the driver call below it, with the parameters
already packed as bytes, about 3.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading

import torch

from .nvrtc import Cubin
from .streams import bind_context

_lock = threading.Lock()
_modules: dict[tuple[int, str], int] = {}       # (device, cubin digest) -> CUmodule, for the process's life


class _Arguments:
    """Where one thread puts launch parameters of some sizes: the driver copies them before the launch returns."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        buffers = [ctypes.create_string_buffer(size) for size in sizes]
        self.views = [memoryview(buffer).cast("B") for buffer in buffers]       # 0.1 us to fill, where ctypes.memmove takes 0.6
        self.pointers = (ctypes.c_void_p * len(sizes))(*map(ctypes.addressof, buffers))
        self.pointers_at = ctypes.addressof(self.pointers)


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
        with torch.cuda.device(device):
            bind_context(device)
            module = _load_module(driver, cubin.image, device)
            self.function = driver.moduleGetFunction(module, entry)
            if self._smem > 48 * 1024:
                attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                (status,) = cuda.cuFuncSetAttribute(cuda.CUfunction(self.function), attribute, self._smem)
                if status != cuda.CUresult.CUDA_SUCCESS:
                    raise RuntimeError(f"shared memory of {entry}: got {self._smem} bytes; need at most what the device allows; {status}")

    def launch(self, grid: tuple[int, int, int], params: tuple[bytes, ...], stream: int) -> None:
        """Launch on a raw stream of this kernel's device, which must be current. Each of `params` is one packed argument."""
        sizes = tuple(map(len, params))
        arguments = _thread.arguments.get(sizes)
        if arguments is None:
            arguments = _thread.arguments[sizes] = _Arguments(sizes)
        for view, packed in zip(arguments.views, params):
            view[:] = packed
        self._launch(self.function, *grid, self._threads, 1, 1, self._smem, stream, arguments.pointers_at, 0)


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
