"""The surface of paged block-sparse attention as cases: a table that names what each group is for, and seeded random draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
PAGES = (8, 16, 32, 64, 128, 256)
BLOCKS = (8, 16, 32, 64, 128, 192, 320)
MASKS: tuple[dict[str, Any], ...] = ({}, {"mask_type": "causal"}, {"bits": True}, {"mask_type": "causal", "bits": True})
PACKED = ((1, 8), (8, 1), (2, 8), (16, 2), (16, 4), (12, 6), (64, 2), (40, 3), (64, 4))     # q_block_size, heads per KV head


def heads(group: int, num_kv_heads: int = 2) -> dict[str, int]:
    return {"num_qo_heads": group * num_kv_heads, "num_kv_heads": num_kv_heads}


def table() -> Iterator[dict[str, Any]]:
    """PagedCase fields, group by group."""
    for dtype in DTYPES:                    # every number type, head size and mask
        for head_dim in HEAD_DIMS:
            for mask in MASKS:
                yield {"dtype": dtype, "head_dim": head_dim, "seq_len_q": 37, "q_block_size": 16, "page_size": 32, **heads(2), **mask}
    for q_block_size, group in PACKED:      # every M tile, ragged last rows, dense and causal
        for mask in MASKS[:2]:
            yield {"head_dim": 128, "q_block_size": q_block_size, "seq_len_q": 2 * q_block_size + 1, "kv_block_size": 64, "page_size": 64,
                   "max_seq_len_kv": 330, **heads(group), **mask}
    for page_size in PAGES:                 # every relation of page and block
        for kv_block_size in BLOCKS:
            yield {"page_size": page_size, "kv_block_size": kv_block_size, "max_seq_len_kv": 700, "seq_len_q": 16, "q_block_size": 8, **heads(2)}
    for i in range(32):                     # every way to lay the same call out
        yield {"kv_layout": ("tuple", "combined")[i & 1], "page_table": ("indptr", "block_tables")[i >> 1 & 1], "shared_pattern": bool(i >> 2 & 1),
               "padded_pages": i >> 3 & 1, "strided_q": bool(i >> 4 & 1), **MASKS[i % 3]}
    for seq_len_q in (1, 2, 7, 63, 65, 130):    # short, ragged and long queries
        for mask in MASKS[:2]:
            yield {"seq_len_q": seq_len_q, "q_block_size": 64, **heads(2), **mask}
    for head_dim in HEAD_DIMS:              # short rows over long lists: the split path
        for mask in (MASKS[0], MASKS[2]):
            yield {"head_dim": head_dim, "seq_len_q": 1, "q_block_size": 1, "kv_block_size": 64, "page_size": 16, "max_seq_len_kv": 4100, **heads(8), **mask}
        yield {"head_dim": head_dim, "seq_len_q": 4, "q_block_size": 4, "kv_block_size": 64, "page_size": 64, "max_seq_len_kv": 4100, **heads(2), **MASKS[1]}
    yield {"lens": [0, 77, 0], "batch": 3}                              # padded batch slots
    yield {"lens": [5, 3], "page_size": 64, "kv_block_size": 128}       # shorter than a page and a block
    yield {"lens": [192, 64], "page_size": 64, "kv_block_size": 64}     # nothing ragged
    yield {"lens": [1, 17], "seq_len_q": 1}                             # a single key
    yield {"lens": [16, 130], "mask_type": "causal"}                    # as many queries as keys
    yield {"blocks_per_row": 0}                                         # no blocks at all
    yield {"blocks_per_row": 99}                                        # every block: dense attention
    yield {"k_magnitude": 8.0}                                          # one key dominates
    yield {"k_magnitude": 8.0, "mask_type": "causal"}
    yield {"sm_scale": 0.5}
    yield {"poison": float("inf"), "head_dim": 128}
    yield {"poison": float("-inf"), "mask_type": "causal", "bits": True}
    yield {"num_qo_heads": 40, "num_kv_heads": 5, "q_block_size": 1}    # head counts that are no power of two


def drawn(seed: int) -> dict[str, Any]:
    """One random call. Few number types, head sizes and masks, whose kernels take seconds to compile; everything that a run decides is free."""
    rng = random.Random(seed)
    q_block_size, group = rng.choice(PACKED)
    head_dim, dtype = rng.choice(((64, torch.float16), (128, torch.bfloat16)))
    seq_len_q = rng.choice((1, rng.randint(1, 40), q_block_size, q_block_size + rng.randint(1, q_block_size)))
    return {"batch": rng.randint(1, 3), "seq_len_q": seq_len_q, "head_dim": head_dim, "dtype": dtype, "q_block_size": q_block_size,
            "kv_block_size": rng.choice((16, 64, 192)), "page_size": rng.choice((16, 64, 128, 256)), "max_seq_len_kv": max(seq_len_q, rng.randint(1, 900)),
            "kv_layout": rng.choice(("tuple", "combined")), "page_table": rng.choice(("indptr", "block_tables")), "shared_pattern": rng.random() < 0.3,
            "padded_pages": rng.randint(0, 1), "strided_q": rng.random() < 0.3, "sm_scale": rng.choice((None, 0.2)), "seed": seed,
            **heads(group, rng.randint(1, 3)), **rng.choice((MASKS[0], MASKS[3]))}
