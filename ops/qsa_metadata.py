"""What packed query-sparse attention is told about a batch, and how block scores become its bitmap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..errors import problem
from . import checks

BLOCK_TOKENS = 4
_CHUNK_ELEMENTS = 1 << 24       # scores sorted at once: bounds the temporaries at T = 131072 to a few hundred MB


class QsaMetadata(NamedTuple):
    """One packed batch: T tokens of all sequences end to end, cut into NB blocks. Splat it into `qsa_forward`.

    Every sequence starts a new block, so its last block holds 1 to 4 tokens. All int32, contiguous.
    """

    lo: torch.Tensor            # [T] first token that query t may attend
    hi: torch.Tensor            # [T] last token that it may attend
    blk_base: torch.Tensor      # [T] first block of its sequence
    tok_base: torch.Tensor      # [T] first token of its sequence
    block_first: torch.Tensor   # [NB] first token of block b
    block_last: torch.Tensor    # [NB] its last token


def build_qsa_metadata(cu_seqlens: torch.Tensor | Sequence[int], *, causal: bool = True) -> QsaMetadata:
    """The metadata of one packed batch.

    cu_seqlens: [B + 1] cumulative sequence lengths in tokens, from 0, int32 or int64, or a list of ints. The result
    lies on its device. causal: query t attends up to itself; otherwise up to the end of its sequence.
    The sizes of the result depend on the lengths, so a CUDA tensor is copied to the host once per call.
    Raises TypeError and ValueError.
    """
    checks.flag("causal", causal)
    ends = _cumulative(cu_seqlens)
    device = ends.device
    lengths = ends.diff()
    if bool((lengths < 0).any()) or int(ends[0]) != 0 or int(ends[-1]) < 1 or int(ends[-1]) > checks.INT32_MAX:
        raise ValueError(problem("cu_seqlens", ends.tolist()[:8], "0, then lengths summed up, to at least one token", "pass cumulative sequence lengths"))
    blocks = (lengths + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    block_starts = blocks.cumsum(0) - blocks
    per_token = torch.repeat_interleave(lengths)
    tok_base, last = ends[per_token], ends[per_token + 1] - 1
    per_block = torch.repeat_interleave(blocks)
    block_first = ends[per_block] + BLOCK_TOKENS * (torch.arange(per_block.numel(), device=device) - block_starts[per_block])
    block_last = torch.minimum(block_first + BLOCK_TOKENS, ends[per_block + 1]) - 1
    hi = torch.arange(per_token.numel(), device=device) if causal else last
    fields = (tok_base, hi, block_starts[per_token], tok_base, block_first, block_last)
    return QsaMetadata(*(field.to(torch.int32, copy=True) for field in fields))


def _cumulative(cu_seqlens: Any) -> torch.Tensor:
    if not isinstance(cu_seqlens, torch.Tensor):
        if not isinstance(cu_seqlens, (list, tuple)) or any(isinstance(n, bool) or not isinstance(n, int) for n in cu_seqlens):
            raise TypeError(problem("cu_seqlens", type(cu_seqlens).__name__, "a tensor or a list of ints", "pass cumulative sequence lengths"))
        if any(abs(n) > checks.INT32_MAX for n in cu_seqlens):
            raise ValueError(problem("cu_seqlens", f"{max(cu_seqlens, key=abs)!s:.40}", f"at most {checks.INT32_MAX}", "token ids are 32-bit; split the batch"))
        cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int64)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(problem("cu_seqlens", cu_seqlens.dtype, "torch.int32 or torch.int64", "convert it with .to(torch.int32)"))
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(problem("cu_seqlens", f"shape {list(cu_seqlens.shape)}", "shape [B + 1], B at least 1", "pass cumulative sequence lengths"))
    return cu_seqlens.long()


def select_qsa_blocks(scores: torch.Tensor, metadata: QsaMetadata, top_k: int) -> torch.Tensor:
    """The bitmap of each query's best blocks: uint8 [T, NB].

    scores: floating point [T, NB]; what lies outside a query's own complete blocks is ignored. A query takes the
    `top_k` best of the blocks of its sequence that lie wholly within [lo, hi]; of equal scores the smaller block id
    first; NaN ranks with -inf, last. The block that holds token hi, the causal tail, is always set beside them.
    Never copies to the host. Raises TypeError and ValueError.
    """
    checks.integer("top_k", top_k)
    checks.tensor("scores", scores)
    if not isinstance(metadata, QsaMetadata):
        raise TypeError(problem("metadata", type(metadata).__name__, "a QsaMetadata", "pass what build_qsa_metadata returned"))
    tokens, blocks = metadata.lo.numel(), metadata.block_first.numel()
    if not scores.is_floating_point():
        raise TypeError(problem("scores", scores.dtype, "a floating point tensor", "convert it with .float()"))
    if scores.shape != (tokens, blocks) or scores.device != metadata.lo.device:
        raise ValueError(problem("scores", f"{list(scores.shape)} on {scores.device}", f"[{tokens}, {blocks}] on {metadata.lo.device}",
                                 "score every query against every block of its batch"))
    selected = torch.empty((tokens, blocks), dtype=torch.uint8, device=scores.device)
    rows = max(_CHUNK_ELEMENTS // blocks, 1)
    for begin in range(0, tokens, rows):
        part = slice(begin, min(begin + rows, tokens))
        _select_rows(selected[part], scores[part], metadata, part, top_k)
    return selected


def _select_rows(selected: torch.Tensor, scores: torch.Tensor, metadata: QsaMetadata, part: slice, top_k: int) -> None:
    lo, hi, blk_base, tok_base = (field[part, None] for field in metadata[:4])
    first, last = metadata.block_first, metadata.block_last
    hi = hi.clamp(max=metadata.lo.numel() - 1)
    block = torch.arange(first.numel(), device=scores.device)
    complete = (block >= blk_base) & (first >= lo) & (first + (BLOCK_TOKENS - 1) <= hi) & (last - first == BLOCK_TOKENS - 1)
    least = torch.finfo(scores.dtype).min
    ranked = scores.nan_to_num(nan=least, posinf=float("inf"), neginf=least).masked_fill(~complete, float("-inf"))
    best, order = torch.sort(ranked, dim=-1, descending=True, stable=True)
    selected.zero_().scatter_(1, order[:, :top_k], (best[:, :top_k] > float("-inf")).to(torch.uint8))
    tail = (first <= hi) & (last >= hi) & (hi >= lo)
    selected |= tail.to(torch.uint8)
