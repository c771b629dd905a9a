"""The caller's current stream and device, read in the cheapest way torch offers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch

from ..errors import CaptureError, problem
from .devices import DeviceFacts

_thread = threading.local()


def current_raw_stream(device: DeviceFacts) -> int:
    """The raw handle of the current stream: 0.2 us, against 7.6 for torch.cuda.current_stream()."""
    return torch._C._cuda_getCurrentRawStream(device.index)  # type: ignore[arg-type]


def is_capturing(device: DeviceFacts | None = None) -> bool:
    """Whether the current stream of `device`, or of the current device, records a CUDA graph. False where CUDA was never used."""
    if not torch.cuda.is_initialized():
        return False
    if torch.cuda.is_current_stream_capturing():
        return True
    if device is None or device.index is None or device.index == torch._C._cuda_getDevice():
        return False
    with torch.cuda.device(device.index):
        return torch.cuda.is_current_stream_capturing()


@functools.cache
def _primary_context(index: int) -> int:
    from cuda.bindings import driver as cuda
    torch.cuda.init()
    status, device = cuda.cuDeviceGet(index)
    if status == cuda.CUresult.CUDA_SUCCESS:
        status, context = cuda.cuDevicePrimaryCtxRetain(device)
    if status != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"device {index}: got {status}; need its primary context; see whether the GPU is in use exclusively or has failed")
    return context


def bind_context(index: int) -> None:
    """Make the device's primary context current on this thread, as the driver calls that load and launch kernels need.

    torch.cuda.set_device does so only from torch 2.9 on where the device is current already: before, a fresh thread kept no
    context at all. Legal under CUDA graph capture.
    """
    from cuda.bindings import driver as cuda
    (status,) = cuda.cuCtxSetCurrent(_primary_context(index))
    if status != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"device {index}: got {status}; need its primary context current; see whether the GPU has failed")


@contextlib.contextmanager
def _switched(index: int) -> Iterator[None]:
    recording = torch.cuda.current_device() if torch.cuda.is_current_stream_capturing() else None
    with torch.cuda.device(index):
        if recording is not None and not torch.cuda.is_current_stream_capturing():
            raise CaptureError(problem(
                "stream", f"a CUDA graph being captured on cuda:{recording}", f"a capture on cuda:{index}, where these launches go",
                f"torch's own capture stream is of the device of a process's first capture: torch.cuda.graph(graph, stream=torch.cuda.Stream({index}))"))
        bind_context(index)
        yield


_same = contextlib.nullcontext()


def on_device(device: DeviceFacts) -> contextlib.AbstractContextManager[None]:
    """Make `device` current inside the block and restore the caller's. Costs one call when it already is.

    Raises CaptureError where the device that is left records a CUDA graph and `device` does not: what is launched here would not be in it.

    A thread's first use makes the primary context current for the driver calls that launch kernels.
    """
    if device.index != torch._C._cuda_getDevice():
        return _switched(device.index)  # type: ignore[arg-type]
    if not getattr(_thread, "ready", False):
        bind_context(device.index)  # type: ignore[arg-type]
        _thread.ready = True
    return _same
