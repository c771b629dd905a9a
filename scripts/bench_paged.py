"""The benchmark's paged workloads P1 to P7: their tensors, their arithmetic, a float64 check of sampled rows, and their peers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from bench_workload import Run, Workload, sampled_error

from cudnn_graphs import PagedBlockSparseSignature, PlanStore


@dataclass
class PagedWorkload(Workload):
    """One of P1 to P7 or a variant."""

    batch: int
    seq_len_q: int
    num_qo_heads: int
    num_kv_heads: int
    q_block_size: int
    kv_block_size: int
    page_size: int
    seq_len_kv: int
    blocks_per_row: int
    mask_type: str = "dense"
    bits: bool = False
    bound: str = "compute"
    head_dim: int = 128
    t: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def limit(self) -> str:         # type: ignore[override]
        return "matmul_tflops" if self.bound == "compute" else "read_tb_s"

    @property
    def rows(self) -> int:
        return -(-self.seq_len_q // self.q_block_size)

    @property
    def group(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    def signature(self) -> PagedBlockSparseSignature:
        return PagedBlockSparseSignature(
            self.batch, self.seq_len_q, self.seq_len_kv, self.num_qo_heads, self.num_kv_heads, self.head_dim, self.q_block_size, self.kv_block_size,
            self.page_size, mask_type=self.mask_type, use_kv_valid_bits=self.bits, max_blocks_per_row=self.blocks_per_row)

    def make(self, device: str = "cuda", seed: int = 0) -> None:
        gen = torch.Generator(device).manual_seed(seed)
        pages = -(-self.seq_len_kv // self.page_size)
        num_pages = self.batch * pages
        randn = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=gen)  # noqa: E731
        t = self.t
        t["q"] = randn(self.batch, self.seq_len_q, self.num_qo_heads, self.head_dim)
        t["k"] = randn(num_pages, self.num_kv_heads, self.page_size, self.head_dim)
        t["v"] = randn(num_pages, self.num_kv_heads, self.page_size, self.head_dim)
        t["page_indptr"] = torch.arange(0, num_pages + 1, pages, dtype=torch.int32, device=device)
        t["pages"] = torch.randperm(num_pages, device=device, generator=gen).to(torch.int32)
        t["seq_lens"] = torch.full((self.batch,), self.seq_len_kv, dtype=torch.int32, device=device)
        rows = self.batch * self.num_kv_heads * self.rows
        total = -(-self.seq_len_kv // self.kv_block_size)
        chosen = [torch.rand(min(4096, rows - at), total, device=device, generator=gen).topk(self.blocks_per_row, -1).indices.sort(-1).values
                  for at in range(0, rows, 4096)]
        t["blocks"] = torch.cat(chosen).to(torch.int32).view(self.batch, self.num_kv_heads, self.rows, self.blocks_per_row)
        t["block_indices"] = t["blocks"].flatten()
        step = self.blocks_per_row
        offsets = torch.arange(0, rows * step, step, dtype=torch.int32, device=device).view(self.batch, self.num_kv_heads, self.rows)
        t["block_indptr"] = torch.cat([offsets, offsets[..., -1:] + step], -1).contiguous()
        t["out"] = torch.empty_like(t["q"])
        if self.bits:
            words = torch.full((self.batch, -(-self.seq_len_kv // 32)), -1, dtype=torch.int32, device=device)
            t["valid_bits"] = words.view(torch.uint32)

    def ours(self, store: PlanStore, engine: str) -> Run:
        plan = store.get(self.signature(), "cuda", engine)
        args, keywords = self.arguments()
        return lambda: plan.run(*args, **keywords)

    def peers(self) -> dict[str, Any]:
        from bench_peers import PAGED_PEERS
        return {name: lambda p=peer: p(self) for name, peer in PAGED_PEERS.items()}

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        t = self.t
        return ((t["q"], (t["k"], t["v"]), t["page_indptr"], t["pages"], t["seq_lens"], t["block_indptr"], t["block_indices"]),
                {"kv_valid_bits": t.get("valid_bits"), "out": t["out"]})

    def pairs(self) -> int:
        """Visible (query token, key) pairs summed over KV heads: what FLOPs are counted over."""
        if self.mask_type == "dense":
            return self.batch * self.num_kv_heads * self.seq_len_q * self.blocks_per_row * self.kv_block_size
        blocks = self.t["blocks"].long()                                                # [B, Hkv, R, n]
        query = torch.arange(self.seq_len_q, device=blocks.device).view(self.rows, self.q_block_size)
        last = self.seq_len_kv - self.seq_len_q + query                                 # [R, qb]
        seen = (last[:, :, None] + 1 - blocks[:, :, :, None] * self.kv_block_size).clamp(0, self.kv_block_size)
        return int(seen.sum())

    def flops(self) -> int:
        return 4 * self.group * self.head_dim * self.pairs()

    def moved_bytes(self) -> int:
        """Bytes of K and V that the rows list."""
        return self.batch * self.num_kv_heads * self.rows * self.blocks_per_row * self.kv_block_size * self.head_dim * 2 * 2

    def sampled_rows(self) -> list[tuple[int, int, int]]:
        """(request, KV head, row) of the check: first, last and some between, at least 256 (query, head) rows."""
        need = max(4, -(-256 // (min(self.q_block_size, self.seq_len_q) * self.group)))
        flat = torch.linspace(0, self.batch * self.num_kv_heads * self.rows - 1, need).long().tolist()
        return [(f // (self.num_kv_heads * self.rows), f // self.rows % self.num_kv_heads, f % self.rows) for f in dict.fromkeys(flat)]

    def worst_error(self, out: torch.Tensor) -> tuple[float, float]:
        pairs = []
        for b, h, r in self.sampled_rows():
            want, heads, queries = self._oracle_row(b, h, r)
            pairs.append((out[b, queries, heads], want))
        return sampled_error(pairs)

    def _oracle_row(self, b: int, h: int, r: int) -> tuple[torch.Tensor, slice, slice]:
        t, device = self.t, self.t["q"].device
        tokens = (t["blocks"][b, h, r].long()[:, None] * self.kv_block_size + torch.arange(self.kv_block_size, device=device)).flatten()
        tokens = tokens[tokens < self.seq_len_kv]
        page = t["pages"][t["page_indptr"][b].long() + tokens // self.page_size].long()
        k, v = (t[n][page, h, tokens % self.page_size].double() for n in ("k", "v"))
        queries = slice(r * self.q_block_size, min((r + 1) * self.q_block_size, self.seq_len_q))
        heads = slice(h * self.group, (h + 1) * self.group)
        score = torch.einsum("qgd,nd->qgn", t["q"][b, queries, heads].double(), k) * self.head_dim ** -0.5
        if self.mask_type == "causal":
            last = self.seq_len_kv - self.seq_len_q + torch.arange(queries.start, queries.stop, device=device)
            score = score.masked_fill(tokens > last[:, None, None], float("-inf"))
        return torch.einsum("qgn,nd->qgd", score.softmax(-1).nan_to_num(0.0), v), heads, queries


#                                                          B    Sq     Hq  Hkv  qb  kvb  page  Skv   blocks
PAGED = {w.name: w for w in (
    PagedWorkload("P1", "paged prefill, GQA 4, 64/64", 4, 2048, 32, 8, 64, 64, 64, 32768, 32),
    PagedWorkload("P1-causal", "the same, causal", 4, 2048, 32, 8, 64, 64, 64, 32768, 32, mask_type="causal"),
    PagedWorkload("P1-bits", "the same, valid bits all ones", 4, 2048, 32, 8, 64, 64, 64, 32768, 32, bits=True),
    PagedWorkload("P1-page16", "the same, pages and blocks of 16", 4, 2048, 32, 8, 64, 16, 16, 32768, 128),
    PagedWorkload("P2", "MHA 64/64, 32k", 1, 32768, 24, 24, 64, 64, 64, 32768, 52),
    PagedWorkload("P3", "MHA 128/128, 32k", 1, 32768, 24, 24, 128, 128, 128, 32768, 26),
    PagedWorkload("P4", "MHA 64/64, 75,776 tokens, 40 heads", 1, 75776, 40, 40, 64, 64, 64, 75776, 118),
    PagedWorkload("P5", "short rows, Sq 16", 32, 16, 32, 8, 16, 64, 64, 32768, 64, bound="memory"),
    PagedWorkload("P6", "decode, GQA 8, batch 32", 32, 1, 64, 8, 1, 64, 64, 32768, 64, bound="memory"),
    PagedWorkload("P7", "decode, GQA 8, batch 8", 8, 1, 64, 8, 1, 64, 64, 32768, 64, bound="memory"),
)}
