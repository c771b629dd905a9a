"""Parts exchanged through memory that the GPUs of one host share: written into every rank's inbox and merged as they arrive, by one kernel.

The memory is torch.distributed's symmetric memory. No second kernel, no barrier, no fence (kernels/portable/exchange_parts.cuh): between two
H200s the parts of a decoding step, half a megabyte, take 5.8 us with their merge where NCCL's all-gather and the merge take 14.0.
"""

from __future__ import annotations

import math
import socket
from typing import Any

import torch
import torch.distributed as dist

from ..engines.shard_kernels import MAX_EXCHANGE_RANKS, Inboxes, exchange_parts
from ..runtime.cubins import CubinCache
from ..runtime.devices import DeviceFacts
from .gathered_parts import PartLayout

LARGEST_PART = 8 << 20          # bytes; larger ones are gathered: their inboxes would cost 2 * ranks times as much memory


class PeerParts:
    """This rank's part, to be written into `out` and `lse` (uint8 `storage` holds it), and the way to all others'."""

    def __init__(self, layout: PartLayout, device: DeviceFacts, inboxes: Inboxes, storage: torch.Tensor) -> None:
        self.layout, self.device, self.inboxes = layout, device, inboxes
        self.mine = storage[:layout.nbytes]
        self.out, self.lse = layout.views(self.mine)

    def merge_into(self, out: torch.Tensor, lse: torch.Tensor | None, cubins: CubinCache) -> None:
        """Send, receive and merge, as `GatheredParts.merge_into`, to the same bits. Collective."""
        exchange_parts(self.mine, self.layout.lse_offset, self.inboxes, out, lse, self.device, cubins)


def open_inboxes(layout: PartLayout, device: DeviceFacts, group: Any) -> Inboxes | str:
    """Inboxes for parts of up to `layout` on every rank of `group`, or on all of them why there are none. Collective, waits for the device."""
    world = dist.get_world_size(group)
    if device.kind != "cuda":
        return "the parts are in host memory"
    if not 1 < world <= MAX_EXCHANGE_RANKS:
        return f"{world} ranks; peer memory serves 2 to {MAX_EXCHANGE_RANKS}"
    if layout.nbytes > LARGEST_PART:
        return f"parts of {layout.nbytes} bytes; peer memory serves up to {LARGEST_PART}"
    places = gather_objects((socket.gethostname(), str(torch.cuda.get_device_properties(device.index).uuid)), group, device)  # type: ignore[attr-defined]
    if len({host for host, _ in places}) > 1 or len(set(places)) < world:
        return "the ranks are not on GPUs of their own in one host"
    with torch.cuda.device(device.index):
        try:
            inboxes, failed = _rendezvous(layout, device, dist.group.WORLD if group is None else group), ""
        except Exception as error:  # noqa: BLE001 - an older torch, no peer access, another allocator: whatever it is, NCCL serves
            inboxes, failed = None, f"no symmetric memory: {type(error).__name__}: {error}".splitlines()[0]
        torch.cuda.synchronize(device.index)
    reasons = list(filter(None, gather_objects(failed, group, device)))       # also: nobody sends before all inboxes are empty
    return reasons[0] if reasons or inboxes is None else inboxes


def _rendezvous(layout: PartLayout, device: DeviceFacts, group: Any) -> Inboxes:
    from torch.distributed import _symmetric_memory as symmetric
    world, items = dist.get_world_size(group), math.prod(layout.lse_shape)
    memory = symmetric.empty(2 * world * layout.nbytes, dtype=torch.uint8, device=device.torch_device)
    handle = symmetric.rendezvous(memory, group)
    views = [handle.get_buffer(rank, (memory.numel(),), torch.uint8) for rank in range(world)]
    memory.fill_(0xff)
    turns = torch.zeros(Inboxes.ctas(items, device), dtype=torch.int32, device=device.torch_device)
    return Inboxes(tuple(view.data_ptr() for view in views), dist.get_rank(group), turns, layout.nbytes, layout.lse_offset, (memory, handle, views))


def gather_objects(mine: Any, group: Any, device: DeviceFacts) -> list[Any]:
    """What every rank of `group` has, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    if device.kind == "cuda":
        with torch.cuda.device(device.index):
            dist.all_gather_object(everyone, mine, group=group)
    else:
        dist.all_gather_object(everyone, mine, group=group)
    return everyone
