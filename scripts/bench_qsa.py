"""The benchmark's packed query-sparse workloads Q1 to Q4: correlated and random selections, a float64 check, and their peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from bench_workload import Run, Workload, imported, sampled_error

from cudnn_graphs import PlanStore
from cudnn_graphs.ops import build_qsa_metadata, qsa_forward

HEAD_DIM, TOP = 256, 512
RHO = 0.99                  # of the AR(1) block scores that make neighbouring selections alike
CHUNK = 512                 # query tokens whose selection is made at once


@dataclass
class QsaWorkload(Workload):
    """One causal sequence of `tokens`; every query selects the top 512 complete blocks and its own tail block."""

    num_qo_heads: int
    num_kv_heads: int
    tokens: int
    correlated: bool = True
    t: dict[str, Any] = field(default_factory=dict, repr=False)

    def make(self) -> None:
        gen = torch.Generator("cuda").manual_seed(0)
        t = self.t
        t["q"] = torch.randn(self.tokens, self.num_qo_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda", generator=gen)
        t["k"], t["v"] = (torch.randn(self.tokens, self.num_kv_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda", generator=gen) for _ in range(2))
        t["metadata"] = [x.cuda() for x in build_qsa_metadata(torch.tensor([0, self.tokens], dtype=torch.int32))]
        t["selected"] = self._selection(gen)
        t["out"], t["lse"] = torch.empty_like(t["q"]), torch.empty(self.num_qo_heads, self.tokens, device="cuda")
        t["out_fp32"] = torch.empty(t["q"].shape, device="cuda")

    def _selection(self, gen: torch.Generator) -> torch.Tensor:
        blocks = self.tokens // 4
        selected = torch.zeros(self.tokens, blocks, dtype=torch.uint8, device="cuda")
        step = torch.arange(CHUNK, device="cuda")
        decay = torch.tril(RHO ** (step[:, None] - step).clamp(min=0).float())
        state = torch.randn(blocks, device="cuda", generator=gen)
        for first in range(0, self.tokens, CHUNK):
            scores = torch.randn(CHUNK, blocks, device="cuda", generator=gen)
            if self.correlated:
                scores = decay @ (scores * (1 - RHO**2) ** 0.5) + RHO ** (step[:, None] + 1).float() * state
                state = scores[-1]
            query = first + step[:, None]
            scores = scores.masked_fill(torch.arange(blocks, device="cuda") >= (query + 1) // 4, float("-inf"))
            value, index = scores.topk(min(TOP, blocks), 1)
            selected[first:first + CHUNK].scatter_(1, index, (value > float("-inf")).to(torch.uint8)).scatter_(1, query // 4, 1)
        return selected

    def ours(self, store: PlanStore, engine: str) -> Run:
        t = self.t
        outputs = {n: t[n] for n in ("out", "out_fp32", "lse")}
        return lambda: qsa_forward(t["q"], t["k"], t["v"], t["selected"], *t["metadata"], engine=engine, store=store, **outputs)[0]

    def peers(self) -> dict[str, Callable[[], Run]]:
        return {"Triton gather": lambda: triton_gather(self), "FlashAttention-4 dense causal": lambda: flash_attention_4_dense(self)}

    def pairs(self) -> int:
        query = torch.arange(self.tokens, device="cuda")
        return int((4 * self.t["selected"].sum(1, dtype=torch.int64) - (3 - query % 4)).sum())      # hi cuts the tail block

    def flops(self) -> int:
        return 4 * self.num_qo_heads * HEAD_DIM * self.pairs()

    def moved_bytes(self) -> int:
        return self.pairs() * self.num_kv_heads * HEAD_DIM * 2 * 2

    def worst_error(self, out: torch.Tensor) -> tuple[float, float]:
        pairs = []
        group = self.num_qo_heads // self.num_kv_heads
        for query in (0, 1, 2, 3, *torch.linspace(4, self.tokens - 1, 20).long().tolist()):
            blocks = self.t["selected"][query].nonzero()
            tokens = (4 * blocks + torch.arange(4, device="cuda")).flatten()
            tokens = tokens[tokens <= query]
            for h in range(self.num_kv_heads):
                heads = slice(h * group, (h + 1) * group)
                score = self.t["q"][query, heads].double() @ self.t["k"][tokens, h].double().T / 16
                pairs.append((out[query, heads], score.softmax(-1) @ self.t["v"][tokens, h].double()))
        return sampled_error(pairs)

    def extras(self) -> dict[str, Any]:
        """How alike neighbours' selections are, over sampled groups of ten: union over mean width, and mean Jaccard of neighbours."""
        width, jaccard = [], []
        for first in torch.linspace(self.tokens // 8, self.tokens - 11, 64).long().tolist():
            rows = self.t["selected"][first:first + 10].bool()
            width.append(float(rows.any(0).sum() / rows.sum(1).float().mean()))
            jaccard.append(float((rows[:-1] & rows[1:]).sum() / (rows[:-1] | rows[1:]).sum()))
        return {"union_of_10_width": sum(width) / len(width), "neighbour_jaccard": sum(jaccard) / len(jaccard)}


def triton_gather(w: QsaWorkload) -> Run:
    """One program per query and KV head that gathers its own keys: the method vLLM serves this model with, tuned for the bench."""
    gather = imported("bench_triton_gather")
    return gather.prepare(w)


def flash_attention_4_dense(w: QsaWorkload) -> Run:
    """What attending everything costs: dense causal, no mask."""
    interface = imported("flash_attn.cute.interface")
    q, k, v = (w.t[n][None] for n in "qkv")

    def run() -> torch.Tensor:
        result = interface.flash_attn_func(q, k, v, softmax_scale=1 / 16, causal=True)
        return result[0] if isinstance(result, tuple) else result
    run.other_question = True       # type: ignore[attr-defined]
    return run


QSA = {w.name: w for w in (
    QsaWorkload("Q1", "QSA 12/1, T 8192, correlated", 12, 1, 8192),
    QsaWorkload("Q2", "QSA 12/1, T 32768, correlated", 12, 1, 32768),
    QsaWorkload("Q3", "QSA 12/1, T 32768, random", 12, 1, 32768, correlated=False),
    QsaWorkload("Q4", "QSA 24/2, T 16384, correlated", 24, 2, 16384),
)}
