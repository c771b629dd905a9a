"""Sage attention over a small video-like latent: tokens in 3-D tiles, quantized, each tile attends to the tiles that score best.

A tile of 4 x 4 x 4 tokens is one block of 64. What is near in space and time is then near in the blocks too, which is what
makes a few blocks enough.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from demo_exact import error
from demo_picture import save_panels
from demo_timing import timed
from rich.console import Console

from cudnn_graphs import Plan, SageBlockSparseSignature, quantize_sage_qkv, select_blocks
from cudnn_graphs.planning.tables import table_of

FRAMES, HEIGHT, WIDTH, CHANNELS = 8, 16, 24, 64
TILE, BLOCK, HEADS, HEAD_DIM = 4, 64, 2, 128
TOKENS = FRAMES * HEIGHT * WIDTH
BLOCKS = TOKENS // BLOCK
SELECTIONS = {"8 blocks": dict(top_k=8), "16 blocks": dict(top_k=16), "90% of the score": dict(top_p=0.9), "all blocks": dict(top_k=BLOCKS)}
PICTURED = "8 blocks"

# One plan for every selection: the capacity is the most that a row may list, the counts say how many it does.
SIGNATURE = SageBlockSparseSignature(batch_size=1, num_heads=HEADS, seq_len_q=TOKENS, seq_len_k=TOKENS, capacity=BLOCKS, has_counts=True)


def demo_sage(plan: Plan, console: Console, picture: Path) -> None:
    device = plan.device.torch_device
    q, k, v = (x.to(device) for x in latent_qkv())
    full, mass = exact(q, k, v)
    sage, milliseconds = timed(device, lambda: quantize_sage_qkv(q, k, v))
    console.print(f"\nSage attention over a video-like latent of {FRAMES} x {HEIGHT} x {WIDTH} tokens, {HEADS} heads of {HEAD_DIM}; "
                  f"quantized to int8 and FP8 in {milliseconds:.2f} ms; engine {plan.engine}.")
    figures = ("keys read", "ms", "same keys", "all keys", "random")
    table = table_of("selected", *figures, right=figures, whole=("selected",))
    for name, limit in SELECTIONS.items():
        blocks, counts = select_blocks(q, k, block_size=BLOCK, **limit)
        out, milliseconds = timed(device, lambda blocks=blocks, counts=counts: plan.run(*sage[:6], blocks, 0, None, counts))
        by_chance = plan.run(*sage[:6], torch.rand(1, HEADS, BLOCKS, BLOCKS, device=device).argsort(-1).int(), 0, None, counts)
        selected = block_map(blocks, counts)
        same, _ = exact(q, k, v, selected)
        table.add_row(name, f"{float(selected.float().mean()):.0%}", f"{milliseconds:.2f}", f"{error(out, same):.1e}", f"{error(out, full):.3f}",
                      f"{error(by_chance, full):.3f}")
        if name == PICTURED:
            panels = {"attention of head 0 (square root)": (mass[0] / mass[0].amax()).sqrt(), f"selected: {name} a row": selected[0].float()}
            save_panels(picture, panels, "block of 64 keys", "block of 64 queries")
    console.print(table)
    console.print("Errors are relative L2 against attention over the tensors before quantization.")
    console.print(f"Head 0's map, its exact attention on the left, the {PICTURED} selected on the right: {picture}", soft_wrap=True)


def latent_qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v bf16 [1, HEADS, TOKENS, HEAD_DIM] of a latent that is smooth in space and time, tile by tile.

    Like those of real models, keys have a constant offset in a few channels; the quantizer's smooth_k takes it out.
    """
    gen = torch.Generator().manual_seed(0)
    coarse = torch.randn(1, CHANNELS, 3, 4, 6, generator=gen)
    latent = F.interpolate(coarse, size=(FRAMES, HEIGHT, WIDTH), mode="trilinear", align_corners=True)[0].permute(1, 2, 3, 0)
    latent = in_tiles(F.normalize(latent, dim=-1) * CHANNELS ** 0.5 + 0.2 * torch.randn(latent.shape, generator=gen))
    shared = torch.randn(HEADS, CHANNELS, HEAD_DIM, generator=gen) * CHANNELS ** -0.5
    q, k, v = (latent @ (a * shared + b * torch.randn(shared.shape, generator=gen) * CHANNELS ** -0.5) for a, b in ((0.8, 0.3), (0.8, 0.3), (0, 1)))
    k[..., :4] += 10
    return q[None].bfloat16(), k[None].bfloat16(), v[None].bfloat16()


def in_tiles(latent: torch.Tensor) -> torch.Tensor:
    """[FRAMES, HEIGHT, WIDTH, C] -> [TOKENS, C]: the 64 tokens of a tile one after the other."""
    tiled = latent.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE))
    return tiled.permute(0, 2, 4, 1, 3, 5, 6).flatten(0, 5)


def block_map(blocks: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """bool [HEADS, BLOCKS, BLOCKS]: what each row lists."""
    listed = torch.arange(blocks.shape[3], device=blocks.device) < counts[0, ..., None]
    chosen = torch.zeros(HEADS, BLOCKS, BLOCKS, dtype=torch.int32, device=blocks.device)
    return chosen.scatter_add_(2, blocks[0].long(), listed.int()) > 0


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, selected: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 attention over the selected blocks (None: all), and the share of it that each pair of blocks gets, [HEADS, BLOCKS, BLOCKS]."""
    outs, shares = [], []
    for h in range(HEADS):
        scores = q[0, h].float() @ k[0, h].float().mT * HEAD_DIM ** -0.5
        tiles = scores.view(BLOCKS, BLOCK, BLOCKS, BLOCK)
        if selected is not None:
            tiles.masked_fill_(~selected[h][:, None, :, None], float("-inf"))
        weights = scores.softmax(-1)
        outs.append(weights @ v[0, h].float())
        shares.append(weights.view(tiles.shape).sum((1, 3)) / BLOCK)
    return torch.stack(outs)[None], torch.stack(shares)
