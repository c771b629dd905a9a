"""Inputs of packed query-sparse attention, shared by the CPU and the GPU tests."""

from __future__ import annotations

import random

import torch

from cudnn_graphs.ops.qsa_metadata import QsaMetadata, build_qsa_metadata

HEAD_PAIRS = ((12, 1), (24, 2), (6, 1), (3, 1))


def qkv(total, heads=(12, 1), seed=0, device="cpu", magnitude=1.0):
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(total, h, 256, generator=gen) for h in (heads[0], heads[1], heads[1]))
    return tuple(x.to(torch.bfloat16).to(device) for x in (q * magnitude, k, v))


def packed_batch(sequences, longest, seed=0, causal=True):
    """Metadata of sequences whose lengths take every remainder mod 4."""
    rng = random.Random(seed)
    ends = [0]
    for i in range(sequences):
        ends.append(ends[-1] + 4 * rng.randrange(max(longest // 4, 1)) + 1 + i % 4)
    return build_qsa_metadata(ends, causal=causal)


def random_bitmap(metadata, density, seed=0, tail=True):
    """Independent bits, any nonzero byte for a set one; `tail` also sets the block that holds hi."""
    gen = torch.Generator().manual_seed(seed)
    total, blocks = metadata.lo.numel(), metadata.block_first.numel()
    bits = torch.rand(total, blocks, generator=gen) < density
    if tail:
        bits |= (metadata.block_first <= metadata.hi[:, None]) & (metadata.block_last >= metadata.hi[:, None])
    return bits * torch.randint(1, 256, bits.shape, generator=gen, dtype=torch.uint8)


def correlated_bitmap(metadata, top_k, rho=0.99, seed=0):
    """Neighbouring queries choose alike: scores follow an AR(1) process along the tokens."""
    from cudnn_graphs.ops.qsa_metadata import select_qsa_blocks
    gen = torch.Generator().manual_seed(seed)
    noise = torch.randn(metadata.lo.numel(), metadata.block_first.numel(), generator=gen)
    noise[1:] *= (1 - rho * rho) ** 0.5
    for t in range(1, noise.shape[0]):
        noise[t] += rho * noise[t - 1]
    return select_qsa_blocks(noise, metadata, top_k)


def bitmap_indices(sel_blocks, metadata, width, seed=0):
    """The same selections as token ids: groups of four in random order, -1 for what a block lacks and for the rest."""
    rng = random.Random(seed)
    rows = []
    for t, row in enumerate(sel_blocks):
        low, high = max(int(metadata.lo[t]), 0), min(int(metadata.hi[t]), t)
        groups = []
        for b in torch.nonzero(row).flatten().tolist():
            first, last = int(metadata.block_first[b]), int(metadata.block_last[b])
            groups.append([k if low <= k <= high and k <= last else -1 for k in range(first, first + 4)])
        groups += [[-1] * 4] * (width // 4 - len(groups))
        rng.shuffle(groups)
        rows.append(sum(groups, [])[:width])
    return torch.tensor(rows, dtype=torch.int32)


def cut_windows(metadata: QsaMetadata, seed=0) -> QsaMetadata:
    """Windows that cut blocks, are empty, end in another sequence, or leave the batch on either side."""
    total = metadata.lo.numel()
    cut = torch.randint(0, total, (total,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    lo = torch.where(cut % 3 == 0, torch.minimum(cut, metadata.hi), metadata.lo)
    hi = torch.where(cut % 5 == 0, cut + 7, metadata.hi)
    lo[0], hi[-1], hi[total // 2] = -9, 2**31 - 1, -1
    return metadata._replace(lo=lo, hi=hi)


def misaligned(x: torch.Tensor, by: int) -> torch.Tensor:
    """A copy that starts `by` elements into its buffer."""
    return torch.cat([x.new_zeros(by), x.flatten()])[by:].view(x.shape)
