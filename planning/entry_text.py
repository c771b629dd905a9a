"""What there is to say of one entry of a store, in words and before any layout: a terminal's tables and the HTML page say the same."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

KEY_SHOWN = 8                          # characters of a key that a table shows; any unambiguous prefix is accepted
TIMES = ("created", "last_used")       # seconds since the epoch

Section = Mapping[str, Any] | list[Mapping[str, Any]]       # fields, or items of which each has the same fields


def sections(row: Mapping[str, Any]) -> Iterable[tuple[str, Section]]:
    """(title, content): the plain fields under the entry's label, then each nested group, a list of kernels apart."""
    groups = {name: value for name, value in row.items() if isinstance(value, Mapping)}
    yield str(row["label"]), {name: value for name, value in row.items() if name not in groups and name != "label"}
    for name, group in groups.items():
        kernels = group.get("kernels")
        if isinstance(kernels, list) and kernels and all(isinstance(kernel, Mapping) for kernel in kernels):
            group = {inner: value for inner, value in group.items() if inner != "kernels"}
            yield "kernels", kernels
        if group:
            yield name, dict(leaves(group))


def leaves(value: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    """(dotted name, value) of everything inside nested dicts and lists of dicts."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for i, item in enumerate(value):
            yield from leaves(item, f"{name}.{item.get('role', i) if isinstance(item, Mapping) else i}")
    else:
        yield name, value


def columns(items: list[Mapping[str, Any]]) -> list[str]:
    """The fields of a list's items: the words first, then the figures."""
    return sorted(dict.fromkeys(name for item in items for name in item), key=lambda name: (name != "role", not isinstance(items[0].get(name), str)))


def text(name: str, value: Any) -> str:
    """A field's value in words."""
    if name in TIMES and value is not None:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(text("", item) for item in value) or "none"
    return "none" if value == {} else str(value)


def count(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def size(n: int) -> str:
    return f"{n} B" if n < 1000 else f"{n / 1e3:.0f} kB" if n < 1_000_000 else f"{n / 1e6:.1f} MB"


def seconds(taken: float) -> str:
    value, unit = (1e3 * taken, "ms") if taken < 0.1 else (taken, "s")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def age(created: float) -> str:
    passed = max(0.0, time.time() - created)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= length:
            return f"{passed / length:.0f} {unit}"
    return f"{passed:.0f} s"
