"""Looking at a plan store from a shell: list, show, verify, diff, clear. From headers alone: no GPU, nothing loaded.

Behind both `python -m cudnn_graphs plans` and `python scripts/inspect_plans.py`. A person gets tables, `--json` a
program's answer. Exit status: 0; 1 where `verify` found damage; 2 for a key that names no entry, or several.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .disk import DiskEntry, PlanDirectory
from .store import default_root
from .tables import pairs_table, table_of, text

KEY_SHOWN = 8       # characters of a key that a table shows; any unambiguous prefix is accepted


class UnknownKeyError(Exception):
    """A key that names no entry, or more than one."""


def main(arguments: list[str] | None = None) -> int:
    """The command line of `scripts/inspect_plans.py`. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_commands(parser)
    return run(parser.parse_args(arguments))


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands to `parser`; `run` carries out what it parsed."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")
    common.add_argument("--store", metavar="DIR", type=Path, help="the store's directory; default: $CUDNN_GRAPHS_CACHE_DIR/plans or the user's cache")
    commands = parser.add_subparsers(dest="plans_command", required=True, metavar="COMMAND")
    commands.add_parser("list", parents=[common], help="every entry, newest first").set_defaults(carry_out=_list)
    show = commands.add_parser("show", parents=[common], help="everything that is known of one entry")
    show.add_argument("key", metavar="KEY", help="a key or the start of one")
    show.set_defaults(carry_out=_show)
    commands.add_parser("verify", parents=[common], help="read every byte; exit 1 if any entry is damaged").set_defaults(carry_out=_verify)
    diff = commands.add_parser("diff", parents=[common], help="the fields in which two entries differ")
    diff.add_argument("a", metavar="A")
    diff.add_argument("b", metavar="B")
    diff.set_defaults(carry_out=_diff)
    commands.add_parser("clear", parents=[common], help="delete every entry").set_defaults(carry_out=_clear)


def run(options: argparse.Namespace) -> int:
    """Carry out a parsed command. Returns the exit status."""
    root = default_root() / "plans" if options.store is None else options.store.expanduser()
    directory = PlanDirectory(root, max_entries=0, max_bytes=0)     # bounds are a writer's; nothing is written here
    carry_out: Callable[[PlanDirectory, argparse.Namespace], int] = options.carry_out
    try:
        return carry_out(directory, options)
    except UnknownKeyError as error:
        print(error, file=sys.stderr)
        return 2


def plans_table(entries: Iterable[Mapping[str, Any]]) -> Table:
    """A table of entries as `PlanStore.entries()` gives them, for 80 columns and more."""
    figures = ("size", "build", "age", "hits")
    table = table_of("key", "plan", "engine, device", *figures, right=figures, whole=("key",))
    for entry in entries:
        table.add_row(entry["key"][:KEY_SHOWN], escape(entry["label"]), f"{entry['engine']}, {escape(entry['device']['name'])}", _size(entry["payload_bytes"]),
                      _seconds(entry["build_seconds"]), _age(entry["created"]), str(entry["hits"]))
    return table


# -- commands ------------------------------------------------------------------------------------------


def _list(directory: PlanDirectory, options: argparse.Namespace) -> int:
    rows = sorted(map(_row, directory.entries()), key=lambda row: -row["created"])
    damaged = len(directory.keys()) - len(rows)
    if options.json:
        return _print_json(rows)
    console = _console()
    if rows:
        console.print(plans_table(rows))
    console.print(f"{_count(len(rows), 'plan')} in {directory.root}", soft_wrap=True)
    if damaged:
        console.print(f"{_count(damaged, 'entry is', 'entries are')} damaged and will be built anew; see verify")
    return 0


def _show(directory: PlanDirectory, options: argparse.Namespace) -> int:
    row = _find(directory, options.key)
    if options.json:
        return _print_json(row)
    console = _console()
    for title, content in _sections(row):
        console.print(f"\n[bold]{escape(title)}[/bold]")
        console.print(content)
    return 0


def _verify(directory: PlanDirectory, options: argparse.Namespace) -> int:
    damaged = directory.verify()
    if options.json:
        _print_json([{"key": key, "problem": problem} for key, problem in damaged])
    else:
        total = len(directory.keys())
        console = _console()
        for key, problem in damaged:
            console.print(f"{key}: {escape(problem)}", soft_wrap=True)
        console.print(f"{_count(total - len(damaged), 'entry', 'entries')} sound, {len(damaged)} damaged in {directory.root}", soft_wrap=True)
    return 1 if damaged else 0


def _diff(directory: PlanDirectory, options: argparse.Namespace) -> int:
    a, b = (dict(_leaves(_find(directory, key))) for key in (options.a, options.b))
    differing = {name: (a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)}
    if options.json:
        return _print_json(differing)
    table = table_of("field", a["key"][:KEY_SHOWN], b["key"][:KEY_SHOWN], whole=("field",))
    for name in differing:
        table.add_row(escape(name), *(escape(text(name, side[name])) if name in side else "-" for side in (a, b)))
    _console().print(table if differing else "They are equal.")
    return 0


def _clear(directory: PlanDirectory, options: argparse.Namespace) -> int:
    keys = directory.clear()
    if options.json:
        return _print_json(keys)
    _console().print(f"Deleted {_count(len(keys), 'plan')} in {directory.root}", soft_wrap=True)
    return 0


# -- entries -------------------------------------------------------------------------------------------


def _row(entry: DiskEntry) -> dict[str, Any]:
    return {**entry.header, "hits": entry.loads, "last_used": entry.last_used}


def _find(directory: PlanDirectory, prefix: str) -> dict[str, Any]:
    """The entry whose key starts with `prefix`. UnknownKeyError where none or several do, or where it is damaged."""
    present = directory.keys()
    keys = [key for key in present if key.startswith(prefix)]
    if len(keys) != 1:
        found = "no entry" if not keys else f"{len(keys)} entries, {', '.join(key[:16] for key in keys[:4])}{' ...' if len(keys) > 4 else ''}"
        raise UnknownKeyError(f"key: got {prefix!r}, which names {found}; need the start of one key in {directory.root}; see list")
    for entry in directory.entries():
        if entry.key == keys[0]:
            return _row(entry)
    raise UnknownKeyError(f"key: got {prefix!r}, whose header is damaged; need a sound entry; see verify")


def _leaves(value: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    """(dotted name, value) of everything inside nested dicts and lists of dicts."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{name}.{item.get('role', i)}")
    else:
        yield name, value


def _sections(row: Mapping[str, Any]) -> Iterable[tuple[str, Table]]:
    """One table for the plain fields, then one for each nested group."""
    groups = {name: value for name, value in row.items() if isinstance(value, Mapping)}
    yield str(row["label"]), pairs_table({name: value for name, value in row.items() if name not in groups and name != "label"})
    for name, group in groups.items():
        kernels = group.get("kernels")
        if isinstance(kernels, list) and kernels and all(isinstance(kernel, Mapping) for kernel in kernels):
            group = {inner: value for inner, value in group.items() if inner != "kernels"}
            yield "kernels", _columns(kernels)
        if group:
            yield name, pairs_table(dict(_leaves(group)))


def _columns(items: list[Mapping[str, Any]]) -> Table:
    """One line an item: the words first, then the figures, whose headings may wrap."""
    names = sorted(dict.fromkeys(name for item in items for name in item), key=lambda name: (name != "role", not isinstance(items[0].get(name), str)))
    table = table_of(*(name.replace("_", " ") for name in names))
    for item in items:
        table.add_row(*(escape(text(name, item.get(name))) for name in names))
    return table


# -- words ---------------------------------------------------------------------------------------------


def _console() -> Console:
    return Console(highlight=False)


def _print_json(value: Any) -> int:
    print(json.dumps(value, indent=2))
    return 0


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def _size(n: int) -> str:
    return f"{n} B" if n < 1000 else f"{n / 1e3:.0f} kB" if n < 1_000_000 else f"{n / 1e6:.1f} MB"


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.1 else f"{seconds:.2g} s"


def _age(created: float) -> str:
    seconds = max(0.0, time.time() - created)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
