"""A look at the live values of one paged call: one pass over them where they lie, one small copy to the host."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from ..arguments import PagedArguments
from ..runtime.cubins import CubinCache
from ..runtime.devices import DeviceFacts
from ..runtime.nvrtc import KernelSource
from ..runtime.streams import current_raw_stream, on_device
from .paged_launch import pack_params

FAULTS = ("page_id", "length", "page_table", "block_indptr", "block_id", "block_order")     # strongest first
NONE = 0xFFFF_FFFF_FFFF_FFFF

SOURCE = KernelSource(
    entry="inspect_paged_values",
    text='#include "portable/inspect_paged.cuh"\n'
         'extern "C" __global__ void inspect_paged_values(const __grid_constant__ PagedParams p, u64* words) { inspect_paged(p, words); }\n',
    threads=128)


@dataclass(frozen=True, slots=True)
class Inspection:
    """The widest row, and the strongest fault if there is one: its kind, the request or flat row, the value."""

    widest_row: int
    fault: str | None = None
    where: int = 0
    value: int = 0

    @classmethod
    def of(cls, words: list[int]) -> Inspection:
        widest = 0xFFFF_FFFF - words[0] if words[0] != NONE else 0
        for fault, word in zip(FAULTS, words[1:]):
            if word != NONE:
                where, value = word >> 32, word & 0xFFFF_FFFF
                return cls(widest, fault, where, value - (1 << 32) if value >> 31 else value)
        return cls(widest)


def inspect_paged(arguments: PagedArguments, device: DeviceFacts, cubins: CubinCache) -> Inspection:
    """Inspect a bound call. Copies 56 bytes to the host, so it waits for the caller's stream."""
    if device.kind == "cpu":
        return Inspection.of(_inspect_on_cpu(arguments))
    words = torch.full((1 + len(FAULTS),), -1, dtype=torch.int64, device=device.torch_device)
    warps = arguments.q.shape[0] + arguments.block_indptr.shape[0] * arguments.block_indptr.shape[1] * (arguments.block_indptr.shape[2] - 1)
    with on_device(device):
        cubins.loaded(SOURCE, device).launch((-(-warps // 4), 1, 1), (pack_params(arguments), struct.pack("<Q", words.data_ptr())), current_raw_stream(device))
    return Inspection.of([w & NONE for w in words.tolist()])


def _inspect_on_cpu(a: PagedArguments) -> list[int]:
    """The kernel's own words, by numpy: see kernels/portable/inspect_paged.cuh."""
    words = [NONE] * (1 + len(FAULTS))

    def report(fault: str, where: int, value: int) -> None:
        slot = 1 + FAULTS.index(fault)
        words[slot] = min(words[slot], where << 32 | int(value) & 0xFFFF_FFFF)

    lens, indptr, blocks = a.seq_lens.numpy(), a.block_indptr.numpy(), a.block_indices.numpy()
    pages, offsets = a.pages.numpy(), None if a.page_indptr is None else a.page_indptr.numpy()
    for b, length in enumerate(lens.tolist()):
        if not (max(a.q.shape[1], 1) if a.causal else 1) <= length <= a.max_seq_len_kv:
            report("length", b, length)
        if offsets is None:
            listed = pages[b]
        else:
            first, last = int(offsets[b]), int(offsets[b + 1])
            broken = first < 0 or last < first or last > pages.size or (b == 0 and first != 0)
            if broken:
                report("page_table", b, last)
            listed = pages[:0] if broken else pages[first:last]
        live = -(-max(length, 0) // a.k.shape[2])
        if live > listed.size:
            report("page_table", b, listed.size)
        for page in listed[:live][(listed[:live] < 0) | (listed[:live] >= a.k.shape[0])].tolist():
            report("page_id", b, page)
    begins, ends = indptr[..., :-1].reshape(-1), indptr[..., 1:].reshape(-1)
    rows_per_request = begins.size // len(lens)
    widest = 0
    for flat, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist())):
        if begin < 0 or end < begin or end > blocks.size:
            report("block_indptr", flat, end)
            continue
        widest = max(widest, end - begin)
        row = blocks[begin:end].astype(np.int64)
        for block in row[(row < 0) | (row * a.kv_block_size >= lens[flat // rows_per_request])].tolist():
            report("block_id", flat, block)
        for block in row[1:][np.diff(row) <= 0].tolist():
            report("block_order", flat, block)
    words[0] = 0xFFFF_FFFF - widest if begins.size else NONE
    return words
