"""Every way in which live values can make a row bad: what is broken, and which rows it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from paged_cases import PagedCase, by_query

Rows = set[tuple[int, int, int]]            # (request, KV head, row)
INT_MAX = 2**31 - 1
WIDTH = 3                                   # blocks of every row, and what the plan allows
METADATA = ("seq_lens", "page_indptr", "page_indices", "block_tables", "block_indptr", "block_indices")


def clean_case(mask_type: str = "dense", page_table: str = "indptr", **changes: Any) -> PagedCase:
    """Two requests of 90 and 75 tokens, one page a block, three rows of three blocks per KV head."""
    facts = dict(seq_len_q=24, q_block_size=8, kv_block_size=16, page_size=16, max_seq_len_kv=96, lens=[90, 75], blocks_per_row=WIDTH, seed=3)
    return PagedCase(**{**facts, **changes}, mask_type=mask_type, page_table=page_table).make()


def break_row(case: PagedCase, kind: str) -> tuple[PagedCase, Rows]:
    """A copy of a clean case with one fault in it, and the rows that are bad for it."""
    copies = {n: case.tensors[n].clone() for n in METADATA if case.tensors[n] is not None}
    broken = replace(case, tensors={**case.tensors, **copies})
    rows = KINDS[kind](broken)
    assert rows and len(rows) < case.batch * case.num_kv_heads * case.rows, f"{kind!r} breaks {len(rows)} rows"
    return broken, rows


def assert_only_bad_rows_changed(case: PagedCase, rows: Rows, clean: tuple[torch.Tensor, torch.Tensor], broken: tuple[torch.Tensor, torch.Tensor]) -> None:
    """`rows` are exact zeros with lse -inf; every other row has the clean run's bits."""
    group = case.num_qo_heads // case.num_kv_heads
    bad = torch.zeros(case.batch, case.seq_len_q, case.num_qo_heads, dtype=torch.bool)
    for b, h, r in rows:
        bad[b, r * case.q_block_size:(r + 1) * case.q_block_size, h * group:(h + 1) * group] = True
    bad = bad.flatten(0, 1)
    (out, lse), (clean_out, clean_lse) = ((o.cpu(), x.cpu()) for o, x in (by_query(*broken), by_query(*clean)))
    assert (out[bad] == 0).all(), f"bad rows are not zero: {int((out[bad] != 0).sum())} values"
    assert torch.isneginf(lse[bad]).all(), "the lse of bad rows is not -inf"
    assert torch.equal(out[~bad], clean_out[~bad]) and torch.equal(lse[~bad], clean_lse[~bad]), "rows that are not bad changed"


def _range_end(shift: Callable[[int, int], int]) -> Callable[[PagedCase], Rows]:
    """Move the end of request 1's last row; `shift` gets its begin and the number of ids."""
    def put(case: PagedCase) -> Rows:
        case.block_indptr[1, 1, -1] = shift(int(case.block_indptr[1, 1, -2]), case.block_indices.numel())
        return {(1, 1, case.rows - 1)}
    return put


def _range_begin(case: PagedCase) -> Rows:
    case.block_indptr[1, 0, 0] = -1
    return {(1, 0, 0)}


def _too_wide(case: PagedCase) -> Rows:
    """One id more than the plan allows, itself a legal one."""
    case.block_indptr[0, 0, -1] += 1
    return {(0, 0, case.rows - 1)}


def _id(value: int) -> Callable[[PagedCase], Rows]:
    def put(case: PagedCase) -> Rows:
        case.block_indices[int(case.block_indptr[0, 1, 1]) + 1] = value
        return {(0, 1, 1)}
    return put


def _page(block: int, value: int | None) -> Callable[[PagedCase], Rows]:
    """The page of one block of request 1. None: the first id past the cache."""
    def put(case: PagedCase) -> Rows:
        page = case.k_cache.shape[0] if value is None else value
        if case.block_tables is None:
            case.page_indices[int(case.page_indptr[1]) + block] = page
        else:
            case.block_tables[1, block] = page
        return rows_listing(case, 1, block, block)
    return put


def _page_list_too_short(case: PagedCase) -> Rows:
    if case.block_tables is None:
        case.page_indptr[2] = case.page_indptr[1] + 3
        return rows_listing(case, 1, 3, 99)
    case.tensors["block_tables"] = case.block_tables[:, :5]      # enough for request 1, not for request 0
    return rows_listing(case, 0, 5, 99)


def _page_list_end(value: int) -> Callable[[PagedCase], Rows]:
    def put(case: PagedCase) -> Rows:
        case.page_indptr[2] = value
        return rows_listing(case, 1, 0, 99)
    return put


def _length(value: int) -> Callable[[PagedCase], Rows]:
    def put(case: PagedCase) -> Rows:
        case.seq_lens[1] = value
        return {(1, h, r) for h in range(case.num_kv_heads) for r in range(case.rows)}
    return put


def rows_listing(case: PagedCase, b: int, first: int, last: int) -> Rows:
    """Rows of request b with a block in [first, last]."""
    found = set()
    for h in range(case.num_kv_heads):
        for r in range(case.rows):
            begin, end = case.block_indptr[b, h, r:r + 2].tolist()
            if any(first <= block <= last for block in case.block_indices[begin:end].tolist()):
                found.add((b, h, r))
    return found


INDPTR_KINDS: dict[str, Callable[[PagedCase], Rows]] = {
    "page list backwards": _page_list_end(0),
    "page list past the ids": _page_list_end(INT_MAX),
    "page list before the ids": _page_list_end(-5),
}
CAUSAL_KINDS: dict[str, Callable[[PagedCase], Rows]] = {"length below the queries": _length(23)}
KINDS: dict[str, Callable[[PagedCase], Rows]] = {
    "range past the ids": _range_end(lambda begin, total: total + 1),
    "range far past the ids": _range_end(lambda begin, total: INT_MAX),
    "range backwards": _range_end(lambda begin, total: begin - 1),
    "range far backwards": _range_end(lambda begin, total: -INT_MAX - 1),
    "range before the ids": _range_begin,
    "range too wide": _too_wide,
    "id negative": _id(-1),
    "id far negative": _id(-INT_MAX - 1),
    "id past the length": _id(6),
    "id far past the length": _id(INT_MAX),
    "page negative": _page(2, -1),
    "page past the cache": _page(2, None),
    "page far past the cache": _page(2, INT_MAX),
    "page of the ragged last block negative": _page(4, -1),
    "page of the ragged last block past the cache": _page(4, None),
    "page list too short": _page_list_too_short,
    "length negative": _length(-1),
    "length past the maximum": _length(97),
    "length far past the maximum": _length(INT_MAX),
    **INDPTR_KINDS, **CAUSAL_KINDS,
}


def kinds_of(mask_type: str, page_table: str) -> list[str]:
    return [k for k in KINDS if (k not in CAUSAL_KINDS or mask_type == "causal") and (k not in INDPTR_KINDS or page_table == "indptr")]
