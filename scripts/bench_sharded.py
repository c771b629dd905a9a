"""P6's decode with its cache split over the GPUs of this host, against one GPU: the step, its stages, two micro-batches, and a cache that one cannot hold.

    torchrun --nproc-per-node 2 scripts/bench_sharded.py [speed] [large] [--json FILE]

Every time is the slower rank's median over CUDA graph replays; every answer is checked against float64 first. Blocks are dealt out round robin.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_paged import PAGED, PagedWorkload
from bench_workload import sampled_error

from cudnn_graphs import PagedBlockSparseSignature, PlanStore, merge_attention_states
from cudnn_graphs.ops import peer_parts
from cudnn_graphs.ops.sharded import ShardedPagedAttention

WORKLOADS = {w.name: w for w in (PAGED["P6"], dataclasses.replace(PAGED["P6"], name="P6 x 4", batch=128, t={}))}
WORST_ROW = 1e-2                # relative L2 of one (query, head) row against float64
STEPS = 50                      # of one graph
LARGE_SHARE = 0.85              # of each GPU's memory, as cache: 1.7 GPUs on two
LARGE_UNSEEN = 5                # slots of the last page past the end of each request

Call = Callable[[], Any]


class Rank:
    """This process, its GPU and its streams."""

    def __init__(self) -> None:
        if "RANK" not in os.environ or torch.cuda.device_count() < 2:
            sys.exit(f"bench_sharded: got {torch.cuda.device_count()} CUDA devices, RANK {os.environ.get('RANK')}; need two or more and torchrun; "
                     "torchrun --nproc-per-node 2 scripts/bench_sharded.py")
        self.index, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl", device_id=self.device)
        self.sides = [torch.cuda.Stream() for _ in range(2)]
        self.store = PlanStore(None)

    def slowest(self, value: float) -> float:
        word = torch.tensor([value], device=self.device)
        dist.all_reduce(word, op=dist.ReduceOp.MAX)
        return float(word)

    def microseconds(self, call: Call, steps: int = STEPS, rounds: int = 9) -> float:
        """Of one call, `steps` of which one graph holds: so many that the ranks' starting apart is lost in them."""
        graph = self.captured(lambda: [call() for _ in range(steps)])
        times = []
        for _ in range(rounds):
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / steps)
        return round(self.slowest(statistics.median(times)), 2)

    def captured(self, call: Call) -> torch.cuda.CUDAGraph:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):        # NCCL's watchdog may ask for events meanwhile
            call()
        return graph

    def side_by_side(self, calls: list[Call]) -> float:
        """Microseconds of a step in which both `calls` run once, each on a stream of its own. The second sets out when the first has run once,
        and neither waits again: in step with each other, both would exchange at the same time and nothing would overlap."""
        def chain() -> None:
            main, (first, second) = torch.cuda.current_stream(), self.sides
            first.wait_stream(main)
            for step in range(STEPS):
                for call, side in zip(calls, self.sides, strict=True):
                    with torch.cuda.stream(side):
                        call()
                    if step == 0 and side is first:
                        second.wait_stream(first)
            main.wait_stream(first)
            main.wait_stream(second)
        return round(self.microseconds(chain, steps=1) / STEPS, 2)

    def host_microseconds(self, call: Call, count: int = 50) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        spent = time.perf_counter() - start
        torch.cuda.synchronize()
        return round(self.slowest(1e6 * spent / count), 1)


@contextmanager
def largest_part(nbytes: int) -> Iterator[None]:
    """The parts of operations made inside: above this they are gathered."""
    usual, peer_parts.LARGEST_PART = peer_parts.LARGEST_PART, nbytes
    try:
        yield
    finally:
        peer_parts.LARGEST_PART = usual


class Split:
    """One workload with this rank's pages only, or those of some of its requests."""

    def __init__(self, rank: Rank, w: PagedWorkload, requests: slice = slice(None)) -> None:
        t, blocks = w.t, w.t["blocks"][requests]
        batch = len(blocks)
        signature = w.signature().replace(batch_size=batch, page_table="block_tables")
        pages = t["pages"].view(w.batch, -1)[requests]
        place = torch.arange(pages.shape[1], device=rank.device) + torch.arange(batch, device=rank.device)[:, None]
        mine = place % rank.world == rank.index
        table = torch.full_like(pages, -1)
        table[mine] = torch.arange(int(mine.sum()), dtype=torch.int32, device=rank.device)
        held = pages[mine].long()
        ends = torch.arange(0, blocks.numel() + 1, w.blocks_per_row, dtype=torch.int32, device=rank.device)
        self.op = ShardedPagedAttention(signature, device=rank.device, store=rank.store)
        self.out = torch.empty_like(t["q"][requests])
        self.given = (t["q"][requests], (t["k"][held], t["v"][held]), None, None, t["seq_lens"][requests],
                      torch.stack([ends[:-1], ends[1:]], -1).view(batch, w.num_kv_heads, 2), blocks.flatten())
        self.named = {"block_tables": table, "out": self.out}
        self.op.check_shards(None, None, self.given[4], block_tables=table)

    def run(self) -> torch.Tensor:
        return self.op.run(*self.given, **self.named)  # type: ignore[return-value]

    def stages(self, rank: Rank) -> dict[str, float]:
        """Microseconds of each stage by itself."""
        op, cubins = self.op, rank.store.cubins
        bound = op.signature.bind(op.plan.device, *self.given, **self.named)
        parts = op._parts_of(len(self.out))
        bound = dataclasses.replace(bound, out=parts.out, lse=parts.lse)
        stages = {"attention": lambda: op._attend(bound, None), "exchange_and_merge": lambda: parts.merge_into(self.out, None, cubins)}
        return {name: rank.microseconds(stage) for name, stage in stages.items()}


def speed(rank: Rank, w: PagedWorkload) -> dict[str, Any]:
    w.make(rank.device, seed=1)
    plan = rank.store.get(w.signature(), rank.device)
    positional, named = w.arguments()
    plan.run(*positional, **named)
    result: dict[str, Any] = {"workload": w.name, "engine": plan.engine, "one_gpu_us": rank.microseconds(lambda: plan.run(*positional, **named)),
                              "one_gpu_worst_row": w.worst_error(w.t["out"])[1], "one_gpu_micro_batches_us": one_gpu_in_two(rank, w)}
    for name, limit in (("peer_memory", peer_parts.LARGEST_PART), ("all_gather", 0)):
        with largest_part(limit):
            result[name] = split_speed(rank, w, result["one_gpu_us"])
    w.t.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return result


def one_gpu_in_two(rank: Rank, w: PagedWorkload) -> float:
    """The same on one GPU as two micro-batches on two streams."""
    half = w.batch // 2
    plan = rank.store.get(w.signature().replace(batch_size=half, page_table="block_tables"), rank.device)
    pages, blocks, calls = w.t["pages"].view(w.batch, -1), w.t["blocks"], []
    for at in range(0, w.batch, half):
        part = slice(at, at + half)
        ends = torch.arange(0, blocks[part].numel() + 1, w.blocks_per_row, dtype=torch.int32, device=rank.device)
        given = (w.t["q"][part], (w.t["k"], w.t["v"]), None, None, w.t["seq_lens"][part],
                 torch.stack([ends[:-1], ends[1:]], -1).view(half, w.num_kv_heads, 2), blocks[part].flatten())
        calls.append(lambda given=given, part=part: plan.run(*given, block_tables=pages[part], out=w.t["out"][part]))
    return rank.side_by_side(calls)


def split_speed(rank: Rank, w: PagedWorkload, one_gpu_us: float) -> dict[str, Any]:
    whole = Split(rank, w)
    out = whole.run()
    torch.cuda.synchronize()
    worst = rank.slowest(w.worst_error(out)[1])
    step, stages = rank.microseconds(whole.run), whole.stages(rank)
    halves = [Split(rank, w, part) for part in (slice(0, w.batch // 2), slice(w.batch // 2, w.batch))]
    for half in halves:
        half.run()
    torch.cuda.synchronize()
    torn = rank.slowest(w.worst_error(torch.cat([half.out for half in halves]))[1])
    pair = rank.side_by_side([half.run for half in halves])
    return {"exchange": whole.op.exchange, "step_us": step, "speedup": round(one_gpu_us / step, 3), "stages_us": stages,
            "communication_share": round(stages["exchange_and_merge"] / step, 3), "part_bytes": whole.op._parts_of(w.batch).layout.nbytes,
            "micro_batches_us": pair, "micro_batches_speedup": round(one_gpu_us / pair, 3), "host_us": rank.host_microseconds(whole.run),
            "worst_row": max(worst, torn)}


class Large:
    """A decode batch over a cache of LARGE_SHARE of every GPU: page j of a request lies on rank j % world."""

    batch, heads, kv_heads, page, dim, blocks = 32, 64, 8, 64, 128, 64

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        total = torch.cuda.get_device_properties(rank.device).total_memory
        self.gpu_bytes, self.held = total, int(LARGE_SHARE * total) // (4 * self.kv_heads * self.page * self.dim) // self.batch    # pages of a request
        self.pages = self.held * rank.world
        own = torch.Generator(rank.device).manual_seed(rank.index)
        self.k = torch.empty(self.batch * self.held, self.kv_heads, self.page, self.dim, dtype=torch.bfloat16, device=rank.device)
        self.v = torch.empty_like(self.k)
        for cache in (self.k, self.v):
            for part in cache.split(4096):
                part.normal_(generator=own)
        same = torch.Generator(rank.device).manual_seed(7)
        self.q = torch.randn(self.batch, 1, self.heads, self.dim, dtype=torch.bfloat16, device=rank.device, generator=same)
        self.table = torch.full((self.batch, self.pages), -1, dtype=torch.int32, device=rank.device)
        self.table[:, rank.index::rank.world] = torch.arange(self.batch * self.held, dtype=torch.int32, device=rank.device).view(self.batch, -1)
        chosen = torch.rand(self.batch * self.kv_heads, self.pages, device=rank.device, generator=same).topk(self.blocks, -1).indices
        chosen[::3, 0] = self.pages - 1                                 # some rows see the unfinished last page
        chosen[::3, 1:].clamp_(max=self.pages - 2)
        self.chosen = chosen.sort(-1).values.int().view(self.batch, self.kv_heads, self.blocks)
        self.seq_lens = torch.full((self.batch,), self.pages * self.page - LARGE_UNSEEN, dtype=torch.int32, device=rank.device)

    def measure(self) -> dict[str, Any]:
        signature = PagedBlockSparseSignature(
            self.batch, 1, self.pages * self.page, self.heads, self.kv_heads, self.dim, q_block_size=1, kv_block_size=self.page, page_size=self.page,
            max_blocks_per_row=self.blocks, page_table="block_tables", return_lse=True)
        op = ShardedPagedAttention(signature, device=self.rank.device, store=self.rank.store)
        op.check_shards(None, None, self.seq_lens, block_tables=self.table)
        ends = torch.arange(0, self.chosen.numel() + 1, self.blocks, dtype=torch.int32, device=self.rank.device)
        indptr = torch.stack([ends[:-1], ends[1:]], -1).view(self.batch, self.kv_heads, 2)
        given = self.q, (self.k, self.v), None, None, self.seq_lens, indptr, self.chosen.flatten()
        out, lse = op.run(*given, block_tables=self.table)
        torch.cuda.synchronize()
        worst, lse_error = self.errors(out, lse)
        step = self.rank.microseconds(lambda: op.run(*given, block_tables=self.table, out=out, lse=lse))
        held = self.rank.world * (self.k.nbytes + self.v.nbytes)
        return {"exchange": op.exchange, "cache_gib": round(held / 2**30, 1), "gpu_gib": round(self.gpu_bytes / 2**30, 1),
                "cache_of_gpus": round(held / self.gpu_bytes, 3), "tokens_per_request": int(self.seq_lens[0]), "step_us": step, "worst_row": worst,
                "lse_error": lse_error}

    def errors(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[float, float]:
        """Of every fifth request: the worst row's relative L2, and the largest error of an lse."""
        rows = [(b, h) for b in range(0, self.batch, 5) for h in range(self.kv_heads)]
        group = self.heads // self.kv_heads
        parts = [self.exact_part(b, h) for b, h in rows]
        everyone = []
        for mine in (torch.stack([o for o, _ in parts]), torch.stack([s for _, s in parts])):
            gathered = [torch.empty_like(mine) for _ in range(self.rank.world)]
            dist.all_gather(gathered, mine)
            everyone.append(gathered)
        want, want_lse = merge_attention_states(*everyone, heads_first=True)
        heads = [slice(h * group, (h + 1) * group) for _, h in rows]
        worst = sampled_error([(out[b, 0, part], want[i]) for i, ((b, _), part) in enumerate(zip(rows, heads))])[1]
        lse_error = max(float((lse[b, part, 0].double() - want_lse[i]).abs().max()) for i, ((b, _), part) in enumerate(zip(rows, heads)))
        return self.rank.slowest(worst), self.rank.slowest(lse_error)

    def exact_part(self, b: int, h: int) -> tuple[torch.Tensor, torch.Tensor]:
        """out [group, D] and lse [group], float64, over the listed pages that lie here."""
        group = self.heads // self.kv_heads
        ids = self.chosen[b, h].long()
        ids = ids[ids % self.rank.world == self.rank.index]
        token = (ids[:, None] * self.page + torch.arange(self.page, device=ids.device)).flatten()
        page = self.table[b, ids].long()
        k, v = (x[page, h].double().flatten(0, 1)[token < self.seq_lens[b]] for x in (self.k, self.v))
        score = self.q[b, 0, h * group:(h + 1) * group].double() @ k.T * self.dim ** -0.5
        return score.softmax(-1) @ v, score.logsumexp(-1)


def failures(result: dict[str, Any]) -> list[str]:
    """Where an answer was wrong."""
    rows = {f"{w['workload']} by {way}": w[way]["worst_row"] for w in result.get("workloads", []) for way in ("peer_memory", "all_gather")}
    rows |= {"large": result["large"]["worst_row"]} if "large" in result else {}
    return [f"{name}: worst row {worst:.1e}" for name, worst in rows.items() if not worst <= WORST_ROW]


def say(rank: Rank, result: dict[str, Any]) -> dict[str, Any]:
    if rank.index == 0:
        print(json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="speed, large; both when none is named")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := set(options.parts) - {"speed", "large"}:
        sys.exit(f"bench_sharded: got {sorted(unknown)}; need speed, large or neither; name none to run both")
    rank = Rank()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "ranks": rank.world, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    if "speed" in (options.parts or ["speed"]):
        result["workloads"] = [say(rank, speed(rank, w)) for w in WORKLOADS.values()]
    if "large" in (options.parts or ["large"]):
        result["large"] = say(rank, Large(rank).measure())
    if rank.index == 0 and options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    if rank.index == 0:
        sys.exit("\n".join(failures(result)) or None)


if __name__ == "__main__":
    main()
