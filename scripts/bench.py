"""Benchmark every engine against every installed peer, interleaved in one process, checked before it is timed.

    python scripts/bench.py [P1 P6 ...] [--engines portable,cudnn] [--no-peers] [--json FILE] [--plot FILE]
    python scripts/bench.py --host        host microseconds of run(), plan lookup and plan load

FLOPs and bytes are counted over selected (query, key) pairs only. "ms" is the median of CUDA-graph replays in
bursts of 10 ms, each after a pause, contenders in a new order each round; "eager ms" that of single calls between
events, host time included. The machine's own limits are measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from bench_host import host_costs, host_table
from bench_paged import PAGED
from bench_qsa import QSA
from bench_report import plot, show
from bench_sage import SAGE
from bench_timing import Contender, in_turns, machine_limits, one_by_one
from bench_workload import Unavailable, Workload
from rich.console import Console

from cudnn_graphs import PlanStore
from cudnn_graphs.planning import ENGINES

WORKLOADS: dict[str, Workload] = {**PAGED, **SAGE, **QSA}


def bench_workload(w: Workload, engines: list[str], peers: bool) -> dict[str, Any]:
    """All contenders of one workload: checked against float64, then timed in turns."""
    w.make()
    store, rows, runs = PlanStore(None), {}, {}
    for engine in engines:
        rows[engine] = _contender(w, lambda e=engine: w.ours(store, e), runs, engine)
    for name, peer in (w.peers() if peers else {}).items():
        rows[name] = _contender(w, peer, runs, name, peer=True)
    for name, ms in in_turns({name: c.replay for name, c in runs.items()}).items():
        wrong = _after_timing(w, runs[name], rows[name])
        rows[name] |= {"failed": wrong} if wrong else {"ms": ms, "eager_ms": one_by_one(runs[name].run, ms), "tflops": w.flops() / ms / 1e9,
                                                       "tb_s": w.moved_bytes() / ms / 1e9}
    _add_ratios(rows.values())
    extras = w.extras()
    w.t.clear()
    torch.cuda.empty_cache()
    return {"workload": w.name, "title": w.title, "bound": w.bound, "limit": w.limit, "contenders": rows, **extras}


def _add_ratios(rows: Iterable[dict[str, Any]]) -> None:
    """To the fastest peer of this run that answers the same question, in replays and in eager calls."""
    timed = [row for row in rows if "ms" in row]
    peers = [row for row in timed if row.get("peer") and not row["other_question"]]
    for time, ratio in (("ms", "ratio_to_best_peer"), ("eager_ms", "eager_ratio")):
        best = min((row[time] for row in peers), default=None)
        for row in timed if best is not None else ():
            row[ratio] = best / row[time]


def _contender(w: Workload, make: Callable[[], Any], runs: dict[str, Contender], name: str, peer: bool = False) -> dict[str, Any]:
    """Make, check and capture one contender. Its row says why it "declined", or how it "failed": a wrong answer, an exception."""
    try:
        run = make()
        w.t["out"].fill_(float("nan"))
        out = run()
        torch.cuda.synchronize()
        row = {"peer": peer, **_errors(w, run, out)}
        if wrong := _wrong(w, row):
            return {"peer": peer, "failed": wrong}
        runs[name] = Contender.of(run)
        return row | {"captured": runs[name].captured}
    except (Unavailable, NotImplementedError) as reason:
        return {"peer": peer, "declined": str(reason)[:160]}
    except Exception as error:  # noqa: BLE001 - one contender must not end the benchmark
        return {"peer": peer, "failed": f"{type(error).__name__}: {error}"[:200]}


def _errors(w: Workload, run: Any, out: torch.Tensor) -> dict[str, Any]:
    """Against float64. A run marked `other_question` (dense attention, say) has no error here and is no peer to be measured by."""
    if getattr(run, "other_question", False):
        return {"relative_l2": None, "worst_row": None, "other_question": True}
    overall, worst = w.worst_error(run.like_q(out) if hasattr(run, "like_q") else out)
    return {"relative_l2": overall, "worst_row": worst, "other_question": False}


def _wrong(w: Workload, row: dict[str, Any]) -> str | None:
    if row["other_question"] or row["worst_row"] <= (w.peers_worst_row if row["peer"] else w.worst_row):
        return None
    return f"wrong: relative L2 {row['relative_l2']:.1e}, worst row {row['worst_row']:.1e}"


def _after_timing(w: Workload, contender: Contender, row: dict[str, Any]) -> str | None:
    """What is wrong with one more replay, or None: a graph whose tensors were freed under it is fast, and garbage."""
    contender.replay()
    torch.cuda.synchronize()
    wrong = _wrong(w, {"peer": row["peer"], **_errors(w, contender.run, contender.out)})
    return wrong and f"after timing {wrong}"


def failures(result: dict[str, Any]) -> list[str]:
    """Where an engine of ours was wrong or raised; a peer may."""
    return [f"{bench['workload']} on {name}: {row['failed']}" for bench in result["workloads"] for name, row in bench["contenders"].items()
            if "failed" in row and not row.get("peer")]


def main(argv: list[str] | None = None, kept: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """`kept` is called with the result after each workload, so that a run cut short leaves what it measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"any of {', '.join(WORKLOADS)}; all when none is named")
    parser.add_argument("--engines", default=",".join(e for e in ENGINES if e != "reference"))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--host", action="store_true", help="also measure host time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("bench: got no CUDA device; need one; run it on a machine with a GPU")
    unknown = set(options.workloads) - set(WORKLOADS)
    if unknown:
        sys.exit(f"bench: got {sorted(unknown)}; need any of {', '.join(WORKLOADS)}")
    names = options.workloads or ([] if options.host else list(WORKLOADS))
    console = Console(width=130)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "limits": machine_limits(), "workloads": []}
    for name in names:
        result["workloads"].append(bench_workload(WORKLOADS[name], options.engines.split(","), not options.no_peers))
        show(result["workloads"][-1], result["limits"], console)
        if kept is not None:
            kept(result)
    console.print("limits measured here: " + ", ".join(f"{k} {v:.2f}" for k, v in result["limits"].items()))
    if options.host:
        result["host"] = host_costs()
        console.print(host_table(result["host"]))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if options.plot:
        plot(result, options.plot)
    return result


if __name__ == "__main__":
    sys.exit("\n".join(failures(main())) or None)
