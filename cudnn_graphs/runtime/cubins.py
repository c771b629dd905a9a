"""Compiled kernels, kept by the content of their source: in memory, and in a directory where one is given.

Neither grows without bound: an operation has some hundred instantiations of about 50 kB, but releases and tuning add to a directory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CaptureError, problem
from .files import header_path, read_checked, write_atomic
from .nvrtc import Cubin, KernelSource, Resources, compile_cubin, nvrtc_version, source_digest

if TYPE_CHECKING:       # they import torch, which a process that only compiles can do without
    from .devices import DeviceFacts
    from .launch import LoadedKernel

log = logging.getLogger("cudnn_graphs")


class CubinCache:
    """`get` returns the cubin of a source for an architecture, compiling it at most once per process and directory."""

    max_entries = 1024          # in memory and in the directory each

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self.writable = True        # False once a write failed: its warning is given once
        self.compiles = 0           # by this process: none where all came from the directory
        self._memory: dict[str, Cubin] = {}
        self._lock = threading.Lock()
        self._building: dict[str, threading.Lock] = {}
        self._loaded: dict[tuple[KernelSource, int | None], LoadedKernel] = {}

    def get(self, source: KernelSource, arch: str) -> Cubin:
        major, minor = nvrtc_version()
        key = f"{source.entry}-{arch}-nvrtc{major}.{minor}-{source_digest(source)[:32]}-{source.threads}-{source.smem_bytes}"
        with self._lock:
            if key in self._memory:
                return self._memory[key]
            building = self._building.setdefault(key, threading.Lock())
        with building:
            with self._lock:
                if key in self._memory:
                    return self._memory[key]
            cubin = self._read(key) or self._compile(key, source, arch)
            with self._lock:
                if len(self._memory) >= self.max_entries:
                    self._memory, self._building = {}, {}
                self._memory[key] = cubin
            return cubin

    def loaded(self, source: KernelSource, device: DeviceFacts) -> LoadedKernel:
        """`source` ready to launch on `device`, for a kernel that belongs to no plan. CaptureError for its first use under CUDA graph capture."""
        slot = (source, device.index)
        kernel = self._loaded.get(slot)
        if kernel is None:
            from .launch import LoadedKernel
            from .streams import is_capturing
            if is_capturing(device):
                raise CaptureError(problem(source.entry, "a first call under CUDA graph capture", "a loaded kernel", "run once before the capture"))
            kernel = self._loaded[slot] = LoadedKernel(self.get(source, device.arch), source.entry, device.torch_device.index)
        return kernel

    def _compile(self, key: str, source: KernelSource, arch: str) -> Cubin:
        start = time.perf_counter()
        cubin = compile_cubin(source, arch)
        self.compiles += 1
        path = self.directory / f"{key}.cubin" if self.directory is not None and self.writable else None
        log.info("compiled %s for %s in %.2f s; cached in %s", source.entry, arch, time.perf_counter() - start, path or "memory only")
        if path is not None:
            header = {"key": key, "entry": source.entry, "arch": arch, "resources": cubin.resources.to_json(), "log": cubin.log}
            self.writable = write_atomic(path, cubin.image, header)
            self._shrink()
        return cubin

    def _shrink(self) -> None:
        """Delete the oldest files beyond the bound, the header first, so that no reader finds half of one. A process that ended between
        the two leaves an image without a header, which ages like any other."""
        assert self.directory is not None
        with contextlib.suppress(OSError):      # other processes share it, and delete too
            images = sorted(self.directory.glob("*.cubin"), key=lambda path: path.stat().st_mtime)
            for image in images[:max(len(images) - self.max_entries, 0)]:
                for path in (header_path(image), image):
                    path.unlink(missing_ok=True)

    def _read(self, key: str) -> Cubin | None:
        if self.directory is None:
            return None
        found = read_checked(self.directory / f"{key}.cubin")
        if found is None:
            return None
        image, header = found
        try:
            if header["key"] != key:
                raise ValueError(f"it is {header['key']}")
            return Cubin(image, Resources(**header["resources"]), header["log"])
        except (KeyError, TypeError, ValueError) as error:     # another kernel's, or another release's header
            log.warning("cubin %s in %s is ignored and will be compiled anew: %r", key, self.directory, error)
            return None
