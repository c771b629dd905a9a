"""How tables look to a person: no frame, one space between columns, readable at 80 of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .entry_text import text

BROKEN_PIPE = 141           # of a program that SIGPIPE ended, as a shell tells it


class PlainConsole(Console):
    """Without colours for numbers; a reader that went away is `until_the_reader_leaves`'s."""

    def __init__(self) -> None:
        super().__init__(highlight=False)

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def until_the_reader_leaves(main: Callable[[], int]) -> int:
    """The exit status of `main`, or BROKEN_PIPE, without a traceback, where `| head` read no further."""
    try:
        status = main()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # what is still buffered is written at exit
        return BROKEN_PIPE


def table_of(*names: str, right: Collection[str] = (), whole: Collection[str] = ()) -> Table:
    """An empty table. right: columns of figures; whole: columns that are never wrapped, figures besides."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in right or name in whole, overflow="fold")
    return table


def plain(words: str) -> str:
    """What another process wrote, for a terminal: no markup, no control sequences."""
    return escape("".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in words))


def pairs_table(fields: Mapping[str, Any]) -> Table:
    """Names and values, without a heading."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(plain(name), plain(text(name, value)))
    return table
