"""What a signature remembers of the calls that passed its checks, so that the next call of an equal structure skips them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import Any

import torch

from ..memory import span_bytes
from ..runtime.devices import DeviceFacts

Structure = tuple[Any, ...]
_MOST_STRUCTURES, _MOST_PLACES = 256, 1024      # kept by one signature, about 0.5 MB each, so that varying shapes and addresses cannot grow it
_numbers = itertools.count()


@dataclass(slots=True)
class _Known:
    """One structure that passed every check: the bytes that each output and input spans, and its number, which no other ever has."""

    spans: tuple[int, ...]
    number: int


@dataclass(slots=True)
class Call:
    """One call, looked up. Its parts are its outputs, its inputs, then its vectors."""

    structure: Structure | None     # None where a value is no tensor with memory: then only the checks can say what is wrong
    past: _Known | None
    outputs: int
    addresses: list[int]
    vector_bytes: list[int]
    places: set[tuple[int, ...]]    # of every structure, behind its number: addresses at which no output met another part

    @property
    def known(self) -> bool:
        """Whether an equal call passed every check that does not depend on addresses."""
        return self.past is not None

    def apart(self) -> bool:
        """Whether it is known, and no output's address range meets another part's: then no check is left."""
        if self.past is None:
            return False
        if not any(self.addresses[:self.outputs]):      # none given: what is allocated now meets nothing
            return True
        place = (self.past.number, *self.addresses, *self.vector_bytes)
        if place in self.places:
            return True
        ranges = [*zip(self.addresses, map(add, self.addresses, (*self.past.spans, *self.vector_bytes)))]
        for i, (begin, end) in enumerate(ranges[:self.outputs]):
            if any(other_begin < end and begin < other_end for j, (other_begin, other_end) in enumerate(ranges) if i != j):
                return False
        if len(self.places) >= _MOST_PLACES:
            self.places.clear()
        self.places.add(place)
        return True


class KnownCalls:
    """The structures of calls that passed, of one signature. Its `bind`, where it validates, goes in this order: `look`; unless
    `known`, check the inputs; allocate what outputs are not given; unless `apart`, check the outputs and `remember`. A call that
    is never remembered is checked in full each time; one that is remembered before its last check is not checked again.
    """

    def __init__(self) -> None:
        self._known: dict[Structure, _Known] = {}
        self._places: set[tuple[int, ...]] = set()

    def look(self, device: DeviceFacts, outputs: tuple[Any, ...], inputs: tuple[Any, ...], vectors: tuple[Any, ...] = ()) -> Call:
        """Read all about the tensors that the checks look at, except addresses beyond alignment: equal structures pass alike.

        0.8 us a tensor on the host of 2 cores, where the checks of a paged call take 40. The length of `vectors` is left out, since it
        varies from call to call.
        """
        parts: list[Any] = [device.kind, device.index]
        addresses: list[int] = []
        vector_bytes: list[int] = []
        try:
            for value in (*outputs, *inputs):
                if value is None:
                    parts.append(None)
                    addresses.append(0)
                elif isinstance(value, torch.Tensor):
                    address = value.data_ptr()
                    # no address: empty, or its storage was freed under it
                    parts.append((value.dtype, value.device, value.shape, value.is_contiguous() or value.stride(), address & 15 if address else None))
                    addresses.append(address)
                else:
                    return self._unknown()
            for value in vectors:
                if value is None:
                    parts.append(None)
                    addresses.append(0)
                    vector_bytes.append(0)
                elif isinstance(value, torch.Tensor) and value.dim() == 1:
                    address, nbytes = value.data_ptr(), value.nbytes
                    parts.append((value.dtype, value.device, value.is_contiguous(), bool(address or not nbytes)))
                    addresses.append(address)
                    vector_bytes.append(nbytes)
                else:
                    return self._unknown()
        except RuntimeError:        # torch's own, of a tensor without memory: sparse, nested
            return self._unknown()
        structure = tuple(parts)
        return Call(structure, self._known.get(structure), len(outputs), addresses, vector_bytes, self._places)

    def _unknown(self) -> Call:
        return Call(None, None, 0, [], [], self._places)

    def remember(self, call: Call, outputs: tuple[Any, ...], inputs: tuple[Any, ...]) -> None:
        """Keep the structure of a call that passed."""
        if call.structure is not None and not call.known:
            if len(self._known) >= _MOST_STRUCTURES:
                self._known.clear()
            spans = tuple(0 if value is None else span_bytes(value) for value in (*outputs, *inputs))
            self._known[call.structure] = _Known(spans, next(_numbers))


class RemembersCalls:
    """A signature with KnownCalls of its own."""

    @cached_property
    def _passed(self) -> KnownCalls:
        return KnownCalls()
