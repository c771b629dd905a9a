"""The benchmark's result for the eye: a table on the console, tables and a picture for the README.

    python scripts/bench_report.py [--report tests/gpu_report.json] [--plot docs/benchmark.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
REPORT, PLOT = ROOT / "tests" / "gpu_report.json", ROOT / "docs" / "benchmark.png"
ENGINES = ("sm90", "portable", "cudnn")
UNITS = {"compute": ("tflops", "TFLOPS", ".0f"), "memory": ("tb_s", "TB/s", ".2f")}


def show(bench: dict[str, Any], limits: dict[str, float], console: Console) -> None:
    """One workload: every contender with its figures, or why it has none."""
    table = Table(title=f"{bench['workload']}: {bench['title']} ({bench['bound']}-bound)", title_justify="left")
    for column in ("contender", "ms", "eager ms", "TFLOPS", "TB/s", "to best peer", "eager", "of limit", "worst row"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    unit, _, _ = UNITS[bench["bound"]]
    for name, row in bench["contenders"].items():
        label = name + " (peer)" * row.get("peer", False) + " (no graph)" * (not row.get("captured", True))
        if "ms" not in row:
            table.add_row(label, *"-------", row.get("failed", row.get("declined", ""))[:60])
            continue
        worst = "-" if row.get("worst_row") is None else f"{row['worst_row']:.1e}"
        table.add_row(label, f"{row['ms']:.3f}", f"{row['eager_ms']:.3f}", f"{row['tflops']:.0f}", f"{row['tb_s']:.2f}",
                      ratio(row, "ratio_to_best_peer"), ratio(row, "eager_ratio"), f"{row[unit] / limits[bench['limit']]:.0%}", worst)
    console.print(table)
    for name in sorted(set(bench) - {"workload", "title", "bound", "limit", "contenders"}):
        console.print(f"{name}: {bench[name]}")


def ratio(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f}" if name in row else "none"


def markdown(result: dict[str, Any]) -> str:
    """One row a workload: our engines, the best peer of that run, and the fastest of ours against it."""
    lines = ["| workload | `sm90` | `portable` | `cudnn` | best peer, same process | ours / best peer | eager calls | limit |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for bench in result["workloads"]:
        unit, name, digits = UNITS[bench["bound"]]
        rows = bench["contenders"]
        ours = {e: rows[e] for e in ENGINES if "ms" in rows.get(e, {})}
        fastest = min(ours.values(), key=lambda row: row["ms"], default={})
        peers = {n: r for n, r in rows.items() if r.get("peer") and "ms" in r and not r["other_question"]}
        best = min(peers, key=lambda n: peers[n]["ms"], default=None)
        figures = [f"{ours[e][unit]:{digits}}" if e in ours else "-" for e in ENGINES]
        peer = f"{peers[best][unit]:{digits}} ({best})" if best else "none"
        eager = max((row["eager_ratio"] for row in ours.values() if "eager_ratio" in row), default=None)
        lines.append(f"| {bench['workload']} {bench['title']}, {name} | {' | '.join(figures)} | {peer} | {ratio(fastest, 'ratio_to_best_peer')} | "
                     f"{f'{eager:.2f}' if eager else 'none'} | {result['limits'][bench['limit']]:{digits}} |")
    return "\n".join([*lines, "", *_beside(result)])


def _beside(result: dict[str, Any]) -> list[str]:
    """What no column holds: the quantizer, and what another question costs on the same tensors."""
    lines = []
    for bench in result["workloads"]:
        if "quantize_ms" in bench:
            lines.append(f"- {bench['workload']}: `quantize_sage_qkv` {bench['quantize_ms']:.2f} ms.")
        fastest = min((row["ms"] for row in bench["contenders"].values() if "ms" in row and not row.get("peer")), default=None)
        for name, row in bench["contenders"].items():
            if row.get("other_question") and "ms" in row and fastest:
                lines.append(f"- {bench['workload']}: {name} {row['ms']:.3f} ms, ours {fastest:.3f} ms ({row['ms'] / fastest:.2f} times as fast).")
    return lines


def host_markdown(rows: list[dict[str, Any]]) -> str:
    """What bench_host.py measured: microseconds, a row for each operation and engine."""
    lines = ["| operation | engine | `run()` | of that, launches | added | added with `validate=False` | plan lookup |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {row['operation']} | `{row['engine']}` | {row['run_us']:.1f} | {row['launches_us']:.1f} | {row['adds_us']:.1f} | "
              f"{row['unvalidated_us'] - row['launches_us']:.1f} | {row['lookup_us']:.1f} |" for row in rows]
    return "\n".join(lines)


def sharded_markdown(result: dict[str, Any]) -> str:
    """What bench_sharded.py measured on two GPUs: a decode step of each workload, whole and as two micro-batches, and a cache that one GPU cannot hold."""
    lines = ["| decode step | one GPU | two, peer memory | | two, all-gather | | exchange and merge, of the step |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for w in result["workloads"]:
        ways = w["peer_memory"], w["all_gather"]
        shares = "; all-gather ".join(f"{way['stages_us']['exchange_and_merge']:.1f} us, {way['communication_share']:.0%}" for way in ways)
        for title, one, two, last in ((w["workload"], "one_gpu_us", "step_us", shares),
                                      ("the same as two micro-batches", "one_gpu_micro_batches_us", "micro_batches_us", "")):
            times = " | ".join(f"{way[two]:.1f} us | {w[one] / way[two]:.2f}x" for way in ways)
            lines.append(f"| {title} | {w[one]:.1f} us | {times} | {last} |")
    first, large = result["workloads"][0], result["large"]
    peer = first["peer_memory"]
    attention = sum(us for stage, us in peer["stages_us"].items() if stage != "exchange_and_merge")
    lines += ["", f"Of {first['workload']}'s {peer['step_us']:.1f} us, {attention:.1f} are the attention over half of the blocks, with taking the others "
                  "off the lists.",
              f"A cache of {large['cache_gib']} GiB, {large['cache_of_gpus']:.2f} times what one of them holds (requests of "
              f"{large['tokens_per_request'] / 1e6:.1f} million tokens), decodes in {large['step_us']:.1f} us a step."]
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """One panel a workload: ours in green, peers in grey, the machine's limit as a line."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    benches = [b for b in result["workloads"] if any("ms" in r for r in b["contenders"].values())]
    columns = min(5, len(benches))
    figure, axes = plt.subplots(-(-len(benches) // columns), columns, figsize=(3.2 * columns, 2.9 * -(-len(benches) // columns)), squeeze=False)
    for axis in axes.flat[len(benches):]:
        axis.axis("off")
    for axis, bench in zip(axes.flat, benches):
        unit, name, _ = UNITS[bench["bound"]]
        rows = sorted(((r[unit], n, r.get("peer", False)) for n, r in bench["contenders"].items() if "ms" in r))
        axis.barh([n for _, n, _ in rows], [v for v, _, _ in rows], color=["#9a9a9a" if peer else "#3a7d44" for _, _, peer in rows])
        axis.axvline(result["limits"][bench["limit"]], color="#b03030", linewidth=1)
        axis.set_title(f"{bench['workload']}, {name}", fontsize=9)
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=REPORT, help="a gpu_report.json, or what bench.py --json wrote")
    parser.add_argument("--plot", type=Path, help=f"write a picture, for the README {PLOT.relative_to(ROOT)}")
    options = parser.parse_args()
    report = json.loads(options.report.read_text())
    result = report.get("bench", report)
    for bench in result["workloads"]:
        show(bench, result["limits"], Console(width=130))
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
