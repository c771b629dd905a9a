"""The benchmark's Sage workloads S1 to S3: quantized tensors, a float64 check of sampled rows, and their peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from bench_timing import Contender, in_turns
from bench_workload import Run, Unavailable, Workload, imported, sampled_error

from cudnn_graphs import PlanStore
from cudnn_graphs.ops import quantize_sage_qkv, sage_block_sparse_attention

HEAD_DIM = 128


@dataclass
class SageWorkload(Workload):
    """MHA over `tokens` tokens, `blocks` key blocks of 64 for each 64 queries; `pair`: lists shared by pairs of rows, as 128 x 128 blocks."""

    heads: int
    tokens: int
    blocks: int
    pair: bool = False
    counts: bool = False
    t: dict[str, Any] = field(default_factory=dict, repr=False)
    limit = "fp8_tflops"
    worst_row = 7e-2
    peers_worst_row = 0.15          # their quantizers and products lose more; what is to be timed must not be garbage

    @property
    def rows(self) -> int:
        return self.tokens // 64

    def make(self) -> None:
        gen = torch.Generator("cuda").manual_seed(0)
        t = self.t
        t["q"], t["k"], t["v"] = (torch.randn(1, self.heads, self.tokens, HEAD_DIM, dtype=torch.bfloat16, device="cuda", generator=gen) for _ in range(3))
        t["sage"] = quantize_sage_qkv(t["q"], t["k"], t["v"])
        t["index"] = torch.cat([self._lists(gen) for _ in range(self.heads)]).view(1, self.heads, self.rows, -1).contiguous()
        t["nums"] = torch.full((1, self.heads, self.rows), self.blocks, dtype=torch.int32, device="cuda")
        t["out"] = torch.empty_like(t["q"])

    def _lists(self, gen: torch.Generator) -> torch.Tensor:
        if not self.pair:
            return torch.rand(self.rows, self.rows, device="cuda", generator=gen).topk(self.blocks, -1).indices.sort(-1).values.int()
        wide = torch.rand(self.rows // 2, self.rows // 2, device="cuda", generator=gen).topk(self.blocks // 2, -1).indices.sort(-1).values.int()
        return torch.stack([2 * wide, 2 * wide + 1], -1).flatten(1).repeat_interleave(2, 0)

    def ours(self, store: PlanStore, engine: str) -> Run:
        t = self.t
        nums = t["nums"] if self.counts else None
        return lambda: sage_block_sparse_attention(*t["sage"][:6], t["index"], self.blocks, q2k_block_nums=nums, uniform_block_count=not self.counts,
                                                   out=t["out"], engine=engine, store=store)

    def peers(self) -> dict[str, Callable[[], Run]]:
        return {"cuDNN FP8 kernel alone": lambda: cudnn_fp8(self), "FlashInfer cake FP8": lambda: flashinfer_cake_fp8(self)}

    def flops(self) -> int:
        return 4 * self.heads * HEAD_DIM * self.tokens * self.blocks * 64

    def moved_bytes(self) -> int:
        return self.heads * self.rows * self.blocks * 64 * HEAD_DIM * 2

    def worst_error(self, out: torch.Tensor) -> tuple[float, float]:
        """Against exact attention of the bf16 inputs: every contender quantizes in its own way, so quantization is in the error."""
        pairs = []
        for flat in torch.linspace(0, self.heads * self.rows - 1, 8).long().tolist():
            h, r = divmod(flat, self.rows)
            pairs.append((out[0, h, 64 * r:64 * r + 64], self._oracle_row(h, r)))
        return sampled_error(pairs)

    def _oracle_row(self, h: int, r: int) -> torch.Tensor:
        q, k, v = (self.t[n][0, h] for n in "qkv")
        tokens = (self.t["index"][0, h, r].long()[:, None] * 64 + torch.arange(64, device="cuda")).flatten()
        score = q[64 * r:64 * r + 64].double() @ k[tokens].double().T * HEAD_DIM ** -0.5
        return score.softmax(-1) @ v[tokens].double()

    def extras(self) -> dict[str, Any]:
        """The quantizer, timed apart, as the contenders are."""
        q, k, v = (self.t[n] for n in "qkv")
        return in_turns({"quantize_ms": Contender.of(lambda: quantize_sage_qkv(q, k, v)).replay})


def cudnn_fp8(w: SageWorkload) -> Run:
    """cuDNN Frontend's FP8 block-sparse kernel on tensors of its own quantizer: fixed counts."""
    if w.counts:
        raise Unavailable("per-row counts are refused on SM90")
    quantizer, interface = imported("cudnn.block_sparse_attention._fp8_quant"), imported("cudnn.block_sparse_attention._interface")
    tensors = quantizer._quantize_sage_bhsd(w.t["q"], w.t["k"], w.t["v"], v_layout="bhds")
    return lambda: interface._bsa_attn_fwd_sm90_fp8_blk64(*tensors, w.t["index"], w.blocks, HEAD_DIM ** -0.5)[0]


def flashinfer_cake_fp8(w: SageWorkload) -> Run:
    """FlashInfer's generated FP8 kernel on tensors of its own quantizer; its plan takes seconds and is not timed."""
    cake = imported("flashinfer.cake_vsa_sm90")
    if w.blocks > 64:
        raise Unavailable("serves up to 64 blocks a row")
    tensors = cake.sage_fp8_quantize_sm90(*(w.t[n][0].contiguous() for n in "qkv"))
    mask = torch.zeros(w.heads, w.rows, w.rows, dtype=torch.bool, device="cuda").scatter_(2, w.t["index"][0].long(), True)
    sizes = torch.full((w.heads, w.rows), 64, dtype=torch.int32, device="cuda")
    plan = cake.create_plan("cuda:0", mask, sizes, sizes, w.heads, w.heads, HEAD_DIM, q_data_type=torch.float8_e4m3fn,
                            q_scale=tensors[3], k_scale=tensors[4], v_scale=tensors[5])
    out = torch.empty(w.heads * w.tokens, 1, HEAD_DIM, dtype=torch.bfloat16, device="cuda")

    def run() -> torch.Tensor:
        plan.run(*tensors[:3], out=out)
        return out.view(1, w.heads, w.tokens, HEAD_DIM)
    return run


SAGE = {w.name: w for w in (
    SageWorkload("S1", "Sage 64/64, 24 heads, 32k, 52 blocks", 24, 32768, 52),
    SageWorkload("S1-counts", "the same, a count for each row", 24, 32768, 52, counts=True),
    SageWorkload("S2", "the same, lists shared by pairs of rows", 24, 32768, 52, pair=True),
    SageWorkload("S3", "Sage 64/64, 40 heads, 75,776 tokens, 118 blocks", 40, 75776, 118),
)}
