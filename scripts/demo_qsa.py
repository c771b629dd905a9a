"""Query-sparse attention over a packed batch: every token selects its own blocks of four earlier tokens."""

from __future__ import annotations

import torch
from demo_exact import error
from demo_timing import timed
from rich.console import Console

from cudnn_graphs import Plan, QsaMetadata, QuerySparseSignature, build_qsa_metadata, select_qsa_blocks
from cudnn_graphs.planning.tables import table_of

LENGTHS = [401, 2, 230, 63]             # sequences, packed end to end; their last blocks hold 1, 2, 2 and 3 tokens
HEADS, KV_HEADS, HEAD_DIM = 12, 1, 256
TOKENS = sum(LENGTHS)
SELECTIONS = (8, 24)              # blocks of four tokens that a query selects beside its own

SIGNATURE = QuerySparseSignature(HEADS, KV_HEADS, "bitmap", max_tokens=TOKENS)


def demo_qsa(plan: Plan, console: Console) -> None:
    device = plan.device.torch_device
    metadata = build_qsa_metadata(torch.tensor([0, *LENGTHS], device=device).cumsum(0))
    q, k, v = (x.to(device) for x in packed_qkv())
    scores = block_scores(q, k, metadata)
    full, _ = exact(q, k, v, metadata)
    console.print(f"\nQuery-sparse attention over {len(LENGTHS)} packed sequences, {TOKENS} tokens, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}; "
                  f"engine {plan.engine}.")
    figures = ("keys read", "ms", "same keys", "all keys", "random")
    table = table_of("selected", *figures, right=figures, whole=("selected",))
    for top_k in SELECTIONS:
        bitmap = select_qsa_blocks(scores, metadata, top_k)
        (_, out, _), milliseconds = timed(device, lambda bitmap=bitmap: plan.run(q, k, v, bitmap, *metadata))
        _, by_chance, _ = plan.run(q, k, v, select_qsa_blocks(torch.rand_like(scores), metadata, top_k), *metadata)
        same, share = exact(q, k, v, metadata, bitmap)
        table.add_row(f"{top_k} blocks", f"{share:.0%}", f"{milliseconds:.2f}", f"{error(out, same):.1e}", f"{error(out, full):.3f}",
                      f"{error(by_chance, full):.3f}")
    console.print(table)


def packed_qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q bf16 [TOKENS, HEADS, HEAD_DIM], k, v [TOKENS, KV_HEADS, HEAD_DIM]: keys drift from topic to topic, queries look for an earlier one."""
    gen = torch.Generator().manual_seed(0)
    topics = torch.randn(TOKENS // 24 + 1, 1, HEAD_DIM, generator=gen).repeat_interleave(24, 0)[:TOKENS]
    earlier = (torch.rand(TOKENS // 8 + 1, generator=gen).repeat_interleave(8)[:TOKENS] * torch.arange(TOKENS)).long()
    q = torch.randn(TOKENS, HEADS, HEAD_DIM, generator=gen) + topics[earlier]
    k, v = (torch.randn(TOKENS, KV_HEADS, HEAD_DIM, generator=gen) + topics for _ in range(2))
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def block_scores(q: torch.Tensor, k: torch.Tensor, metadata: QsaMetadata) -> torch.Tensor:
    """fp32 [T, NB]: each query's mean over heads, times each block's mean key."""
    ends = metadata.block_last.long() + 1
    sums = torch.cat([torch.zeros_like(k[:1, 0], dtype=torch.float64), k[:, 0].double().cumsum(0)])
    first = metadata.block_first.long()
    pooled = (sums[ends] - sums[first]) / (ends - first)[:, None]
    return q.float().mean(1) @ pooled.float().mT


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: QsaMetadata, bitmap: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
    """fp32 attention [T, HEADS, HEAD_DIM] over what lo, hi and the bitmap (None: all) allow, and the share of keys that the bitmap leaves."""
    token = torch.arange(TOKENS, device=q.device)
    causal = (metadata.lo[:, None] <= token) & (token <= metadata.hi[:, None])
    seen = causal
    if bitmap is not None:
        block = torch.searchsorted(metadata.block_first.long(), token, right=True) - 1
        seen = causal & (bitmap[:, block] != 0)
    scores = torch.einsum("qhd,kd->hqk", q.float(), k[:, 0].float()) * HEAD_DIM ** -0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,kd->qhd", weights, v[:, 0].float()), float(seen.sum() / causal.sum())
