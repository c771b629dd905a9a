"""A KV cache split over the ranks of a process group: each holds every other block, all get the whole attention.

    torchrun --nproc-per-node 2 scripts/demo_sharded.py

NCCL with a GPU for each rank, gloo on the CPU otherwise. Rank 0 prints each step's error against exact attention over the same keys.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from rich.console import Console

from cudnn_graphs import PagedBlockSparseSignature, PlanStore
from cudnn_graphs.ops.sharded import ShardedPagedAttention
from cudnn_graphs.planning.tables import table_of

PROMPTS = [3000, 1777]                  # tokens of two requests
STEPS, KEEP = 6, 24                     # decode steps, and the KV blocks that each attends to
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK = 16, 2, 128, 16, 64

SIGNATURE = PagedBlockSparseSignature(batch_size=len(PROMPTS), seq_len_q=1, max_seq_len_kv=4096, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
                                      q_block_size=1, kv_block_size=BLOCK, page_size=PAGE_SIZE, mask_type="causal", max_blocks_per_row=KEEP,
                                      page_table="block_tables", return_lse=True)


class Shard:
    """This rank's pages of all requests: block j of a request lies on rank j % world, and elsewhere its pages are -1."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world = rank, world
        per_request = SIGNATURE.max_seq_len_kv // PAGE_SIZE
        pages = len(PROMPTS) * (per_request // world + BLOCK // PAGE_SIZE)
        self.k = torch.full((pages, KV_HEADS, PAGE_SIZE, HEAD_DIM), float("nan"), dtype=torch.bfloat16, device=device)
        self.v = self.k.clone()
        self.block_tables = torch.full((len(PROMPTS), per_request), -1, dtype=torch.int32, device=device)
        self.used = 0

    def append(self, request: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [n, KV_HEADS, HEAD_DIM] from token `first` on; what other ranks hold is let go."""
        token = torch.arange(first, first + len(k), device=k.device)
        token = token[token // BLOCK % self.world == self.rank]
        fresh = token[token % PAGE_SIZE == 0] // PAGE_SIZE
        self.block_tables[request, fresh] = torch.arange(self.used, self.used + len(fresh), dtype=torch.int32, device=k.device)
        self.used += len(fresh)
        page, slot = self.block_tables[request, token // PAGE_SIZE].long(), token % PAGE_SIZE
        self.k[page, :, slot], self.v[page, :, slot] = k[token - first], v[token - first]


def main() -> None:
    device = join()
    rank, world = dist.get_rank(), dist.get_world_size()
    attention = ShardedPagedAttention(SIGNATURE, device=device, store=PlanStore())
    stream = torch.Generator().manual_seed(0)           # the same on every rank: the model's K, V and q
    k, v = (torch.randn(len(PROMPTS), SIGNATURE.max_seq_len_kv, KV_HEADS, HEAD_DIM, generator=stream).bfloat16().to(device) for _ in range(2))
    shard = Shard(rank, world, device)
    for request, length in enumerate(PROMPTS):
        shard.append(request, 0, k[request, :length], v[request, :length])

    table = table_of("step", "tokens", "ms", "error", "lse error", right=("tokens", "ms", "error", "lse error"))
    for step in range(STEPS):
        lengths = [length + step + 1 for length in PROMPTS]
        for request, length in enumerate(lengths):
            shard.append(request, length - 1, k[request, length - 1:length], v[request, length - 1:length])
        q = torch.randn(len(PROMPTS), 1, HEADS, HEAD_DIM, generator=stream).bfloat16().to(device)
        blocks = [sorted({*torch.randperm(length // BLOCK, generator=stream)[:KEEP - 1].tolist(), (length - 1) // BLOCK}) for length in lengths]
        out, lse, milliseconds = attend(attention, shard, q, lengths, blocks)
        errors = [exact(q[b, 0], k[b], v[b], blocks[b], lengths[b], out[b, 0], lse[b, :, 0]) for b in range(len(PROMPTS))]
        table.add_row(str(step + 1), str(sum(lengths)), f"{milliseconds:.2f}", f"{max(e for e, _ in errors):.1e}", f"{max(e for _, e in errors):.1e}")

    attention.check_shards(None, None, torch.tensor(lengths, dtype=torch.int32, device=device), block_tables=shard.block_tables)
    held = [None] * world
    dist.all_gather_object(held, f"rank {rank} on {attention.device.name} holds {shard.used} pages")
    if rank == 0:
        console = Console(highlight=False)
        console.print(f"{dist.get_backend()}, engine {attention.plan.engine}, {attention.exchange}; " + ", ".join(map(str, held)) + ".")
        console.print(table)
    dist.destroy_process_group()


def join() -> torch.device:
    """The process group that torchrun describes, and this rank's device."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit("demo_sharded: got no process group; need torchrun's; torchrun --nproc-per-node 2 scripts/demo_sharded.py")
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def attend(attention: ShardedPagedAttention, shard: Shard, q: torch.Tensor, lengths: list[int],
           blocks: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The attention itself: out, lse, milliseconds. Both KV heads of a request attend to the same blocks here."""
    device = q.device
    indices = torch.tensor([block for row in blocks for _ in range(KV_HEADS) for block in row], dtype=torch.int32, device=device)
    counts = torch.tensor([len(row) for row in blocks], device=device).repeat_interleave(KV_HEADS).view(len(blocks), KV_HEADS)
    ends = counts.flatten().cumsum(0).view_as(counts)
    indptr = torch.stack([ends - counts, ends], -1).int()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    synchronize(device)
    start = time.perf_counter()
    out, lse = attention.run(q, (shard.k, shard.v), None, None, seq_lens, indptr, indices, block_tables=shard.block_tables)
    synchronize(device)
    return out, lse, 1e3 * (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: list[int], length: int, out: torch.Tensor, lse: torch.Tensor) -> tuple[float, float]:
    """Relative L2 and absolute lse error against float64 over the listed blocks: q, out [HEADS, HEAD_DIM], k, v [tokens, KV_HEADS, HEAD_DIM]."""
    tokens = [t for block in blocks for t in range(block * BLOCK, min((block + 1) * BLOCK, length))]
    heads = HEADS // KV_HEADS
    k, v = (x[tokens].double().transpose(0, 1).repeat_interleave(heads, 0) for x in (k, v))
    score = torch.einsum("hd,htd->ht", q.double(), k) * HEAD_DIM ** -0.5
    want = torch.einsum("ht,htd->hd", score.softmax(-1), v)
    return float((out.double() - want).norm() / want.norm()), float((lse.double() - score.logsumexp(-1)).abs().max())


if __name__ == "__main__":
    main()
