"""A paged call cut up: what each rank is given when its blocks have owners."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from paged_cases import PagedCase

Owner = Callable[[int, int, int], int]      # (request, unit, units of the request) -> rank


def round_robin(world: int) -> Owner:
    return lambda b, unit, units: (b + unit) % world


def stretches(world: int) -> Owner:
    """Uneven stretches: the first rank has one unit, the last a half and more."""
    return lambda b, unit, units: min(unit, world - 1)


def middle(world: int) -> Owner:
    """Rank 1 holds the middle of every sequence, rank 0 its beginning and its end, others nothing."""
    return lambda b, unit, units: 1 if units // 3 <= unit < max(2 * units // 3, units // 3 + 1) else 0


def all_on(rank: int) -> Owner:
    return lambda b, unit, units: rank


def at_random(world: int, seed: int = 0) -> Owner:
    return lambda b, unit, units: random.Random(f"{seed} {b} {unit}").randrange(world)


def by_request(world: int) -> Owner:
    return lambda b, unit, units: b % world


def unit_tokens(case: PagedCase) -> int:
    """What a rank holds or not: the larger of a page and a block, or what both divide."""
    return case.page_size * case.kv_block_size // case.signature().lower().sub_page


def shard(case: PagedCase, owner: Owner, rank: int, device: str | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rank's positional and keyword run arguments: its pages alone, compact and renumbered, -1 for the others. A signature has page_stride None."""
    pages_per_unit = unit_tokens(case) // case.page_size
    tables, mine = [], []
    for b, table in enumerate(case.pages_of):
        units = -(-len(table) // pages_per_unit)
        held = [owner(b, j // pages_per_unit, units) == rank for j in range(len(table))]
        tables.append([len(mine) + sum(held[:j]) + 1 if here else -1 for j, here in enumerate(held)])
        mine += [page for page, here in zip(table, held, strict=True) if here]
    device = device or case.device
    pick = torch.tensor([0, *mine], device=case.k_cache.device)           # one page that nothing refers to: a cache has at least one
    k, v = (cache[pick].to(device) for cache in (case.k_cache, case.v_cache))
    k[0], v[0] = float("nan"), float("nan")
    cache = torch.stack([k, v], 1) if case.kv_layout == "combined" else (k, v)
    positional, keywords = case.arguments()
    q, _, page_indptr, page_indices, *rest = (x if x is None or isinstance(x, tuple) else x.to(device) for x in positional)
    keywords = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in keywords.items()}
    if page_indptr is None:
        table = keywords["block_tables"].clone()
        for b, row in enumerate(tables):
            table[b, :len(row)] = torch.tensor(row, dtype=torch.int32)
        keywords["block_tables"] = table
    else:
        page_indices = page_indices.clone()
        for b, row in enumerate(tables):
            page_indices[int(page_indptr[b]):int(page_indptr[b]) + len(row)] = torch.tensor(row, dtype=torch.int32)
    return (q, cache, page_indptr, page_indices, *rest), keywords
