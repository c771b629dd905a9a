"""Soak: mixed shapes of the three operations served from a store that is too small for them, and neither host nor device memory may grow.

    python scripts/soak.py [--minutes 10] [--device cuda|cpu] [--max-entries 12] [--graph-every 50] [--engines cudnn,...] [--shared] [--json FILE]

One thread serves, calls back to back: hot signatures often, cold ones seldom, each with a few fillings of its capacities. Another
builds cold ones beside it, as a server would for a model that is about to be used; both push out what was used least recently. Every
result must have the bits of that call's first one by the same plan, and be as near to it as two roundings by another: a plan of
larger capacities may stand in for one that is gone. On a GPU every fiftieth call is captured, replayed and dropped.

Every call has run once before the clock starts. From there on the median of the last third may lie above that of the first one by
1 % and 8 MB: host memory (resident), and of the device what torch allocated, what it reserved, and what the whole device holds, so
run it alone there, or say --shared. Where something grows, --graph-every 0 and --engines say what does.

Exit status: 0; 1 for growth, other bits, no evictions, or a store beyond its bounds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from synthetic_calls import Call, synthetic_call

from cudnn_graphs import PagedBlockSparseSignature, PlanStore, QuerySparseSignature, SageBlockSparseSignature
from cudnn_graphs.planning import Signature

CONSOLE = Console(highlight=False, soft_wrap=True)
MEMORY = ("host_mb", "allocated_mb", "reserved_mb")
WHOLE_DEVICE = "device_mb"  # by all processes
SAMPLES = 60
FILLINGS = {"cuda": (1.0, 0.6, 0.3), "cpu": (0.3, 0.1, 0.03)}       # shares of the capacities that calls use
HOT_SHARE = 0.9             # of the calls, to the first third of the buckets


@dataclass
class Bucket:
    """One signature on one engine, its calls, and the first result of each by each plan that served it: splits follow capacities."""

    signature: Signature
    engine: str | None
    calls: list[Call]
    wanted: dict[int, dict[Signature, tuple[torch.Tensor, ...]]] = field(default_factory=lambda: defaultdict(dict))


def signatures(device: str) -> list[tuple[Signature, str | None]]:
    """Hot ones first. Small, so that many calls fit into the time; on a GPU with engines named, so that each of them serves."""
    paged = [PagedBlockSparseSignature(batch, seq_len_q, max_seq_len_kv, 16, 2, 128, seq_len_q, 64, page, max_blocks_per_row=8, mask_type=mask)
             for page in (16, 64) for batch, seq_len_q, max_seq_len_kv, mask in
             ((4, 1, 2048, "dense"), (16, 1, 4096, "dense"), (2, 16, 2048, "causal"), (8, 16, 1024, "dense"))]
    sage = [SageBlockSparseSignature(1, heads, tokens, tokens, 8, has_counts=counts) for heads, tokens, counts in
            ((2, 640, False), (2, 640, True), (4, 300, False), (1, 1000, True))]
    qsa = [QuerySparseSignature(heads, heads // 12, source, tokens) for heads, source, tokens in
           ((12, "bitmap", 512), (24, "bitmap", 1024), (12, "indices", 512), (24, "indices", 2048))]
    mixed = [s for group in zip(paged[::2], paged[1::2], sage, qsa) for s in group]
    if device == "cpu":
        return [(s, None) for s in mixed]
    named = [(s, "cudnn") for s in paged if s.mask_type == "dense"][:4] + [(s, "portable") for s in (*sage[:2], *qsa[:2])]
    return [pair for group in zip(mixed, (*named, *[None] * len(mixed))) for pair in ((group[0], None), group[1]) if pair is not None]


class Soak:
    """One store, the calls that it serves, and what was seen of both."""

    def __init__(self, device: str, directory: Path, max_entries: int, graph_every: int = 50, engines: Collection[str] | None = None) -> None:
        self.device, self.draw, self.graph_every = device, random.Random(0), graph_every if device == "cuda" else 0
        self.store = PlanStore(directory / "plans", max_entries=max_entries)
        self.buckets = [Bucket(signature, engine, [synthetic_call(signature, device, seed=i, fill=fill) for i, fill in enumerate(FILLINGS[device])])
                        for signature, engine in signatures(device) if engines is None or engine in engines]
        self.building, self.over = threading.Lock(), threading.Event()
        self.calls = self.replays = 0
        self.faults: list[str] = []
        self.samples: list[dict[str, Any]] = []

    def run(self, seconds: float) -> None:
        for bucket in self.buckets:
            for which in range(len(bucket.calls)):
                self._call(bucket, which)
        builder = threading.Thread(target=self._build_cold_ones)
        builder.start()
        try:
            self._serve(seconds)
        finally:
            self.over.set()
            builder.join()

    def _serve(self, seconds: float) -> None:
        begin = time.perf_counter()
        while (at := time.perf_counter() - begin) < seconds and not self.faults:
            if at >= len(self.samples) * seconds / SAMPLES:
                self._sample(at)
            hot = len(self.buckets) // 3
            bucket = self.draw.choice(self.buckets[:hot] if self.draw.random() < HOT_SHARE else self.buckets[hot:])
            self._call(bucket, self.draw.randrange(len(bucket.calls)))
        self._sample(time.perf_counter() - begin)

    def _call(self, bucket: Bucket, which: int) -> None:
        plan = self.store.get(bucket.signature, self.device, bucket.engine)
        args, keywords = bucket.calls[which]
        self.calls += 1
        run = partial(plan.run, *args, **keywords)
        result = self._replayed(run) if self.graph_every and self.calls % self.graph_every == 0 else _tuple(run())
        by_plan = bucket.wanted[which]
        known = plan.built_for in by_plan
        wanted = by_plan.setdefault(plan.built_for, result)
        first = next(iter(by_plan.values()))
        if known and not all(map(torch.equal, wanted, result)) or not known and not all(map(_near, first, result)):
            self.faults.append(f"other {'bits' if known else 'results'}: {bucket.signature.label} on {plan.engine}, built for {plan.built_for.label}, "
                               f"filling {which}, call {self.calls}")

    def _replayed(self, run: Callable[[], Any]) -> tuple[torch.Tensor, ...]:
        """The results of a graph that is dropped at once. No build meanwhile: it may allocate, which a capture does not allow."""
        graph = torch.cuda.CUDAGraph()
        with self.building:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                result = _tuple(run())
        graph.replay()
        self.replays += 1
        kept = tuple(part.clone() for part in result)
        torch.cuda.synchronize()        # before the graph and its memory go
        return kept

    def _build_cold_ones(self) -> None:
        draw = random.Random(1)
        while not self.over.wait(0.1):
            bucket = draw.choice(self.buckets[len(self.buckets) // 3:])
            try:
                with self.building:
                    self.store.get(bucket.signature, self.device, bucket.engine)
            except Exception as error:  # noqa: BLE001 - the serving thread ends the soak and says so
                self.faults.append(f"building {bucket.signature.label}: {type(error).__name__}: {error}")

    def _sample(self, at: float) -> None:
        with self.building:                 # an entry is written before another is deleted for it
            stats, held = self.store.stats(), len(self.store._built)
            files = len(list(self.store.root.glob("*.plan.json")))  # type: ignore[union-attr]
        row = {"seconds": at, "calls": self.calls, "host_mb": resident_mb(), "in_memory": held, "on_disk": files, "builds": stats.builds, "loads": stats.loads,
               "fits": stats.fits, "evictions": stats.evictions}
        if self.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            row |= {"allocated_mb": torch.cuda.memory_allocated() / 1e6, "reserved_mb": torch.cuda.memory_reserved() / 1e6, "device_mb": (total - free) / 1e6}
        self.samples.append(row)
        if max(held, files) > self.store.max_entries:
            self.faults.append(f"bounds: {held} plans in memory and {files} on disk, at most {self.store.max_entries} are allowed")

    def verdict(self, shared: bool = False) -> list[str]:
        """What was wrong. shared: what the whole device holds is not only ours."""
        third = len(self.samples) // 3
        wrong = list(self.faults)
        for name in (*MEMORY, *([] if shared else [WHOLE_DEVICE])) if third else ():
            if name in self.samples[0]:
                first, last = (statistics.median(row[name] for row in rows) for rows in (self.samples[:third], self.samples[-third:]))
                if last > 1.01 * first + 8:
                    wrong.append(f"{name} grew from {first:.1f} to {last:.1f}")
        if not self.samples[-1]["evictions"]:
            wrong.append("nothing was evicted: give fewer --max-entries, or more time")
        return wrong


def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Relative L2 of 1 % over what is finite, which is the same in both, as is the rest: an lse of a row that sees nothing. No NaN."""
    finite = a.isfinite()
    if a.isnan().any() or not torch.equal(finite, b.isfinite()) or not torch.equal(a[~finite], b[~finite]):
        return False
    a, b = a[finite].float(), b[finite].float()
    return bool((a - b).norm() <= 1e-2 * a.norm())


def _tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def resident_mb() -> float:
    """Once garbage is collected and malloc has given back what it only holds."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def show(soak: Soak) -> None:
    names = ["seconds", "calls", *(name for name in (*MEMORY, WHOLE_DEVICE) if name in soak.samples[0]), "in_memory", "on_disk", "builds", "loads", "evictions"]
    CONSOLE.print("  ".join(f"{name:>12}" for name in names))
    for row in soak.samples[::5]:
        CONSOLE.print("  ".join(f"{row[name]:12.1f}" if isinstance(row[name], float) else f"{row[name]:12d}" for name in names))


def _minutes(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}; need a time over 0")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=_minutes, default=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-entries", type=int, default=12, help="of the store; there are 16 signatures on a CPU, 24 on a GPU")
    parser.add_argument("--graph-every", type=int, default=50, metavar="N", help="calls between two that are captured; 0: none is")
    parser.add_argument("--engines", type=lambda names: names.split(","), help="only the signatures that name one of them; default: all signatures")
    parser.add_argument("--shared", action="store_true", help="others use the device too: what all of it holds may grow")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device, named = options.device, {engine for _, engine in signatures(options.device)} - {None}
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("device: got cuda; need a CUDA device that torch can use here; pass --device cpu")
    if options.max_entries < 1:
        parser.error(f"max-entries: got {options.max_entries}; need at least 1; a store keeps what it serves")
    if options.engines and not named.intersection(options.engines):
        parser.error(f"engines: got {','.join(options.engines)}; need one that a signature names on {device}: {', '.join(sorted(named)) or 'none does'}")
    if options.json:
        try:
            options.json.touch()        # not after ten minutes
        except OSError as error:
            parser.error(f"json: got {error}; need a file that can be written; name another")
    with tempfile.TemporaryDirectory() as directory:
        soak = Soak(options.device, Path(directory), options.max_entries, options.graph_every, options.engines)
        soak.run(60 * options.minutes)
    show(soak)
    wrong, last = soak.verdict(options.shared), soak.samples[-1]
    CONSOLE.print(f"{len(soak.buckets)} signatures, {soak.calls} calls, {soak.replays} graphs, {last['builds']} builds, {last['loads']} loads, "
                  f"{last['evictions']} evictions in {last['seconds']:.0f} s: {'; '.join(wrong) or 'no growth, the same bits throughout'}", markup=False)
    if options.json:
        said = {"device": options.device, "shared": options.shared, "samples": soak.samples, "replays": soak.replays, "wrong": wrong}
        options.json.write_text(json.dumps(said, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
