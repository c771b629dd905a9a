"""A plan store as one HTML page without any other file: for a dashboard, or to attach to a bug report.

It says what `list` and `show` say, sorts by the column clicked, and needs no script to be read. Headers come from
a directory that others may have written: every word of them is escaped, and the page allows its own script alone.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Collection, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from .entry_text import KEY_SHOWN, Section, age, columns, count, seconds, sections, size, text

STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif }
body { margin: 2em auto; padding: 0 1em; max-width: 90em; background: light-dark(#fff, #16181c); color: light-dark(#1a1a1a, #e4e4e4) }
h1 { font-size: 1.4em; margin: 0 } h3 { font-size: 1em; margin: 1em 0 .2em } p { margin: .2em 0 }
.wide { overflow-x: auto } #plans { margin-top: 1.2em; width: 100% }
table { border-collapse: collapse } th { text-align: left; font-weight: 600 } td, th { padding: .2em 1.2em .2em 0; vertical-align: top }
#plans > tbody { border-top: 1px solid light-dark(#ddd, #3a3d44) } #plans > tbody:hover { background: light-dark(#f4f7fb, #1f2329) }
.figure { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
code, .fields td { font-family: ui-monospace, monospace; font-size: .9em } .fields td { overflow-wrap: anywhere }
.fields th, .more summary { font-weight: 400; color: light-dark(#5b5b5b, #a8adb5) } .more { padding-bottom: .5em }
summary { cursor: pointer } th button { all: unset; cursor: pointer } th button:focus-visible { outline: 2px solid }
th[aria-sort=ascending] button::after { content: " \\25B2" } th[aria-sort=descending] button::after { content: " \\25BC" }
"""

# An entry is a tbody, so that its details move with it. What a figure sorts by is a whole number, which the collation compares as one.
SCRIPT = """
document.querySelectorAll("#plans th button").forEach((button, column) => button.onclick = () => {
  const head = button.parentElement, table = head.closest("table"), up = head.getAttribute("aria-sort") !== "ascending";
  const value = body => body.rows[0].cells[column].dataset.sort ?? body.rows[0].cells[column].textContent;
  const order = (a, b) => value(a).localeCompare(value(b), "en", { numeric: true });
  for (const cell of head.parentElement.cells) cell.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  table.append(...[...table.tBodies].sort((a, b) => up ? order(a, b) : order(b, a)));
});
"""

WORDS, FIGURES = ("key", "plan", "engine", "device"), ("size", "build", "age", "hits")


def write_page(file: Path, entries: Collection[Mapping[str, Any]], root: Path, damaged: int) -> None:
    """Write the page of `entries`, headers with "hits", newest first. damaged: entries of `root` that are not among them. OSError where it cannot."""
    file.write_bytes(page(entries, root, damaged).encode("utf-8", "xmlcharrefreplace"))     # JSON may hold half a surrogate pair


def page(entries: Collection[Mapping[str, Any]], root: Path, damaged: int) -> str:
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    warning = f"<p><strong>{count(damaged, 'entry is', 'entries are')} damaged</strong> and will be built anew; see verify</p>" if damaged else ""
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'">
<title>{count(len(entries), "plan")}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{count(len(entries), "plan")}, {size(sum(entry["payload_bytes"] for entry in entries))}</h1>
<p>in <code>{escape(str(root))}</code>, as of {escape(made)}</p>
{warning}
<div class="wide"><table id="plans">
<thead><tr>{"".join(map(_heading, WORDS + FIGURES))}</tr></thead>
{"".join(map(_entry, entries))}</table></div>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _heading(name: str) -> str:
    figure = ' class="figure"' if name in FIGURES else ""
    return f'<th{figure} scope="col" aria-sort="{"ascending" if name == "age" else "none"}"><button>{name}</button></th>'


def _entry(entry: Mapping[str, Any]) -> str:
    figures = ((size(entry["payload_bytes"]), entry["payload_bytes"]), (seconds(entry["build_seconds"]), round(1e6 * entry["build_seconds"])),
               (age(entry["created"]), max(0, round(time.time() - entry["created"]))), (str(entry["hits"]), entry["hits"]))
    words = (f'<code title="{escape(entry["key"])}">{escape(entry["key"][:KEY_SHOWN])}</code>',
             *(escape(str(word)) for word in (entry["label"], entry["engine"], entry["device"]["name"])))
    cells = [f"<td>{word}</td>" for word in words] + [f'<td class="figure" data-sort="{number}">{shown}</td>' for shown, number in figures]
    return f'<tbody>\n<tr>{"".join(cells)}</tr>\n<tr><td class="more" colspan="{len(cells)}">{_details(entry)}</td></tr>\n</tbody>\n'


def _details(entry: Mapping[str, Any]) -> str:
    parts = list(sections(entry))
    names = next((", ".join(str(kernel.get("name", "?")) for kernel in content) for _, content in parts if isinstance(content, list)), "no kernels")
    body = "".join(f"<h3>{escape(title)}</h3>{_section(content)}" for title, content in parts)
    return f"<details><summary>{escape(names)}</summary>{body}</details>"


def _section(content: Section) -> str:
    if isinstance(content, list):
        names = columns(content)
        rows: Iterable[str] = [_row("th", (name.replace("_", " ") for name in names)), *(_row("td", (text(n, item.get(n)) for n in names)) for item in content)]
    else:
        rows = (f"<tr><th>{escape(name)}</th><td>{escape(text(name, value))}</td></tr>" for name, value in content.items())
    return f'<table class="fields">{"".join(rows)}</table>'


def _row(tag: str, words: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(word)}</{tag}>' for word in words)}</tr>"
