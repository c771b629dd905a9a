"""A small serving loop: plans at startup, one request prefilled in chunks, then decode steps of a batch of four. Then the other two
operations: Sage attention over a video-like latent, with a picture of the blocks selected, and query-sparse attention over a packed batch.

Run by scripts/demo, or by any Python that has cudnn_graphs: python scripts/demo.py [--store DIR] [--picture FILE] [--plans-only]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from demo_activations import HEAD_DIM, HEADS, Activations, load_activations
from demo_cache import PagedCache
from demo_exact import causal_mask, error, exact_attention, listed_mask
from demo_qsa import SIGNATURE as QSA
from demo_qsa import demo_qsa
from demo_sage import SIGNATURE as SAGE
from demo_sage import demo_sage
from demo_selection import select_blocks
from demo_timing import timed
from rich.console import Console

from cudnn_graphs import PagedBlockSparseSignature, Plan, PlanStore, default_store
from cudnn_graphs.planning.inspect import plans_table
from cudnn_graphs.planning.tables import table_of

PAGE_SIZE, KV_BLOCK_SIZE = 16, 64
CHUNK = 512                             # tokens of one prefill step
PROMPTS = [2300, 1900, 1500, 4 * CHUNK]
DECODE_STEPS = 6
KEEP = 12                               # KV blocks that a block of queries attends to

DECODE = PagedBlockSparseSignature(batch_size=len(PROMPTS), seq_len_q=1, max_seq_len_kv=4096, num_qo_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM,
                                   q_block_size=8, kv_block_size=KV_BLOCK_SIZE, page_size=PAGE_SIZE, mask_type="causal", max_blocks_per_row=KEEP,
                                   page_table="block_tables")
PREFILL = DECODE.replace(batch_size=1, seq_len_q=CHUNK, q_block_size=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", metavar="DIR", help="the plan store; default: the library's own")
    parser.add_argument("--picture", type=Path, default=Path("sage_blocks.png"), metavar="FILE", help="the block map as PNG; default: %(default)s")
    parser.add_argument("--plans-only", action="store_true", help="build or find the plans, say which, and stop")
    options = parser.parse_args()
    torch.manual_seed(0)
    console = Console(highlight=False)
    store = PlanStore(options.store) if options.store else default_store()

    start = time.perf_counter()
    decode, prefill, sage, qsa = store.build([DECODE, PREFILL, SAGE, QSA], progress=True)
    store.freeze()                      # from here a plan that is missing is an error, not a compile
    milliseconds = 1e3 * (time.perf_counter() - start)
    stats = store.stats()
    console.print(f"Plans ready in {milliseconds:.1f} ms: {stats.builds} built, {stats.loads} loaded from {store.root or 'memory'}.")
    if options.plans_only:
        return

    console.print(f"Device: {decode.device.name}. Loading activations ...")
    streams, source = load_activations([prompt + DECODE_STEPS for prompt in PROMPTS], decode.device.torch_device)
    console.print(f"Attention over {source}: {HEADS} heads of {HEAD_DIM}.")
    steps = Steps()
    serve(decode, prefill, streams, steps)
    console.print(steps.table)
    console.print("Errors are relative L2. same keys: against exact attention over the selected blocks. all keys: against full attention "
                  "over the whole cache. random: that with as many blocks picked at random.")
    demo_sage(sage, console, options.picture)
    demo_qsa(qsa, console)
    console.print()
    console.print(plans_table(store.entries()))
    console.print("Store since startup: " + ", ".join(f"{name} {value:.3g}" for name, value in store.stats().to_json().items()))


def serve(decode: Plan, prefill: Plan, streams: list[Activations], steps: Steps) -> None:
    """All requests but the last are in the cache already; the last is prefilled chunk by chunk; then all decode."""
    cache = PagedCache(len(streams), DECODE.max_seq_len_kv, PAGE_SIZE, KV_BLOCK_SIZE, HEADS, HEAD_DIM, decode.device.torch_device)
    *earlier, newest = range(len(streams))
    for request in earlier:
        prompt = streams[request].part(0, PROMPTS[request])
        cache.append(request, prompt.k, prompt.v)
    for first in range(0, PROMPTS[newest], CHUNK):
        chunk = streams[newest].part(first, first + CHUNK)
        cache.append(newest, chunk.k, chunk.v)
        steps.run(f"prefill {first // CHUNK + 1}", prefill, cache, [newest], chunk.q[None])
    for step in range(DECODE_STEPS):
        tokens = [stream.part(prompt + step, prompt + step + 1) for stream, prompt in zip(streams, PROMPTS)]
        for request, token in enumerate(tokens):
            cache.append(request, token.k, token.v)
        steps.run(f"decode {step + 1}", decode, cache, [*earlier, newest], torch.stack([token.q for token in tokens]))


class Steps:
    """Runs steps and keeps a line about each."""

    def __init__(self) -> None:
        figures = ("keys read", "ms", "same keys", "all keys", "random")
        self.table = table_of("step", "plan", "engine", *figures, right=figures, whole=("step", "plan", "engine"))

    def run(self, name: str, plan: Plan, cache: PagedCache, requests: list[int], q: torch.Tensor) -> None:
        q_block_size = plan.signature.q_block_size
        by_chance, _ = attend(plan, cache, requests, q, select_blocks(cache, requests, q, q_block_size, KEEP, at_random=True))
        blocks = select_blocks(cache, requests, q, q_block_size, KEEP)
        out, milliseconds = attend(plan, cache, requests, q, blocks)
        causal = [causal_mask(cache.lengths[r], q.shape[1], q.device) for r in requests]
        selected = [listed_mask(blocks[0][b], blocks[1], q.shape[1], cache.lengths[r], q_block_size, KV_BLOCK_SIZE) & causal[b] for b, r in enumerate(requests)]
        same, full = (torch.stack([exact_attention(cache, r, q[b], masks[b]) for b, r in enumerate(requests)]) for masks in (selected, causal))
        share = sum(int(mask.sum()) for mask in selected) / sum(HEADS * int(mask.sum()) for mask in causal)
        self.table.add_row(name, plan.describe()["key"][:8], plan.engine, f"{share:.0%}", f"{milliseconds:.2f}", f"{error(out, same):.1e}",
                           f"{error(out, full):.3f}", f"{error(by_chance, full):.3f}")


def attend(plan: Plan, cache: PagedCache, requests: list[int], q: torch.Tensor, blocks: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """The attention itself: out like q, and its milliseconds."""
    block_indptr, block_indices = blocks
    tables, lengths = cache.block_tables[requests], cache.seq_lens(requests)
    return timed(q.device, lambda: plan.run(q, (cache.k, cache.v), None, None, lengths, block_indptr, block_indices, block_tables=tables))


if __name__ == "__main__":
    main()
