"""The page of a store: what list and show say, nothing from a header believed to be markup, and columns that sort in a browser."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from headless import BROWSER, Page

from cudnn_graphs import PagedBlockSparseSignature, PlanStore
from cudnn_graphs.__main__ import main
from cudnn_graphs.planning import inspect
from cudnn_graphs.planning.entry_text import leaves, sections, text
from cudnn_graphs.planning.html_page import page, write_page

HOSTILE = """</script><script>document.title="owned"</script><img src=x onerror=alert(1)> & "quoted" 'too' \ud800 é"""
VOID = {"meta", "img", "br"}


class Outline(HTMLParser):
    """Tags, attributes and text of a page; every tag that opens must close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def entry(key: str = "ab" * 20, **changes: Any) -> dict[str, Any]:
    """A header as `inspect` reads it."""
    kernel = {"role": "attention", "name": "sm90_paged_bf16_d64", "registers": 168, "spill_bytes": 0}
    return {"key": key, "label": "paged B2", "engine": "sm90", "device": {"kind": "cuda", "name": "NVIDIA H200", "sm_count": 132},
            "signature": {"type": "PagedBlockSparseSignature", "batch_size": 2}, "declined": {"cudnn": "cudnn needs <no> valid bits & so on"},
            "compiled": {"kernels": [kernel], "config": {"tile": [64, 128]}, "workspace_bytes": 0}, "created": time.time() - 7200, "build_seconds": 4.25,
            "payload_bytes": 67308, "hits": 3, "last_used": time.time()} | changes


def test_it_tells_all_that_list_and_show_tell():
    row = entry()
    outline = Outline(page([row], Path("/some/plans"), 0))
    said = " ".join(outline.words)
    for shown in (row["key"][:8], "paged B2", "sm90", "NVIDIA H200", "67 kB", "4.2 s", "2 h", "3", "1 plan", "/some/plans"):
        assert shown in outline.words or shown in said
    for title, content in sections(row):
        assert title in outline.words
        for item in content if isinstance(content, list) else [content]:
            assert all(text(name, value) in outline.words for name, value in item.items())
    assert {text(n.split(".")[-1], v) for n, v in leaves(row)} <= set(outline.words), "no fact of the header is left out"


def test_it_is_one_file():
    html = page([entry()], Path("/p"), 0)
    outline = Outline(html)
    assert not any({"src", "href", "action", "srcset"} & attributes.keys() for _, attributes in outline.tags)
    assert not re.search(r"https?:|@import|url\(", html)
    assert outline.count("script") == outline.count("style") == 1
    assert "default-src 'none'" in html and "color-scheme: light dark" in html


def test_without_a_script_everything_is_there():
    """Details open by themselves; nothing is hidden until a script shows it."""
    outline = Outline(page([entry(), entry("cd" * 20)], Path("/p"), 0))
    assert outline.count("details") == outline.count("summary") == 2 and outline.count("tbody") == 2 and "hidden" not in dict(outline.tags).get("tbody", {})


def test_what_a_header_says_is_never_markup(tmp_path):
    plain, hostile = page([entry()], Path("/p"), 0), entry(HOSTILE, label=HOSTILE, engine=HOSTILE, device={"name": HOSTILE}, declined={HOSTILE: HOSTILE},
                                                           compiled={"kernels": [{"name": HOSTILE, HOSTILE: HOSTILE}]}, **{HOSTILE: {HOSTILE: [HOSTILE]}})
    outline = Outline(page([hostile], Path(f"/p/{HOSTILE}"), 0))
    allowed = {tag for tag, _ in Outline(plain).tags}
    assert {tag for tag, _ in outline.tags} <= allowed and outline.count("script") == 1
    assert {name for _, attributes in outline.tags for name in attributes} <= {name for _, attributes in Outline(plain).tags for name in attributes}
    assert sum(HOSTILE in word for word in outline.words) >= 10
    write_page(tmp_path / "page.html", [hostile], Path("/p"), 0)
    assert "é" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize("rows, damaged, words", [([], 0, "0 plans"), ([], 1, "1 entry is damaged"), ([entry()], 2, "2 entries are damaged")])
def test_counts(rows, damaged, words):
    outline = Outline(page(rows, Path("/p"), damaged))
    assert words in "".join(outline.words) and ("damaged" in "".join(outline.words)) == bool(damaged)


@pytest.fixture
def store(tmp_path):
    """A directory of three plans, one of them damaged."""
    signature = PagedBlockSparseSignature(batch_size=2, seq_len_q=1, max_seq_len_kv=512, num_qo_heads=8, num_kv_heads=1, head_dim=64, q_block_size=1,
                                          kv_block_size=64, page_size=16)
    plans = PlanStore(tmp_path / "plans").build([signature.replace(batch_size=b) for b in (2, 4, 8)], "cpu")
    (tmp_path / "plans" / f"{plans[0].describe()['key']}.plan.json").write_text("{}")
    return tmp_path / "plans", [plan.describe()["key"] for plan in plans[1:]]


@pytest.mark.parametrize("command", [["--html"], ["list", "--html"]])
@pytest.mark.parametrize("door", [inspect.main, lambda arguments: main(["plans", *arguments])], ids=["script", "module"])
def test_the_command(door, command, store, tmp_path, capsys):
    root, keys = store
    file = tmp_path / "page.html"
    assert door([*command, str(file), "--store", str(root)]) == 0
    out = capsys.readouterr().out
    assert str(file) in out and "2 plans" in out and "1 entry is damaged" in out
    outline = Outline(file.read_text("utf-8"))
    assert all(key[:8] in outline.words and key in outline.words for key in keys) and outline.count("tbody") == 2
    assert "1 entry is damaged" in outline.words


def test_options_stand_before_or_after_the_command(store, capsys):
    root, keys = store
    for arguments in (["--store", root, "--json"], ["--json", "list", "--store", root], ["--store", root, "list", "--json"]):
        assert inspect.main([str(a) for a in arguments]) == 0
        out = capsys.readouterr().out
        assert all(key in out for key in keys)


@pytest.mark.parametrize("arguments, words", [
    (["--html", "/nowhere/page.html"], "html: got .*/nowhere/page.html.*; need "), (["--html", "p", "verify"], "need list"),
])
def test_no_page_there(arguments, words, store, capsys):
    assert inspect.main(["--store", str(store[0]), *arguments]) == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.skipif(BROWSER is None, reason="needs a headless Chromium")
def test_in_a_browser(tmp_path):
    """A click on a heading sorts, another turns it round; details open and stay with their entry; dark is dark; no header's script ran."""
    rows = [entry(f"{i}" * 40, label=label, payload_bytes=size, build_seconds=taken, created=time.time() - 60 * i, hits=i)
            for i, (label, size, taken) in enumerate([("paged B32", 9_000, 4.0), ("paged B4", 200_000, 0.25), (HOSTILE, 1_500_000, 31.0)])]
    write_page(tmp_path / "page.html", rows, Path("/p"), 0)
    with Page(tmp_path / "page.html", tmp_path / "profile") as shown:
        def order() -> str:
            return "".join(shown.evaluate("[...document.querySelectorAll('#plans > tbody')].map(b => b.rows[0].cells[0].textContent[0])"))

        def sorted_by(column: int) -> str:
            shown.click(f"#plans th:nth-child({column}) button")
            return order()

        assert order() == "012"
        assert (sorted_by(5), sorted_by(5)) == ("012", "210"), "9 kB, 200 kB, 1.5 MB: by bytes, not by what is written"
        assert (sorted_by(6), sorted_by(6)) == ("102", "201")
        assert sorted_by(2)[-2:] == "10", "B4 before B32"
        assert shown.evaluate("[...document.querySelectorAll('#plans th[aria-sort]')].filter(h => h.ariaSort !== 'none').map(h => h.textContent)") == ["plan"]

        assert shown.evaluate("document.querySelector('details').open") is False
        shown.click("details summary")
        opened = "document.querySelector('details[open]').closest('tbody').rows[0].cells[0].textContent"
        first = shown.evaluate(opened)
        assert sorted_by(8) == "012" and shown.evaluate(opened) == first
        assert shown.evaluate("document.querySelector('details[open] .fields').checkVisibility()")

        for scheme, light in (("light", True), ("dark", False)):
            shown.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            background, ink = (shown.evaluate(f"getComputedStyle(document.body).{name}.match(/\\d+/g).slice(0, 3).reduce((a, b) => +a + +b, 0)")
                               for name in ("backgroundColor", "color"))
            assert (background > ink) is light and abs(background - ink) > 400
        assert shown.evaluate("document.title") == "3 plans"
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no part is wider than the window"
