"""Saving the demo's picture: with matplotlib where it is installed, else as a bare PNG."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch

INK = torch.tensor([24.0, 61.0, 102.0])         # the colour of 1; 0 is white
FRAME = 150                                     # the grey between panels
CELL, GAP = 8, 8                                # pixels


def save_panels(path: Path, panels: dict[str, torch.Tensor], x_label: str, y_label: str) -> None:
    """Panels [rows, columns] of values from 0 to 1, by title, side by side, row 0 on top. Text needs matplotlib."""
    try:
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
    except ImportError:
        path.write_bytes(_png(_pixels([*panels.values()])))
        return
    figure = Figure(figsize=(5 * len(panels), 5.4), layout="constrained")
    colours = LinearSegmentedColormap.from_list("ink", ["white", tuple((INK / 255).tolist())])
    for axes, (title, panel) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        axes.imshow(panel.cpu().numpy(), cmap=colours, vmin=0, vmax=1, interpolation="nearest")
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
    figure.savefig(path, format="png", dpi=120)


def _pixels(panels: list[torch.Tensor]) -> torch.Tensor:
    """uint8 [height, width, 3]."""
    coloured = []
    for panel in panels:
        cells = panel.float().cpu().repeat_interleave(CELL, 0).repeat_interleave(CELL, 1)
        inked = 255 + cells[..., None] * (INK - 255)
        coloured.append(torch.nn.functional.pad(inked, (0, 0, GAP, GAP, GAP, GAP), value=FRAME))
    return torch.cat(coloured, dim=1).round().to(torch.uint8)


def _png(pixels: torch.Tensor) -> bytes:
    """A PNG of uint8 [height, width, 3]: 8-bit RGB, no row filter."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.numpy().tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
