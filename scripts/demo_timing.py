"""Milliseconds of one call, the device's work included."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def timed(device: torch.device, call: Callable[[], Result]) -> tuple[Result, float]:
    """What `call` returns, and its milliseconds."""
    _synchronize(device)
    start = time.perf_counter()
    result = call()
    _synchronize(device)
    return result, 1e3 * (time.perf_counter() - start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
