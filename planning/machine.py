"""What this machine can run: versions, devices, and each engine's verdict on a plain case of every operation."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.markup import escape

from ..runtime.devices import CPU, DeviceFacts, device_facts
from ..runtime.environment import versions
from ..runtime.files import untrusted
from .process_store import default_root
from .signature import Signature
from .support import ENGINES, verdict
from .tables import pairs_table, table_of


def machine_report(plain: Iterable[Signature]) -> dict[str, Any]:
    """Plain data for `env --json`. plain: one signature of each operation, which any engine of it would serve."""
    plain, store = list(plain), default_root() / "plans"
    return {
        "versions": {"python": platform.python_version(), "platform": platform.platform(), **versions()},
        "store": {"path": str(store), "not_used_because": untrusted(store)},
        "devices": [_device_report(facts, plain) for facts in _devices()],
    }


def _devices() -> list[DeviceFacts]:
    return [*(device_facts(i) for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)), CPU]


def _device_report(facts: DeviceFacts, plain: list[Signature]) -> dict[str, Any]:
    engines = {}
    for signature in plain:
        verdicts = {engine: verdict(engine, signature.lower(), facts) for engine in ENGINES}
        engines[type(signature).__name__] = {engine: {"usable": said.ok, "reason": said.reason} for engine, said in verdicts.items()}
    return {"device": str(facts.torch_device), **facts.identity(), "total_bytes": facts.total_bytes, "engines": engines}


def machine_tables(report: dict[str, Any]) -> RenderableType:
    """The same for a person."""
    known = {name: "not here" if version is None else version for name, version in report["versions"].items()}
    why_not = report["store"]["not_used_because"]
    warning = [f"The plan store is not used: {escape(why_not)}"] if why_not else []
    return Group(pairs_table(known | {"plan store": report["store"]["path"]}), *warning, *map(_device_table, report["devices"]))


def _device_table(device: dict[str, Any]) -> RenderableType:
    facts = {name: value for name, value in device.items() if name not in ("device", "engines", "kind") and value} if device["kind"] == "cuda" else {}
    table = table_of("operation", "engine", "usable", "why not", whole=("operation", "engine", "usable"))
    for operation, engines in device["engines"].items():
        for i, (engine, said) in enumerate(engines.items()):
            table.add_row(operation.removesuffix("Signature") if i == 0 else "", engine, "yes" if said["usable"] else "no", escape(said["reason"]))
    return Group(f"\n[bold]{escape(device['device'])}[/bold]", *([pairs_table(facts)] if facts else []), table)
