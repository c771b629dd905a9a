"""How a contender of the benchmark is run and timed: alike for all of them, in one process."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bench_workload import milliseconds

PAUSE_SECONDS = 0.04        # before each burst: what ran before must not decide at what clock the next one runs
BURST_MS = 10.0
ROUNDS = 7


@dataclass
class Contender:
    """One call to be timed: as a CUDA graph replay where it can be captured, so that host time and allocation stay out of the figure."""

    run: Callable[[], Any]              # kept: the graph reads tensors that only this holds
    replay: Callable[[], Any]
    out: torch.Tensor                   # what a replay writes
    captured: bool

    @classmethod
    def of(cls, run: Callable[[], Any]) -> Contender:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                out = run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                out = run()
        except Exception:  # noqa: BLE001 - a peer that cannot be captured is timed eagerly
            torch.cuda.synchronize()
            return cls(run, run, out, captured=False)
        return cls(run, graph.replay, out, captured=True)


def in_turns(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of each. They take turns in a new order each round, each burst after a pause and a warm-up, so that none inherits the
    heat and the clock of a fixed neighbour."""
    counts = {name: max(1, int(BURST_MS / max(milliseconds(run, 2), 1e-3))) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, draw = list(runs), random.Random(0)
    for _ in range(ROUNDS):
        draw.shuffle(order)
        for name in order:
            time.sleep(PAUSE_SECONDS)
            milliseconds(runs[name], max(1, counts[name] // 5))
            times[name].append(milliseconds(runs[name], counts[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def one_by_one(run: Callable[[], Any], ms: float) -> float:
    """Median milliseconds of eager calls, each between events of its own: for calls shorter than their host work this is the host's time."""
    count = min(30, max(3, int(100 / ms)))
    for _ in range(3):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def machine_limits() -> dict[str, float]:
    """Measured here and now: bf16 and FP8 matmul TFLOPS, and device reads and copies in TB/s."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    data = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    half = data[:1 << 29]
    other = torch.empty_like(half)
    a8, b8 = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    runs = {"matmul": lambda: a @ b, "fp8": lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
            "copy": lambda: torch.mul(half, 1, out=other), "read": lambda: data.sum()}
    ms = in_turns({name: Contender.of(run).replay for name, run in runs.items()})
    return {"matmul_tflops": 2 * 8192**3 / ms["matmul"] / 1e9, "fp8_tflops": 2 * 8192**3 / ms["fp8"] / 1e9,
            "copy_tb_s": 2 * half.nbytes / ms["copy"] / 1e9, "read_tb_s": data.nbytes / ms["read"] / 1e9}
