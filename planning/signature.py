"""Signatures: the facts of one operation that change the work built for it, and what planning asks of them.

A signature class is a frozen dataclass beside its operation, registered here so that a header on disk can
be read back without naming any operation.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from ..descriptor import SparseBlockDescriptor
from ..runtime.devices import DeviceFacts

_types: dict[str, type[Signature]] = {}


def register_signature(cls: type[Signature]) -> type[Signature]:
    """Class decorator: make `cls` known to `Signature.from_json` under its name."""
    _types[cls.__name__] = cls
    return cls


class Signature:
    """Base of every signature dataclass. Hashable; equal facts give an equal `key` in every process."""

    capacities: ClassVar[tuple[str, ...]] = ()      # fields that are upper bounds

    @property
    def label(self) -> str:
        """One short line for people."""
        raise NotImplementedError

    def lower(self) -> SparseBlockDescriptor:
        """The sparse-block descriptor of this signature."""
        raise NotImplementedError

    def bind(self, device: DeviceFacts, *args: Any, **kwargs: Any) -> Any:
        """Check one call's arguments against this signature, allocate absent outputs, return launch arguments
        with a `result`. Never copies to the host or synchronizes."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has, in this process or another: the facts, not what calls of this one left in it."""
        return self.facts()

    def facts(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        return {"type": type(self).__name__, **self.facts()}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Signature:
        """The signature `to_json` described. ValueError for an unknown type or field."""
        if not isinstance(data, dict) or not isinstance(data.get("type"), str):
            raise ValueError(f"signature: got {data!r:.80}; need an object with a type and its fields; write it with to_json()")
        data = dict(data)
        name = data.pop("type")
        if name not in _types:
            raise ValueError(f"type: got {name!r}; need one of {sorted(_types)}; import the operation that defines it")
        try:
            return _types[name](**data)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{name}: got {sorted(data)}; need its own fields; {error}") from error

    @cached_property
    def key(self) -> str:
        """sha256 of the canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def fits(self, other: Self) -> bool:
        """Whether a plan for this signature can run `other`: equal facts, capacities at least as large."""
        if type(self) is not type(other):
            return False
        mine, theirs = self.facts(), other.facts()
        return all(mine[n] >= theirs[n] if n in self.capacities else mine[n] == theirs[n] for n in mine)

    def size(self) -> tuple[int, ...]:
        """What "the smallest plan that fits" is ordered by."""
        return tuple(getattr(self, n) for n in self.capacities)

    def differences(self, other: Signature) -> dict[str, tuple[Any, Any]]:
        """The fields that differ, as (mine, theirs)."""
        mine, theirs = self.to_json(), other.to_json()
        return {n: (mine.get(n), theirs.get(n)) for n in {**mine, **theirs} if mine.get(n) != theirs.get(n)}

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)  # type: ignore[type-var]
