"""Benchmark every engine against every installed peer, interleaved in one process, checked before it is timed.

    python scripts/bench.py [P1 P6 ...] [--engines portable,cudnn] [--no-peers] [--json FILE] [--plot FILE]
    python scripts/bench.py --host        host microseconds of run(), plan lookup and plan load

FLOPs and bytes are counted over selected (query, key) pairs only. Times are medians of CUDA-graph replays
between events; the machine's own limits are measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_host import host_costs, host_table
from bench_paged import PAGED
from bench_qsa import QSA
from bench_sage import SAGE
from bench_workload import Unavailable, Workload, milliseconds
from rich.console import Console
from rich.table import Table

from cudnn_graphs import PlanStore
from cudnn_graphs.planning import ENGINES

WORKLOADS: dict[str, Workload] = {**PAGED, **SAGE, **QSA}


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


def interleaved(runs: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
    """Median milliseconds of each, measured in turns so that all see the same machine."""
    counts = {name: max(1, int(10 / max(milliseconds(run, 2), 1e-3))) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    rounds = max(5, int(seconds * 1000 / (12 * max(1, len(runs)))))
    for _ in range(min(rounds, 25)):
        for name, run in runs.items():
            times[name].append(milliseconds(run, counts[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def machine_limits() -> dict[str, float]:
    """Measured here and now: bf16 matmul TFLOPS, and device reads and copies in TB/s."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    data = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    half = data[:1 << 29]
    other = torch.empty_like(half)
    a8, b8 = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    runs = {"matmul": lambda: a @ b, "fp8": lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
            "copy": lambda: torch.mul(half, 1, out=other), "read": lambda: data.sum()}
    ms = interleaved({name: Contender.of(run).replay for name, run in runs.items()}, 0.3)
    return {"matmul_tflops": 2 * 8192**3 / ms["matmul"] / 1e9, "fp8_tflops": 2 * 8192**3 / ms["fp8"] / 1e9,
            "copy_tb_s": 2 * half.nbytes / ms["copy"] / 1e9, "read_tb_s": data.nbytes / ms["read"] / 1e9}


def bench_workload(w: Workload, engines: list[str], peers: bool, seconds: float) -> dict[str, Any]:
    """All contenders of one workload: checked against float64, then timed in turns."""
    w.make()
    store, rows, runs = PlanStore(None), {}, {}
    for engine in engines:
        rows[engine] = _contender(w, lambda e=engine: w.ours(store, e), runs, engine)
    for name, peer in (w.peers() if peers else {}).items():
        rows[name] = _contender(w, peer, runs, name) | {"peer": True}
    for name, ms in interleaved({name: c.replay for name, c in runs.items()}, seconds).items():
        wrong = _after_timing(w, runs[name])
        rows[name] |= {"failed": wrong} if wrong else {"ms": ms, "tflops": w.flops() / ms / 1e9, "tb_s": w.moved_bytes() / ms / 1e9}
    best = min((r["ms"] for r in rows.values() if r.get("peer") and "ms" in r and not r["other_question"]), default=None)
    for row in rows.values():
        if "ms" in row and best is not None:
            row["ratio_to_best_peer"] = best / row["ms"]
    extras = w.extras()
    w.t.clear()
    torch.cuda.empty_cache()
    return {"workload": w.name, "bound": w.bound, "limit": w.limit, "contenders": rows, **extras}


def _contender(w: Workload, make: Callable[[], Any], runs: dict[str, Contender], name: str) -> dict[str, Any]:
    """Make, check and capture one contender. Its row says why it "declined", or how it "failed": a wrong answer, an exception."""
    try:
        run = make()
        w.t["out"].fill_(float("nan"))
        out = run()
        torch.cuda.synchronize()
        row = _errors(w, run, out)
        if wrong := _wrong(w, row):
            return {"failed": wrong}
        runs[name] = Contender.of(run)
        return row | {"captured": runs[name].captured}
    except (Unavailable, NotImplementedError) as reason:
        return {"declined": str(reason)[:160]}
    except Exception as error:  # noqa: BLE001 - one contender must not end the benchmark
        return {"failed": f"{type(error).__name__}: {error}"[:200]}


def _errors(w: Workload, run: Any, out: torch.Tensor) -> dict[str, Any]:
    """Against float64. A run marked `other_question` (dense attention, say) has no error here and is no peer to be measured by."""
    if getattr(run, "other_question", False):
        return {"relative_l2": None, "worst_row": None, "other_question": True}
    overall, worst = w.worst_error(run.like_q(out) if hasattr(run, "like_q") else out)
    return {"relative_l2": overall, "worst_row": worst, "other_question": False}


def _wrong(w: Workload, row: dict[str, Any]) -> str | None:
    if row["other_question"] or row["worst_row"] <= w.worst_row:
        return None
    return f"wrong: relative L2 {row['relative_l2']:.1e}, worst row {row['worst_row']:.1e}"


def _after_timing(w: Workload, contender: Contender) -> str | None:
    """What is wrong with one more replay, or None: a graph whose tensors were freed under it is fast, and garbage."""
    contender.replay()
    torch.cuda.synchronize()
    wrong = _wrong(w, _errors(w, contender.run, contender.out))
    return wrong and f"after timing {wrong}"


def failures(result: dict[str, Any]) -> list[str]:
    """Where an engine of ours was wrong or raised; a peer may."""
    return [f"{bench['workload']} on {name}: {row['failed']}" for bench in result["workloads"] for name, row in bench["contenders"].items()
            if "failed" in row and not row.get("peer")]


def show(result: dict[str, Any], console: Console) -> None:
    for bench in result["workloads"]:
        table = Table(title=f"{bench['workload']} ({bench['bound']}-bound)", title_justify="left")
        for column in ("contender", "ms", "TFLOPS", "TB/s", "to best peer", "of limit", "worst row"):
            table.add_column(column, justify="left" if column == "contender" else "right")
        unit, limit = "tflops" if bench["bound"] == "compute" else "tb_s", result["limits"][bench["limit"]]
        for name, row in bench["contenders"].items():
            label = name + " (peer)" * row.get("peer", False) + " (no graph)" * (not row.get("captured", True))
            if "ms" not in row:
                table.add_row(label, "-", "-", "-", "-", "-", row.get("failed", row.get("declined", ""))[:60])
                continue
            ratio = f"{row['ratio_to_best_peer']:.2f}" if "ratio_to_best_peer" in row else "none"
            worst = "-" if row.get("worst_row") is None else f"{row['worst_row']:.1e}"
            table.add_row(label, f"{row['ms']:.3f}", f"{row['tflops']:.0f}", f"{row['tb_s']:.2f}", ratio, f"{row[unit] / limit:.0%}", worst)
        console.print(table)
        for name in sorted(set(bench) - {"workload", "bound", "limit", "contenders"}):
            console.print(f"{name}: {bench[name]}")
    console.print("limits measured here: " + ", ".join(f"{k} {v:.2f}" for k, v in result["limits"].items()))
    if "host" in result:
        console.print(host_table(result["host"]))


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    benches = [b for b in result["workloads"] if any("ms" in r for r in b["contenders"].values())]
    figure, axes = plt.subplots(1, len(benches), figsize=(3 * len(benches), 3.6), squeeze=False)
    for axis, bench in zip(axes[0], benches):
        unit = "tflops" if bench["bound"] == "compute" else "tb_s"
        rows = [(n, r[unit], r.get("peer", False)) for n, r in bench["contenders"].items() if "ms" in r]
        axis.bar([n for n, _, _ in rows], [v for _, v, _ in rows], color=["#999999" if peer else "#3a7d44" for _, _, peer in rows])
        axis.set_title(f"{bench['workload']}, {'TFLOPS' if unit == 'tflops' else 'TB/s'}", fontsize=9)
        axis.tick_params(axis="x", rotation=60, labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None, kept: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """`kept` is called with the result after each workload, so that a run cut short leaves what it measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"any of {', '.join(WORKLOADS)}; all when none is named")
    parser.add_argument("--engines", default=",".join(e for e in ENGINES if e != "reference"))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--host", action="store_true", help="also measure host time")
    parser.add_argument("--seconds", type=float, default=0.4, help="of timing per workload")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("bench: got no CUDA device; need one; run it on a machine with a GPU")
    unknown = set(options.workloads) - set(WORKLOADS)
    if unknown:
        sys.exit(f"bench: got {sorted(unknown)}; need any of {', '.join(WORKLOADS)}")
    names = options.workloads or ([] if options.host else list(WORKLOADS))
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "limits": machine_limits(), "workloads": []}
    for name in names:
        result["workloads"].append(bench_workload(WORKLOADS[name], options.engines.split(","), not options.no_peers, options.seconds))
        show({**result, "workloads": result["workloads"][-1:]}, Console(width=110))
        if kept is not None:
            kept(result)
    if options.host:
        result["host"] = host_costs()
        show({**result, "workloads": []}, Console(width=110))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if options.plot:
        plot(result, options.plot)
    return result


if __name__ == "__main__":
    sys.exit("\n".join(failures(main())) or None)
