"""What PlanMissError says: the nearest cached signature, how it differs, and what to run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path

from ..runtime.devices import DeviceFacts
from .signature import Signature


def miss_text(signature: Signature, engine: str, device: DeviceFacts, cached: Iterable[Signature], root: Path | None) -> str:
    """Of a frozen store that holds plans of `cached`; `root` is its directory, None where it has none."""
    nearest = min((s for s in cached if type(s) is type(signature)), default=None, key=lambda s: (len(signature.differences(s)), s.label))
    text = f"signature: got {signature.label} for {engine} on {device.name}, which the frozen store does not hold; "
    if nearest is None:
        text += "need a plan built before freeze(), and the store holds none of this type; "
    else:
        differing = ", ".join(f"{n} {mine!r} (cached: {theirs!r})" for n, (mine, theirs) in signature.differences(nearest).items())
        text += f"nearest cached: {nearest.label}, differing in {differing or 'engine or device only'}; "
    text += "build it with store.build([signature]) before freeze()"
    return text if root is None else f"{text}, or: {_build_command(signature, engine, device, root)}"


def _build_command(signature: Signature, engine: str, device: DeviceFacts, root: Path) -> str:
    """What a shell in the checkout runs to write this one entry. bash or zsh for a device that is not here: its properties come with it."""
    if device.kind == "cpu" or device.index is not None:
        target = f"--device {device.torch_device}"
    else:
        target = "--device-props " + (f"<(echo {shlex.quote(device.properties)})" if device.properties else "FILE")
    signatures, where = shlex.quote(json.dumps([signature.to_json()])), shlex.quote(str(root.absolute()))
    return f"echo {signatures} | python scripts/build_plans.py - --store {where} --engine {engine} {target}"
