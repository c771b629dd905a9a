"""A call of any signature on random tensors: what the store check, the soak and the host benchmark run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cudnn_graphs import PagedBlockSparseSignature, QuerySparseSignature, SageBlockSparseSignature, build_qsa_metadata
from cudnn_graphs.ops.paged_signature import DTYPES
from cudnn_graphs.planning import Plan, Signature

Call = tuple[tuple[Any, ...], dict[str, Any]]       # what `plan.run` takes

POOL_BYTES = 1 << 28        # of K: longer caches map their pages onto these, as prefix sharing does
MOST_TOKENS = 4096          # of a packed batch, whose bitmap grows with their square


def synthetic_call(signature: Signature, device: str, *, seed: int = 0, fill: float = 1.0) -> Call:
    """fill: the share of each capacity that the call uses, over 0 up to 1. Something is always seen: no output is all zeros."""
    return MAKERS[type(signature)](signature, device, torch.Generator(device).manual_seed(seed), fill)


def outputs_of(plan: Plan, call: Call) -> dict[str, torch.Tensor]:
    """Output tensors for `call`, by name: those that one run made."""
    args, keywords = call
    result = plan.run(*args, **keywords)
    names = ("out", "out_fp32", "lse") if isinstance(plan.signature, QuerySparseSignature) else ("out", "lse")
    return dict(zip(names, result if isinstance(result, tuple) else (result,), strict=False))


def _part(capacity: int, fill: float) -> int:
    return max(1, round(capacity * fill))


def _paged(s: PagedBlockSparseSignature, device: str, gen: torch.Generator, fill: float) -> Call:
    batch, longest = _part(s.batch_size, fill), min(max(_part(s.max_seq_len_kv, fill), s.seq_len_q), s.max_seq_len_kv)
    ints = lambda low, high, *shape: torch.randint(low, high, shape, dtype=torch.int32, device=device, generator=gen)  # noqa: E731
    randn = lambda *shape: torch.randn(shape, device=device, generator=gen, dtype=torch.float32).to(DTYPES[s.dtype])  # noqa: E731
    shortest = min(max(longest // 2, s.seq_len_q), longest)
    lens, columns = ints(shortest, longest + 1, batch), -(-longest // s.page_size)
    page = (s.num_kv_heads, s.page_size, s.head_dim)
    stride = s.page_stride or s.compact_page_stride
    num_pages = max(1, min(batch * columns, POOL_BYTES // (2 * stride)))
    pools = [randn(num_pages, stride)[:, :s.compact_page_stride] for _ in range(1 if s.kv_layout == "combined" else 2)]
    cache = pools[0].unflatten(1, (2, *page)) if s.kv_layout == "combined" else tuple(pool.unflatten(1, page) for pool in pools)
    tables = ints(0, num_pages, batch, columns)
    lists = batch * (1 if s.shared_pattern else s.num_kv_heads)
    held = max(shortest // s.kv_block_size, 1)                  # blocks that even the shortest request has whole
    count = min(s.max_blocks_per_row, held)  # type: ignore[type-var]
    blocks = torch.rand(lists * s.rows, held, device=device, generator=gen).topk(count, -1).indices.sort(-1).values.int()
    begins = torch.arange(lists, device=device, dtype=torch.int32)[:, None] * (s.rows * count)
    indptr = (begins + torch.arange(s.rows + 1, device=device, dtype=torch.int32) * count).view(batch, -1, s.rows + 1)
    by_table = s.page_table == "block_tables"
    page_indptr = None if by_table else torch.arange(0, (batch + 1) * columns, columns, dtype=torch.int32, device=device)
    # one token of eight at least, so that every listed block has one
    bits = (ints(-2**31, 2**31 - 1, batch, -(-s.max_seq_len_kv // 32)) | 0x01010101).view(torch.uint32) if s.use_kv_valid_bits else None
    return ((randn(batch, s.seq_len_q, s.num_qo_heads, s.head_dim), cache, page_indptr, None if by_table else tables.flatten(), lens, indptr,
             blocks.flatten()), {"block_tables": tables if by_table else None, "kv_valid_bits": bits})


def _sage(s: SageBlockSparseSignature, device: str, gen: torch.Generator, fill: float) -> Call:
    batch, seq_k, capacity = _part(s.batch_size, fill), _part(s.seq_len_k, fill), _part(s.capacity, fill)
    heads, blocks, rows = s.num_heads, -(-seq_k // 64), -(-s.seq_len_q // 64)
    ints = lambda low, high, *shape, dtype=torch.int32: torch.randint(low, high, shape, dtype=dtype, device=device, generator=gen)  # noqa: E731
    rand = lambda *shape: torch.rand(shape, device=device, generator=gen) + 0.5  # noqa: E731
    q, k = (ints(-127, 128, batch, heads, n, 128, dtype=torch.int8) for n in (s.seq_len_q, seq_k))
    v = torch.randn(batch, heads, 128, blocks * 64, device=device, generator=gen).to(torch.float8_e4m3fn)
    scales = (rand(batch, heads, -(-s.seq_len_q // 128) * 4) / 73**2, rand(batch, heads, blocks), rand(batch, heads, 128))     # scores of about 1
    shapes = {1: (blocks,), 2: (batch, blocks), 3: (batch, heads, blocks)}
    sizes = None if s.block_sizes_rank is None else ints(32, 65, *shapes[s.block_sizes_rank])
    counts = ints(1, capacity + 1, batch, heads, rows) if s.has_counts else None
    return ((q, k, v, *scales, ints(0, blocks, batch, heads, rows, capacity), capacity), {"block_sizes": sizes, "q2k_block_nums": counts})


def _qsa(s: QuerySparseSignature, device: str, gen: torch.Generator, fill: float) -> Call:
    total = _part(min(s.max_tokens, MOST_TOKENS), fill)
    metadata = build_qsa_metadata([0, total // 3, total])
    q, k, v = (torch.randn(total, heads, 256, device=device, generator=gen).to(torch.bfloat16) for heads in (s.num_qo_heads, s.num_kv_heads, s.num_kv_heads))
    if s.source == "indices":
        width = min(max(total // 4 * 4, 4), 256)
        ids = torch.rand(total, max(total, width), device=device, generator=gen).topk(width, -1).indices.int()      # none twice in a row
        return (q, k, v, torch.where(ids < total, ids, -1)), {}
    tokens, first, last = torch.arange(total, device=device)[:, None], metadata.block_first.to(device), metadata.block_last.to(device)
    some = torch.rand(total, first.numel(), device=device, generator=gen) < 0.1
    selected = (some | (first <= tokens) & (tokens <= last)).to(torch.uint8)       # and its own block
    return (q, k, v, selected, *(field.to(device) for field in metadata)), {}


MAKERS: dict[type[Signature], Callable[[Any, str, torch.Generator, float], Call]] = {
    PagedBlockSparseSignature: _paged, SageBlockSparseSignature: _sage, QuerySparseSignature: _qsa}
