"""The commands: plans, env, device-props, scripts/inspect_plans.py and the demo, as a person and a program meet them."""

from __future__ import annotations

import importlib
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from cudnn_graphs import PagedBlockSparseSignature, PlanStore
from cudnn_graphs.__main__ import main
from cudnn_graphs.planning import inspect
from cudnn_graphs.runtime.files import read_record, write_atomic

ROOT = Path(__file__).resolve().parents[1]
SIGNATURE = PagedBlockSparseSignature(batch_size=2, seq_len_q=1, max_seq_len_kv=512, num_qo_heads=8, num_kv_heads=1, head_dim=64, q_block_size=1,
                                      kv_block_size=64, page_size=16)


@pytest.fixture
def store(tmp_path):
    """A directory of two plans of the CPU, and the plans' descriptions, newest first."""
    store = PlanStore(tmp_path / "plans")
    plans = store.build([SIGNATURE, SIGNATURE.replace(batch_size=4)], "cpu")
    return tmp_path / "plans", [plan.describe() for plan in reversed(plans)]


@pytest.fixture(params=["module", "script"])
def plans(request, capsys):
    """Runs a plans command through either door: (status, stdout, stderr)."""
    def call(*arguments):
        arguments = [str(a) for a in arguments]
        status = main(["plans", *arguments]) if request.param == "module" else inspect.main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err
    return call


def test_list(store, plans):
    root, described = store
    status, out, _ = plans("list", "--store", root)
    assert status == 0 and "2 plans" in out
    assert all(d["key"][:8] in out for d in described)
    assert max(map(len, out.splitlines()[:-1])) <= 80, "the table fits 80 columns"      # the last line is a path
    assert re.search(r"key +plan +engine, device +size +build +age +hits", out)


def test_list_json_has_everything(store, plans):
    root, described = store
    status, out, _ = plans("list", "--json", "--store", root)
    rows = json.loads(out)
    assert status == 0 and [r["key"] for r in rows] == [d["key"] for d in described]
    for row, told in zip(rows, described):
        assert {k: row[k] for k in told} == json.loads(json.dumps(told))
        assert row["hits"] == 0 and row["last_used"] > 0


def test_list_counts_loads_of_every_process(store, plans):
    root, described = store
    PlanStore(root).get(SIGNATURE, "cpu")
    _, out, _ = plans("list", "--json", "--store", root)
    assert {r["key"]: r["hits"] for r in json.loads(out)} == {described[0]["key"]: 0, described[1]["key"]: 1}


@pytest.mark.parametrize("arguments, answer", [(["list"], []), (["clear"], [])])
def test_no_directory_is_an_empty_store(arguments, answer, tmp_path, plans):
    status, out, _ = plans(*arguments, "--json", "--store", tmp_path / "nowhere")
    assert status == 0 and json.loads(out) == answer
    status, out, _ = plans(*arguments, "--store", tmp_path / "nowhere")
    assert status == 0 and "nowhere" in out
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("script", ["bench_sharded", "demo_sharded"])
def test_a_script_for_ranks_says_that_torchrun_starts_it(script, tmp_path):
    without = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, ROOT / "scripts" / f"{script}.py"], capture_output=True, text=True, cwd=tmp_path, env=without, check=False)
    assert done.returncode == 1 and f"torchrun --nproc-per-node 2 scripts/{script}.py" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_what_is_no_directory_is_not_verified(tmp_path, plans):
    """A mistyped path must not pass a check."""
    (tmp_path / "file").write_text("")
    for arguments in (["verify", "--store", tmp_path / "nowhere"], ["verify", "--store", tmp_path / "file"], ["list", "--store", tmp_path / "file"]):
        status, out, error = plans(*arguments)
        assert (status, out) == (2, "") and "store: got" in error and "need a plan store's directory" in error


def test_clear_says_what_it_could_not_delete(store, plans, monkeypatch):
    root, _ = store
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: (_ for _ in ()).throw(PermissionError(13, "denied", str(self))))
    status, out, error = plans("clear", "--json", "--store", root)
    assert (status, json.loads(out)) == (2, []) and "clear: got 2 entries that could not be deleted" in error
    assert len(list(root.glob("*.plan.json"))) == 2


@pytest.mark.parametrize("arguments", [["plans", "list"], ["plans", "list", "--json"], ["env"]])
def test_a_reader_that_goes_away_gets_no_traceback(arguments, store, tmp_path):
    root, _ = store
    more = ["--store", str(root)] if arguments[0] == "plans" else []
    program = subprocess.Popen([sys.executable, "-m", "cudnn_graphs", *arguments, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    program.stdout.close()
    error = program.stderr.read()
    assert program.wait(timeout=60) == 141 and b"Traceback" not in error, error


def test_show_prints_all_of_describe(store, plans):
    root, (described, _) = store
    status, out, _ = plans("show", described["key"][:6], "--store", root)
    assert status == 0
    for name, value in described.items():
        assert name == "label" or name in out
        for inner in value if isinstance(value, dict) else ():
            assert inner in out
    assert "reference" in out and "needs a CUDA device" in out
    status, out, _ = plans("show", described["key"], "--json", "--store", root)
    assert status == 0 and json.loads(out)["signature"] == described["signature"]


def test_diff(store, plans):
    root, (four, two) = store
    status, out, _ = plans("diff", four["key"], two["key"], "--json", "--store", root)
    differing = json.loads(out)
    assert status == 0 and differing["signature.batch_size"] == [4, 2] and differing["descriptor.batch_size"] == [4, 2]
    assert "signature.head_dim" not in differing and "engine" not in differing
    status, out, _ = plans("diff", four["key"], two["key"], "--store", root)
    assert status == 0 and "signature.batch_size" in out
    _, out, _ = plans("diff", four["key"], four["key"], "--store", root)
    assert "equal" in out


@pytest.mark.parametrize("arguments", [["show", "zz"], ["show", ""], ["diff", "zz", "zz"]])
def test_a_key_that_names_no_single_entry(arguments, store, plans):
    root, _ = store
    status, out, err = plans(*arguments, "--store", root)
    assert status == 2 and not out
    assert re.match(r"key: got .*; need .*; see list", err)


def test_verify_finds_a_flipped_bit(store, plans):
    root, (described, _) = store
    assert plans("verify", "--store", root)[0] == 0
    payload = root / f"{described['key']}.plan"
    payload.write_bytes(bytes([payload.read_bytes()[0] ^ 1]) + payload.read_bytes()[1:])
    status, out, _ = plans("verify", "--store", root)
    assert status == 1 and described["key"] in out and "1 entry sound, 1 damaged" in out
    status, out, _ = plans("verify", "--json", "--store", root)
    assert status == 1 and [d["key"] for d in json.loads(out)] == [described["key"]]


def test_a_damaged_header_is_counted_and_not_shown(store, plans):
    root, (described, _) = store
    header = root / f"{described['key']}.plan.json"
    header.write_text(header.read_text().replace('"reference"', '"referenze"'))
    status, out, _ = plans("list", "--store", root)
    assert status == 0 and "1 plan in" in out and "1 entry is damaged" in out
    status, _, err = plans("show", described["key"], "--store", root)
    assert status == 2 and "damaged" in err
    assert plans("verify", "--store", root)[0] == 1


def other_header(root: Path, key: str, **changes) -> None:
    """A header with checksums that agree, as any program can write one."""
    payload, header = read_record(root / f"{key}.plan")
    write_atomic(root / f"{key}.plan", payload, header | changes)


@pytest.mark.parametrize("changes", [{"label": "\x1b[2J\x07\ud800"}, {"label": "[/bold]", "engine": "[red]"}, {"declined": {"\x1b[2J": "[/bold]\x1b[2J"}}])
def test_a_header_moves_no_cursor_and_marks_nothing_up(changes, store, plans):
    root, (described, _) = store
    other_header(root, described["key"], **changes)
    for arguments in (["list"], ["show", described["key"]]):
        status, out, _ = plans(*arguments, "--store", root)
        assert status == 0 and {c for c in out if not c.isprintable()} == {"\n"}
    assert "[red]" in out if "engine" in changes else "\N{REPLACEMENT CHARACTER}[2J" in out


@pytest.mark.parametrize("changes", [
    {"device": {}}, {"device": {"name": 3}}, {"created": 1e300}, {"created": float("nan")}, {"build_seconds": float("inf")}, {"label": 3},
])
def test_what_cannot_be_listed_is_damaged(changes, store, plans):
    root, (described, _) = store
    other_header(root, described["key"], **changes)
    status, out, _ = plans("list", "--store", root)
    assert status == 0 and "1 plan in" in out and "1 entry is damaged" in out
    status, out, _ = plans("verify", "--json", "--store", root)
    assert status == 1 and [d["key"] for d in json.loads(out)] == [described["key"]]


def test_clear(store, plans):
    root, described = store
    status, out, _ = plans("clear", "--json", "--store", root)
    assert status == 0 and sorted(json.loads(out)) == sorted(d["key"] for d in described)
    assert json.loads(plans("list", "--json", "--store", root)[1]) == []


def test_looking_loads_and_writes_nothing(store, plans):
    root, (described, _) = store
    before = {p: p.stat().st_mtime_ns for p in root.iterdir()}
    for arguments in (["list"], ["show", described["key"]], ["verify"]):
        plans(*arguments, "--store", root)
    assert {p: p.stat().st_mtime_ns for p in root.iterdir()} == before


def test_default_store_is_the_librarys(monkeypatch, store, plans):
    root, described = store
    monkeypatch.setenv("CUDNN_GRAPHS_CACHE_DIR", str(root.parent))
    assert len(json.loads(plans("list", "--json")[1])) == len(described)


def test_env(capsys):
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    cpu = next(d for d in report["devices"] if d["device"] == "cpu")
    assert set(cpu["engines"]) == {"PagedBlockSparseSignature", "SageBlockSparseSignature", "QuerySparseSignature"}
    for engines in cpu["engines"].values():
        assert engines["reference"] == {"usable": True, "reason": ""}
        assert all(not said["usable"] and "needs" in said["reason"] for name, said in engines.items() if name != "reference")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "reference" in out and "needs a CUDA device" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_device_props_without_a_device(capsys):
    assert main(["device-props"]) == 2
    assert re.match(r"device-props: got .*; need .*", capsys.readouterr().err)


@pytest.mark.gpu
def test_device_props(capsys):
    pytest.importorskip("cudnn")
    assert main(["device-props"]) == 0
    assert json.loads(capsys.readouterr().out)["deviceName"] == torch.cuda.get_device_name(0)


def test_script_runs_outside_the_checkout(store, tmp_path):
    root, described = store
    done = subprocess.run([sys.executable, ROOT / "scripts" / "inspect_plans.py", "list", "--json", "--store", root], cwd=tmp_path, capture_output=True,
                          text=True, timeout=120, check=True)
    assert len(json.loads(done.stdout)) == len(described)


def test_demo_builds_once(tmp_path):
    """A second process finds every plan of the demo and builds nothing; each error against exact attention over the same keys is within the bar."""
    picture = tmp_path / "blocks.png"
    first, second = demo(tmp_path / "plans", "--picture", picture), demo(tmp_path / "plans", "--plans-only")
    assert "4 built, 0 loaded" in first and "0 built, 4 loaded" in second
    paged, rest = first.split("Sage attention over")
    sage, packed = rest.split("Query-sparse attention over")
    for part, rows, bar in ((paged, 10, 3.5e-3), (sage, 4, 4e-2), (packed, 2, 4e-3)):
        same_keys = [float(e) for e in re.findall(r"\d% +[\d.]+ +(\d\.\de-\d\d) ", part)]
        assert len(same_keys) == rows and max(same_keys) < bar
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_demo_picture_without_matplotlib(tmp_path, monkeypatch):
    """The bare PNG: its size, every chunk's checksum, and a pixel of each panel."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    picture = importlib.import_module("demo_picture")
    picture.save_panels(tmp_path / "p.png", {"left": torch.eye(3), "right": torch.zeros(3, 2)}, "keys", "queries")
    data = (tmp_path / "p.png").read_bytes()
    chunks, at = {}, 8
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8:at + 8 + size]
        assert struct.unpack_from(">I", data, at + 8 + size)[0] == zlib.crc32(kind + body)
        chunks[kind], at = body, at + 12 + size
    cell, gap = picture.CELL, picture.GAP
    width, height = 5 * cell + 4 * gap, 3 * cell + 2 * gap
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (width, height, 8, 2, 0, 0, 0)
    pixels = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8).view(height, 1 + 3 * width)[:, 1:].view(height, width, 3)
    assert pixels[0, 0].tolist() == [picture.FRAME] * 3
    assert pixels[gap, gap].tolist() == picture.INK.tolist()
    assert pixels[gap, 3 * cell + 3 * gap].tolist() == [255] * 3


def demo(store: Path, *arguments: str | Path) -> str:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "demo.py", "--store", store, *arguments], env={**os.environ, "COLUMNS": "80"},
                          capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
