"""Random paged block-sparse calls over the whole surface, every byte that must not be read poisoned."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from cudnn_graphs import PagedBlockSparseSignature

GARBAGE_PAGE = 2**30 + 7        # in page-table entries past the live prefix


@dataclass
class PagedCase:
    """One call. `make` builds the tensors; `arguments` are what the wrapper's run takes."""

    batch: int = 2
    seq_len_q: int = 16
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    q_block_size: int = 8
    kv_block_size: int = 16
    page_size: int = 16
    max_seq_len_kv: int = 200
    mask_type: str = "dense"
    bits: bool = False
    dtype: torch.dtype = torch.bfloat16
    kv_layout: str = "tuple"
    page_table: str = "indptr"
    shared_pattern: bool = False
    padded_pages: int = 0               # extra elements of page stride, in units of page_size * head_dim
    strided_q: bool = False             # q a view of a fused buffer
    lens: list[int] | None = None
    blocks_per_row: int | None = None   # None: random 0..all
    sm_scale: float | None = None
    poison: float | None = float("nan")     # what every slot holds that no query of its head sees; None: random numbers
    k_magnitude: float = 1.0
    seed: int = 0
    device: str = "cpu"
    tensors: dict[str, Any] = field(default_factory=dict, repr=False)

    def __getattr__(self, name: str) -> Any:
        tensors = self.__dict__.get("tensors", {})
        if name in tensors:
            return tensors[name]
        raise AttributeError(name)

    @property
    def rows(self) -> int:
        return -(-self.seq_len_q // self.q_block_size)

    @property
    def scale(self) -> float:
        return self.head_dim ** -0.5 if self.sm_scale is None else self.sm_scale

    def make(self) -> PagedCase:
        rng, gen = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        least = self.seq_len_q if self.mask_type == "causal" else 1
        lens = self.lens or [self.max_seq_len_kv if b == 0 else rng.randint(least, self.max_seq_len_kv) for b in range(self.batch)]
        pages = [[0] * -(-n // self.page_size) for n in lens]
        num_pages = sum(map(len, pages)) + 3
        free = rng.sample(range(num_pages), num_pages)
        for table in pages:
            for j in range(len(table)):
                table[j] = free.pop()
        t = self.tensors
        t["lens"], t["pages_of"] = lens, pages
        t["seq_lens"] = torch.tensor(lens, dtype=torch.int32)
        self._page_table(pages)
        self._blocks(rng, lens)
        t["valid_bits"] = None
        if self.bits:
            words = torch.randint(0, 2**32, (self.batch, -(-self.max_seq_len_kv // 32)), generator=gen, dtype=torch.int64)
            words[rng.randrange(self.batch)] = 2**32 - 1
            t["valid_bits"] = words.to(torch.uint32)
        width = self.num_qo_heads + (2 * self.num_kv_heads if self.strided_q else 0)
        fused = torch.randn(self.batch, self.seq_len_q, width, self.head_dim, generator=gen).to(self.dtype)
        t["q"] = fused[:, :, :self.num_qo_heads]
        self._cache(gen, num_pages)
        for name, value in t.items():
            if isinstance(value, torch.Tensor):
                moved = value.to(self.device) if name != "q" else fused.to(self.device)[:, :, :self.num_qo_heads]
                t[name] = moved
        t["k_cache"], t["v_cache"] = (t["cache"][:, 0], t["cache"][:, 1]) if self.kv_layout == "combined" else t["cache"]
        return self

    def _page_table(self, pages: list[list[int]]) -> None:
        if self.page_table == "indptr":
            spare = [p + [GARBAGE_PAGE] * 2 for p in pages]
            ends = [0]
            for p in spare:
                ends.append(ends[-1] + len(p))
            self.tensors["page_indptr"] = torch.tensor(ends, dtype=torch.int32)
            self.tensors["page_indices"] = torch.tensor(sum(spare, []), dtype=torch.int32)
            self.tensors["block_tables"] = None
        else:
            columns = max(map(len, pages)) + 2
            table = torch.full((self.batch, columns + 3), -1, dtype=torch.int32)
            for b, p in enumerate(pages):
                table[b, :len(p)] = torch.tensor(p, dtype=torch.int32)
            self.tensors["page_indptr"] = self.tensors["page_indices"] = None
            self.tensors["block_tables"] = table

    def _blocks(self, rng: random.Random, lens: list[int]) -> None:
        heads = 1 if self.shared_pattern else self.num_kv_heads
        flat, indptr = [], []
        flat += [GARBAGE_PAGE] * 3          # a gap that no row lists
        for length in lens:
            total = -(-length // self.kv_block_size)
            for _ in range(heads):
                ends = [len(flat)]
                for _ in range(self.rows):
                    count = rng.randint(0, total) if self.blocks_per_row is None else min(self.blocks_per_row, total)
                    row = sorted(rng.sample(range(total), count))
                    if count and total - 1 not in row and rng.random() < 0.5:
                        row = sorted({*row[1:], total - 1})      # the ragged last block, often
                    flat += row
                    ends.append(len(flat))
                indptr.append(ends)
        self.tensors["block_indptr"] = torch.tensor(indptr, dtype=torch.int32).view(self.batch, heads, self.rows + 1)
        self.tensors["block_indices"] = torch.tensor(flat + [GARBAGE_PAGE], dtype=torch.int32)

    def _cache(self, gen: torch.Generator, num_pages: int) -> None:
        inner = (self.num_kv_heads, self.page_size, self.head_dim)
        parts = 2 if self.kv_layout == "combined" else 1
        compact = parts * self.num_kv_heads * self.page_size * self.head_dim
        stride = compact + self.padded_pages * self.page_size * self.head_dim
        caches = []
        for _ in range(3 - parts):
            raw = torch.full((num_pages, stride), float("nan"))
            raw[:, :compact] = torch.randn(num_pages, compact, generator=gen)
            caches.append(raw)
        views = [raw[:, :compact].view(num_pages, parts, *inner) if parts == 2 else raw[:, :compact].view(num_pages, *inner) for raw in caches]
        if self.poison is not None:
            keep = self._seen(num_pages)
            for view in views:
                halves = (view[:, 0], view[:, 1]) if parts == 2 else (view,)
                for half in halves:
                    half[~keep] = self.poison
        if self.k_magnitude != 1.0:
            (views[0][:, 0] if parts == 2 else views[0]).mul_(self.k_magnitude)
        typed = [raw.to(self.dtype).to(self.device)[:, :compact] for raw in caches]
        shaped = [x.unflatten(1, (parts, *inner) if parts == 2 else inner) for x in typed]
        self.tensors["cache"] = shaped[0] if parts == 2 else tuple(shaped)
        self.tensors["page_stride"] = stride if self.padded_pages else None

    def _seen(self, num_pages: int) -> torch.Tensor:
        """[P, Hkv, page] bool: the slots that at least one query of that head sees."""
        keep = torch.zeros(num_pages, self.num_kv_heads, self.page_size, dtype=torch.bool)
        for b in range(self.batch):
            table = torch.tensor(self.tensors["pages_of"][b], dtype=torch.long)
            for h in range(self.num_kv_heads):
                for r in range(self.rows):
                    tokens = self.row_tokens(b, h, r)
                    tokens = tokens[self.visible(b, r, tokens).any(0)]
                    keep[table[tokens // self.page_size], h, tokens % self.page_size] = True
        return keep

    def row_tokens(self, b: int, h: int, r: int) -> torch.Tensor:
        """Live tokens of the blocks that row r of (b, h) lists, in list order."""
        ends = self.host("block_indptr")
        begin, end = ends[b, h if ends.shape[1] > 1 else 0, r:r + 2].tolist()
        blocks = self.host("block_indices")[begin:end].long()
        tokens = (blocks[:, None] * self.kv_block_size + torch.arange(self.kv_block_size)).flatten()
        return tokens[tokens < int(self.host("seq_lens")[b])]

    def visible(self, b: int, r: int, tokens: torch.Tensor) -> torch.Tensor:
        """[queries of row r, tokens] bool: which of the tokens each query attends to."""
        queries = torch.arange(r * self.q_block_size, min((r + 1) * self.q_block_size, self.seq_len_q))
        mask = torch.ones(len(queries), len(tokens), dtype=torch.bool)
        if self.mask_type == "causal":
            mask &= tokens <= int(self.host("seq_lens")[b]) - self.seq_len_q + queries[:, None]
        if self.tensors["valid_bits"] is not None:
            words = self.host("valid_bits").view(torch.int32)[b].long()
            mask &= (words[tokens // 32] >> (tokens % 32) & 1).bool()
        return mask

    def host(self, name: str) -> torch.Tensor:
        return self.tensors[name].cpu()

    def signature(self, **changes: Any) -> PagedBlockSparseSignature:
        facts = dict(batch_size=self.batch, seq_len_q=self.seq_len_q, max_seq_len_kv=self.max_seq_len_kv, num_qo_heads=self.num_qo_heads,
                     num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, q_block_size=self.q_block_size, kv_block_size=self.kv_block_size,
                     page_size=self.page_size, mask_type=self.mask_type, use_kv_valid_bits=self.bits,
                     dtype={torch.bfloat16: "bfloat16", torch.float16: "float16"}[self.dtype], return_lse=True, kv_layout=self.kv_layout,
                     page_stride=self.page_stride, page_table=self.page_table, shared_pattern=self.shared_pattern)
        return PagedBlockSparseSignature(**{**facts, **changes})

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positional = (self.q, self.cache, self.page_indptr, self.page_indices, self.seq_lens, self.block_indptr, self.block_indices)
        return positional, {"block_tables": self.block_tables, "kv_valid_bits": self.valid_bits, "sm_scale": self.sm_scale}

    def one_shot(self, **changes: Any) -> Any:
        from cudnn_graphs import block_sparse_attention_with_paged_kv_cache
        keywords = dict(max_seq_len_kv=self.max_seq_len_kv, seq_lens_kv=self.seq_lens, kv_valid_bits=self.valid_bits, mask_type=self.mask_type,
                        sm_scale=self.sm_scale, block_tables=self.block_tables, return_lse=True)
        return block_sparse_attention_with_paged_kv_cache(self.q, self.cache, self.page_indptr, self.page_indices, self.block_indptr, self.block_indices,
                                                          self.q_block_size, self.kv_block_size, **{**keywords, **changes})


def by_query(out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[B, Sq, Hq, D], [B, Hq, Sq] -> the oracle's [n, Hq, D], [n, Hq]."""
    return out.flatten(0, 1), None if lse is None else lse.transpose(1, 2).flatten(0, 1)
