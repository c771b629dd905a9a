"""The caller's current stream and device, read in the cheapest way torch offers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from .devices import DeviceFacts

_thread = threading.local()


def current_raw_stream(device: DeviceFacts) -> int:
    """The raw handle of the current stream: 0.2 us, against 7.6 for torch.cuda.current_stream()."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def is_capturing(device: DeviceFacts | None = None) -> bool:
    """Whether the current stream of the current device records a CUDA graph. False where CUDA was never used."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def _switched(index: int) -> Iterator[None]:
    with torch.cuda.device(index):
        torch.cuda.set_device(index)
        yield


_same = contextlib.nullcontext()


def on_device(device: DeviceFacts) -> contextlib.AbstractContextManager[None]:
    """Make `device` current inside the block and restore the caller's. Costs one call when it already is.

    A thread's first use makes the primary context current for the driver calls that launch kernels.
    """
    if device.index != torch._C._cuda_getDevice():
        return _switched(device.index)
    if not getattr(_thread, "ready", False):
        torch.cuda.set_device(device.index)
        _thread.ready = True
    return _same
