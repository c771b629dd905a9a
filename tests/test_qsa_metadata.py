"""build_qsa_metadata and select_qsa_blocks."""

import pytest
import torch

from cudnn_graphs.ops.qsa_metadata import build_qsa_metadata, select_qsa_blocks


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[1], [4], [5, 3, 8, 1, 6], [2, 0, 7]])
def test_metadata_against_a_plain_loop(lengths, causal):
    ends = [0]
    for n in lengths:
        ends.append(ends[-1] + n)
    got = build_qsa_metadata(torch.tensor(ends, dtype=torch.int32), causal=causal)
    lo, hi, blk_base, tok_base, first, last = [], [], [], [], [], []
    for start, end in zip(ends, ends[1:]):
        base = len(first)
        for block in range(start, end, 4):
            first.append(block)
            last.append(min(block + 4, end) - 1)
        for t in range(start, end):
            lo.append(start), hi.append(t if causal else end - 1), blk_base.append(base), tok_base.append(start)
    assert [x.tolist() for x in got] == [lo, hi, blk_base, tok_base, first, last]
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in got)
    assert got.lo.data_ptr() != got.tok_base.data_ptr()
    assert [x.tolist() for x in build_qsa_metadata(ends, causal=causal)] == [x.tolist() for x in got]


@pytest.mark.parametrize("bad, error", [
    ([1, 3], ValueError), ([0, 5, 3], ValueError), ([0], ValueError), ([0, 0], ValueError), ("04", TypeError), ([0, 2.0], TypeError),
    ([False, True], TypeError), (torch.tensor([0.0, 4.0]), TypeError), (torch.tensor([[0, 4]]), ValueError)])
def test_bad_lengths(bad, error):
    with pytest.raises(error, match="cu_seqlens"):
        build_qsa_metadata(bad)


def plain_selection(scores, metadata, top_k):
    selected = torch.zeros(scores.shape, dtype=torch.uint8)
    for t in range(scores.shape[0]):
        lo, hi = int(metadata.lo[t]), min(int(metadata.hi[t]), scores.shape[0] - 1)
        spans = list(zip(metadata.block_first.tolist(), metadata.block_last.tolist()))
        complete = [b for b, (f, n) in enumerate(spans) if f >= lo and n <= hi and n - f == 3 and b >= int(metadata.blk_base[t])]
        for b in sorted(complete, key=lambda b: (-scores[t, b].item(), b))[:top_k]:
            selected[t, b] = 1
        for b, (f, n) in enumerate(spans):
            if f <= hi <= n:
                selected[t, b] = 1
    return selected


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 1000])
def test_selection_with_ties(causal, top_k, monkeypatch):
    monkeypatch.setattr("cudnn_graphs.ops.qsa_metadata._CHUNK_ELEMENTS", 100)
    metadata = build_qsa_metadata([0, 21, 22, 45, 64], causal=causal)
    scores = torch.randint(0, 3, (64, metadata.block_first.numel()), generator=torch.Generator().manual_seed(1)).float()
    scores[:, 4] = float("-inf")
    assert torch.equal(select_qsa_blocks(scores, metadata, top_k), plain_selection(scores, metadata, top_k))


def test_selection_ranks_nan_last_and_ignores_what_it_may_not_see():
    metadata = build_qsa_metadata([0, 16])
    scores = torch.zeros(16, 4)
    scores[:, 0] = float("nan")
    scores[:, 3] = float("nan")
    scores[3, 1:] = float("inf")
    selected = select_qsa_blocks(scores, metadata, 1)
    assert selected[15].tolist() == [0, 1, 0, 1]
    assert selected[3].tolist() == [1, 0, 0, 0] and selected[2].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("scores, top_k, error", [
    (torch.zeros(16, 4), 0, ValueError), (torch.zeros(16, 4), True, TypeError), (torch.zeros(16, 5), 1, ValueError),
    (torch.zeros(16, 4, dtype=torch.int32), 1, TypeError), ([[0.0]], 1, TypeError)])
def test_bad_selection_arguments(scores, top_k, error):
    with pytest.raises(error):
        select_qsa_blocks(scores, build_qsa_metadata([0, 16]), top_k)
