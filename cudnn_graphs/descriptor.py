"""The sparse-block descriptor: the one internal type that every operation lowers to.

Engines, the support table and the cuDNN graph builder read this and never the operation. A new
operation is a new descriptor, not a new stack.

A *row* is the unit that owns one list of KV spans; a *span* is a run of consecutive KV tokens that the
list names by one id. The four groups of fields say what a row is, how its spans are listed, how a span
maps to memory, and which masks apply inside it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

Row = Literal["q_block", "token"]
Listing = Literal["csr", "padded", "bitmap", "token_ids"]
Memory = Literal["paged", "strided", "packed"]
Mask = Literal["length", "causal", "valid_bits", "block_sizes", "window"]
DType = Literal["bfloat16", "float16", "int8", "float8_e4m3fn"]

ITEM_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class SparseBlockDescriptor:
    """Every fact about one sparse attention that changes the work built for it.

    batch_size, max_seq_len_kv and max_spans_per_row are capacities: a plan built for this descriptor
    runs anything smaller. Sizes are tokens and elements, never bytes. A size of None is a run-time size.
    """

    # What a row is: (request, KV head, block of query tokens), or one query token.
    row: Row
    batch_size: int
    seq_len_q: int | None
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    q_block_size: int

    # How a row's spans are listed.
    listing: Listing
    span_tokens: int                    # tokens per id: the KV block size, 4 in a QSA bitmap, 1 for token ids
    max_spans_per_row: int | None
    shared_pattern: bool = False        # one list serves all KV heads
    has_counts: bool = False            # padded lists: a count per row, else one count for all
    contiguous_spans: bool = False      # padded lists: only the last id is read

    # How a span maps to memory.
    memory: Memory = "strided"
    max_seq_len_kv: int | None = None
    page_size: int | None = None
    page_stride: int | None = None      # elements between pages; None: compact
    kv_layout: Literal["tuple", "combined"] = "tuple"
    page_table: Literal["indptr", "block_tables"] = "indptr"
    v_layout: Literal["same", "natural", "interleaved16"] = "same"   # "same": V is laid out as K

    # Which masks apply inside a span, and their ranks where they are tensors.
    masks: frozenset[Mask] = frozenset({"length"})
    block_sizes_rank: int | None = None

    # Numbers.
    qk_dtype: DType = "bfloat16"
    v_dtype: DType = "bfloat16"
    out_dtype: DType = "bfloat16"
    return_lse: bool = False
    assume_finite: bool = False         # bytes that no query sees are promised finite

    @property
    def kind(self) -> str:
        """The descriptor class that engines and the ranking table are keyed by, as in ``csr/paged``."""
        return f"{self.listing}/{self.memory}"

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def rows_per_head(self) -> int:
        """Rows of one (request, KV head); only where seq_len_q is known."""
        assert self.seq_len_q is not None
        return -(-self.seq_len_q // self.q_block_size)

    @property
    def packed_rows(self) -> int:
        """Query rows of one row: its query tokens, of which a short sequence has fewer than q_block_size, times the heads that share its list."""
        assert self.seq_len_q is not None
        return min(self.q_block_size, self.seq_len_q) * self.group

    @property
    def sub_page(self) -> int:
        """Tokens of the largest unit that tiles both a page and a block: a power of two from 8."""
        assert self.page_size is not None
        return math.gcd(self.page_size, self.span_tokens)

    def to_json(self) -> dict[str, object]:
        """Plain data, masks sorted, for headers and digests."""
        return asdict(self) | {"masks": sorted(self.masks), "kind": self.kind}
