"""What a signature remembers of the calls that passed its checks, so that the next call of an equal structure skips them."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add
from typing import Any

import torch

from ..runtime.devices import DeviceFacts
from .checks import span_bytes

Structure = tuple[Any, ...]
_MOST = 256             # of anything that is kept, so that varying shapes and addresses cannot grow it


@dataclass(slots=True)
class _Known:
    """One structure that passed every check: the bytes that each output and input spans, and addresses at which no output met another part."""

    spans: tuple[int, ...]
    apart: set[tuple[int, ...]] = field(default_factory=set)


@dataclass(slots=True)
class Call:
    """One call, looked up. Its parts are its outputs, its inputs, then its vectors."""

    structure: Structure | None     # None where a value is no tensor: then only the checks can say what is wrong
    past: _Known | None
    outputs: int
    addresses: list[int]
    vector_bytes: list[int]

    @property
    def known(self) -> bool:
        """Whether an equal call passed every check that does not depend on addresses."""
        return self.past is not None

    def apart(self) -> bool:
        """Whether it is known, and no output's address range meets another part's: then no check is left."""
        if self.past is None:
            return False
        places = (*self.addresses, *self.vector_bytes)
        if places in self.past.apart:
            return True
        ranges = [*zip(self.addresses, map(add, self.addresses, (*self.past.spans, *self.vector_bytes)))]
        for i, (begin, end) in enumerate(ranges[:self.outputs]):
            if any(other_begin < end and begin < other_end for j, (other_begin, other_end) in enumerate(ranges) if i != j):
                return False
        if len(self.past.apart) >= _MOST:
            self.past.apart.clear()
        self.past.apart.add(places)
        return True


class KnownCalls:
    """The structures of calls that passed."""

    def __init__(self) -> None:
        self._known: dict[Structure, _Known] = {}

    def look(self, device: DeviceFacts, outputs: tuple[Any, ...], inputs: tuple[Any, ...], vectors: tuple[Any, ...] = ()) -> Call:
        """Read all about the tensors that the checks look at, except addresses beyond alignment: equal structures pass alike.

        0.8 us a tensor on the host of 2 cores, where the checks of a paged call take 40. The length of `vectors` is left out, since it
        varies from call to call.
        """
        parts: list[Any] = [device.kind, device.index]
        addresses: list[int] = []
        vector_bytes: list[int] = []
        for value in (*outputs, *inputs):
            if value is None:
                parts.append(None)
                addresses.append(0)
            elif isinstance(value, torch.Tensor):
                address = value.data_ptr()
                parts.append((value.dtype, value.device, value.shape, value.is_contiguous() or value.stride(), address & 15))
                addresses.append(address)
            else:
                return Call(None, None, 0, [], [])
        for value in vectors:
            if value is None:
                parts.append(None)
                addresses.append(0)
                vector_bytes.append(0)
            elif isinstance(value, torch.Tensor) and value.dim() == 1:
                parts.append((value.dtype, value.device, value.is_contiguous()))
                addresses.append(value.data_ptr())
                vector_bytes.append(value.nbytes)
            else:
                return Call(None, None, 0, [], [])
        structure = tuple(parts)
        return Call(structure, self._known.get(structure), len(outputs), addresses, vector_bytes)

    def remember(self, call: Call, outputs: tuple[Any, ...], inputs: tuple[Any, ...]) -> None:
        """Keep the structure of a call that passed."""
        if call.structure is not None and not call.known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[call.structure] = _Known(tuple(0 if value is None else span_bytes(value) for value in (*outputs, *inputs)))
