"""What planning asks of an engine.

`compile` needs no GPU: it makes everything that can be kept in a file. `load` turns that into something
that launches on a device that is present. A build is the one, then the other, so that a plan made ahead
of time and a plan made here run the same bytes.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..descriptor import SparseBlockDescriptor
from ..runtime.cubins import CubinCache
from ..runtime.devices import DeviceFacts


@dataclass(frozen=True, slots=True)
class Compiled:
    """A built plan as data: `facts` for people and `describe()`, `parts` the bytes that are loaded."""

    facts: dict[str, Any]
    parts: dict[str, bytes] = field(default_factory=dict)

    def payload(self) -> bytes:
        """The parts as one byte string: a JSON index behind its length, then the parts in order."""
        index = json.dumps({name: len(part) for name, part in self.parts.items()}).encode()
        return struct.pack("<Q", len(index)) + index + b"".join(self.parts.values())

    @staticmethod
    def parts_of(payload: bytes) -> dict[str, bytes]:
        (size,) = struct.unpack_from("<Q", payload)
        at, parts = 8 + size, {}
        for name, length in json.loads(payload[8:at]).items():
            parts[name] = payload[at:at + length]
            at += length
        return parts


class Executable(Protocol):
    """A loaded plan. Immutable; may be launched from any thread and stream."""

    workspace_bytes: int

    def launch(self, arguments: Any, workspace: int, stream: int) -> None:
        """Launch on the raw `stream` of the plan's device, which is current. `workspace`: a device pointer."""


class Engine(Protocol):
    name: str

    def compile(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, cubins: CubinCache) -> Compiled: ...

    def load(self, descriptor: SparseBlockDescriptor, device: DeviceFacts, compiled: Compiled) -> Executable: ...

    def source_digest(self, descriptor: SparseBlockDescriptor, device: DeviceFacts) -> str:
        """sha256 of the sources a plan would be compiled from now; another digest on disk is a miss."""
