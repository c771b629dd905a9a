"""What the benchmark asks of a workload, and how a contender is checked against float64."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_graphs import PlanStore

Run = Callable[[], torch.Tensor]


class Unavailable(Exception):
    """A contender is not installed here, or does not serve this workload."""


def imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a peer that cannot be imported is a row that says so
        raise Unavailable(f"not installed: {type(error).__name__} {error}"[:160]) from error


@dataclass
class Workload(ABC):
    """One named workload. `make` puts its tensors on the GPU in `t`; `t.clear()` frees them."""

    name: str
    title: str                      # for the tables: its shape in a few words
    bound = "compute"               # what limits it: compute (TFLOPS) or memory (TB/s)
    limit = "matmul_tflops"         # the measured machine limit it is held against
    worst_row = 1e-2                # relative L2 of one (query, head) row that disqualifies an engine of ours
    peers_worst_row = 1e-2          # and a peer

    @abstractmethod
    def make(self) -> None: ...

    @abstractmethod
    def ours(self, store: PlanStore, engine: str) -> Run:
        """Our call on `engine`, planned. NotImplementedError where the engine does not serve it."""

    @abstractmethod
    def peers(self) -> dict[str, Callable[[], Run]]:
        """Peers by name; each raises `Unavailable` with the reason."""

    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations over selected pairs only."""

    @abstractmethod
    def moved_bytes(self) -> int:
        """Bytes of K and V that the rows select."""

    @abstractmethod
    def worst_error(self, out: torch.Tensor) -> tuple[float, float]:
        """Relative L2 against float64 of sampled rows: over all, and of the worst (query, head) row."""

    def extras(self) -> dict[str, Any]:
        """More to report beside the figures."""
        return {}


def milliseconds(run: Callable[[], Any], count: int) -> float:
    """Of one call, as the GPU sees `count` of them in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def sampled_error(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """Of (got, want) pairs [..., D]: relative L2 over all rows and in the worst; infinite where an empty row is not zero."""
    error = torch.cat([(got.double() - want).square().sum(-1).flatten() for got, want in pairs])
    norm = torch.cat([want.square().sum(-1).flatten() for _, want in pairs])
    seen = norm > 0
    if not bool((error[~seen] == 0).all()):
        return float("inf"), float("inf")
    return float((error.sum() / norm.sum()).sqrt()), float((error[seen] / norm[seen]).sqrt().max())
