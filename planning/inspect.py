"""Looking at a plan store from a shell: list, show, verify, diff, clear. From headers alone: no GPU, nothing loaded.

Behind both `python -m cudnn_graphs plans` and `python scripts/inspect_plans.py`. A person gets tables, `--json` a
program's answer, `list --html FILE` a page with all that list and show tell. Without a command: list.
Exit status: 0; 1 where `verify` found damage; 2 for a key that names no entry, or several, a FILE or DIR that cannot be read or written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from .disk import DiskEntry, PlanDirectory
from .entry_text import KEY_SHOWN, age, columns, count, leaves, seconds, sections, size, text
from .html_page import write_page
from .process_store import default_root
from .tables import PlainConsole, pairs_table, plain, table_of


class InspectError(Exception):
    """What was asked for is not to be had: a key that names no single entry, a file that cannot be written."""


def main(arguments: list[str] | None = None) -> int:
    """The command line of `scripts/inspect_plans.py`. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_commands(parser)
    return run(parser.parse_args(arguments))


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands to `parser`; `run` carries out what it parsed."""
    parser.set_defaults(carry_out=_list, html=None, json=False, store=None)
    commands = parser.add_subparsers(dest="plans_command", metavar="COMMAND")
    listing = commands.add_parser("list", help="every entry, newest first; also where no command is given")
    show = commands.add_parser("show", help="everything that is known of one entry")
    show.add_argument("key", metavar="KEY", help="a key or the start of one")
    show.set_defaults(carry_out=_show)
    commands.add_parser("verify", help="read every byte; exit 1 if any entry is damaged").set_defaults(carry_out=_verify)
    diff = commands.add_parser("diff", help="the fields in which two entries differ")
    diff.add_argument("a", metavar="A")
    diff.add_argument("b", metavar="B")
    diff.set_defaults(carry_out=_diff)
    commands.add_parser("clear", help="delete every entry").set_defaults(carry_out=_clear)
    absent: dict[str, Any] = {"default": argparse.SUPPRESS}     # a subcommand's own default would undo the option given before it
    for each in (parser, *commands.choices.values()):
        each.add_argument("--json", action="store_true", help="print JSON", **absent)
        each.add_argument("--store", metavar="DIR", type=Path, help="its directory; default: $CUDNN_GRAPHS_CACHE_DIR/plans or the user's cache", **absent)
    for each in (parser, listing):
        each.add_argument("--html", metavar="FILE", type=Path, help="list: write it as one self-contained page, with everything that show tells", **absent)


def run(options: argparse.Namespace) -> int:
    """Carry out a parsed command. Returns the exit status."""
    root = default_root() / "plans" if options.store is None else options.store.expanduser()
    directory = PlanDirectory(root, max_entries=0, max_bytes=0)     # bounds are a writer's; nothing is written here
    carry_out: Callable[[PlanDirectory, argparse.Namespace], int] = options.carry_out
    try:
        if options.html is not None and carry_out is not _list:
            raise InspectError(f"html: got {options.plans_command}; need list, whose page tells of every entry what show does; leave the command out")
        if options.store is not None:
            _check_directory(root, must_exist=carry_out is _verify)
        return carry_out(directory, options)
    except InspectError as error:
        print(error, file=sys.stderr)
        return 2


def _check_directory(root: Path, must_exist: bool) -> None:
    """A directory that is not there yet is an empty store, but nothing to have verified."""
    try:
        next(root.iterdir(), None)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not must_exist:
            return
        raise InspectError(f"store: got {error}; need a plan store's directory that can be read; see --store") from error


def plans_table(entries: Iterable[Mapping[str, Any]]) -> Table:
    """A table of entries as `PlanStore.entries()` gives them, for 80 columns and more."""
    figures = ("size", "build", "age", "hits")
    table = table_of("key", "plan", "engine, device", *figures, right=figures, whole=("key",))
    for entry in entries:
        table.add_row(entry["key"][:KEY_SHOWN], plain(entry["label"]), plain(f"{entry['engine']}, {entry['device']['name']}"), size(entry["payload_bytes"]),
                      seconds(entry["build_seconds"]), age(entry["created"]), str(entry["hits"]))
    return table


# -- commands ------------------------------------------------------------------------------------------


def _list(directory: PlanDirectory, options: argparse.Namespace) -> int:
    rows = sorted(map(_row, directory.entries()), key=lambda row: -row["created"])
    damaged = len(directory.keys()) - len(rows)
    if options.html is not None:
        _write_page(options.html, rows, directory.root, damaged)
    if options.json:
        return _print_json(rows)
    console = PlainConsole()
    if options.html is not None:
        console.print(f"Wrote {options.html}:", soft_wrap=True, markup=False)
    elif rows:
        console.print(plans_table(rows))
    console.print(f"{count(len(rows), 'plan')} in {plain(str(directory.root))}", soft_wrap=True)
    if damaged:
        console.print(f"{count(damaged, 'entry is', 'entries are')} damaged and will be built anew; see verify")
    return 0


def _write_page(file: Path, rows: list[dict[str, Any]], root: Path, damaged: int) -> None:
    try:
        write_page(file.expanduser(), rows, root, damaged)
    except OSError as error:
        raise InspectError(f"html: got {error}; need a file that can be written; name another") from error


def _show(directory: PlanDirectory, options: argparse.Namespace) -> int:
    row = _find(directory, options.key)
    if options.json:
        return _print_json(row)
    console = PlainConsole()
    for title, content in sections(row):
        console.print(f"\n[bold]{plain(title)}[/bold]")
        console.print(_columns(content) if isinstance(content, list) else pairs_table(content))
    return 0


def _verify(directory: PlanDirectory, options: argparse.Namespace) -> int:
    damaged = directory.verify()
    if options.json:
        _print_json([{"key": key, "problem": problem} for key, problem in damaged])
    else:
        total = len(directory.keys())
        console = PlainConsole()
        for key, problem in damaged:
            console.print(f"{key}: {plain(problem)}", soft_wrap=True)
        console.print(f"{count(total - len(damaged), 'entry', 'entries')} sound, {len(damaged)} damaged in {plain(str(directory.root))}", soft_wrap=True)
    return 1 if damaged else 0


def _diff(directory: PlanDirectory, options: argparse.Namespace) -> int:
    a, b = (dict(leaves(_find(directory, key))) for key in (options.a, options.b))
    differing = {name: (a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)}
    if options.json:
        return _print_json(differing)
    table = table_of("field", a["key"][:KEY_SHOWN], b["key"][:KEY_SHOWN], whole=("field",))
    for name in differing:
        table.add_row(plain(name), *(plain(text(name, side[name])) if name in side else "-" for side in (a, b)))
    PlainConsole().print(table if differing else "They are equal.")
    return 0


def _clear(directory: PlanDirectory, options: argparse.Namespace) -> int:
    keys = directory.clear()
    if options.json:
        _print_json(keys)
    else:
        PlainConsole().print(f"Deleted {count(len(keys), 'plan')} in {plain(str(directory.root))}", soft_wrap=True)
    if left := len(directory.keys()):
        raise InspectError(f"clear: got {count(left, 'entry', 'entries')} that could not be deleted; need a directory that can be written; see the log")
    return 0


# -- entries -------------------------------------------------------------------------------------------


def _row(entry: DiskEntry) -> dict[str, Any]:
    return {**entry.header, "hits": entry.loads, "last_used": entry.last_used}


def _find(directory: PlanDirectory, prefix: str) -> dict[str, Any]:
    """The entry whose key starts with `prefix`. InspectError where none or several do, or where it is damaged."""
    present = directory.keys()
    keys = [key for key in present if key.startswith(prefix)]
    if len(keys) != 1:
        found = "no entry" if not keys else f"{len(keys)} entries, {', '.join(key[:16] for key in keys[:4])}{' ...' if len(keys) > 4 else ''}"
        raise InspectError(f"key: got {prefix!r}, which names {found}; need the start of one key in {directory.root}; see list")
    for entry in directory.entries():
        if entry.key == keys[0]:
            return _row(entry)
    raise InspectError(f"key: got {prefix!r}, whose header is damaged; need a sound entry; see verify")


def _columns(items: list[Mapping[str, Any]]) -> Table:
    """One line an item, whose headings may wrap."""
    names = columns(items)
    table = table_of(*(name.replace("_", " ") for name in names))
    for item in items:
        table.add_row(*(plain(text(name, item.get(name))) for name in names))
    return table


# -- printing ------------------------------------------------------------------------------------------


def _print_json(value: Any) -> int:
    print(json.dumps(value, indent=2))
    return 0
