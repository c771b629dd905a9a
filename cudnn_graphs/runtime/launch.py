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

_lock = threading.Lock()
_modules: dict[tuple[int, str], int] = {}       # (device, cubin digest) -> CUmodule, for the process's life


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
            torch.cuda.init()
            torch.cuda.set_device(device)       # makes the primary context current on this thread
            module = _load_module(driver, cubin.image, device)
            self.function = driver.moduleGetFunction(module, entry)
            if self._smem > 48 * 1024:
                attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                (status,) = cuda.cuFuncSetAttribute(cuda.CUfunction(self.function), attribute, self._smem)
                if status != cuda.CUresult.CUDA_SUCCESS:
                    raise RuntimeError(f"shared memory of {entry}: got {self._smem} bytes; need at most what the device allows; {status}")

    def launch(self, grid: tuple[int, int, int], params: tuple[bytes, ...], stream: int) -> None:
        """Launch on a raw stream of this kernel's device, which must be current. Each of `params` is one packed argument."""
        buffers = [ctypes.create_string_buffer(p, len(p)) for p in params]
        pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        self._launch(self.function, *grid, self._threads, 1, 1, self._smem, stream, ctypes.addressof(pointers), 0)


def _load_module(driver, image: bytes, device: int) -> int:
    key = (device, hashlib.sha256(image).hexdigest())
    with _lock:
        if key not in _modules:
            _modules[key] = driver.moduleLoadData(image)
        return _modules[key]
