"""Plans built ahead of time, for a GPU that is not here: the script from end to end, what it leaves alone, and the command that a miss names."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from devices import H200, H200_PROPERTIES, need_deviceless_builds

from cudnn_graphs import (
    PagedBlockSparseSignature,
    PlanMissError,
    PlanStore,
    QuerySparseSignature,
    SageBlockSparseSignature,
    block_sparse_attention_with_paged_kv_cache,
)
from cudnn_graphs.errors import CudnnGraphsError
from cudnn_graphs.planning import Signature, inspect, verdict

ROOT = Path(__file__).resolve().parents[1]
PAGED = PagedBlockSparseSignature(batch_size=2, seq_len_q=64, max_seq_len_kv=1024, num_qo_heads=8, num_kv_heads=1, head_dim=64, q_block_size=64,
                                  kv_block_size=64, page_size=64, max_blocks_per_row=8)
DECODE = PAGED.replace(seq_len_q=1, q_block_size=1)
SAGE = SageBlockSparseSignature(batch_size=1, num_heads=2, seq_len_q=128, seq_len_k=256, capacity=4)
QSA = QuerySparseSignature(3, 1, max_tokens=512)
WANTED: list[tuple[Signature, str]] = [(PAGED, "cudnn"), (PAGED, "sm90"), (DECODE, "portable"), (SAGE, "sm90"), (QSA, "portable")]
REFUSED, UNKNOWN = {**PAGED.replace(mask_type="causal").to_json(), "engine": "cudnn"}, {"type": "PagedBlockSparseSignature", "heads": 3}


def script(name: str, arguments: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False,
                          **options)


build, check = partial(script, "build_plans.py"), partial(script, "check_store.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[list[Any], Path, subprocess.CompletedProcess[str]]:
    """The script's arguments, the store's directory, and its first run: five plans, and two that cannot be."""
    need_deviceless_builds()
    directory = tmp_path_factory.mktemp("ahead")
    signatures = [{**signature.to_json(), "engine": engine} for signature, engine in WANTED]
    (directory / "signatures.json").write_text(json.dumps([REFUSED, *signatures, UNKNOWN]))
    arguments = [directory / "signatures.json", "--device-props", H200_PROPERTIES, "--store", directory / "plans", "--workers", 2, "--json"]
    return arguments, directory / "plans", build(arguments)


def test_two_that_cannot_be_built_end_in_1_and_the_others_are_built(built):
    _, _, done = built
    assert done.returncode == 1, done.stderr
    refused, *rows, unknown = json.loads(done.stdout)
    assert "no causal mask" in refused["error"] and "heads" in unknown["error"]
    assert [row["engine"] for row in rows] == [engine for _, engine in WANTED] and all(row["built"] for row in rows)
    assert [row["label"] for row in rows] == [signature.label for signature, _ in WANTED]
    assert "5 built, 0 there already, 2 failed" in done.stderr and "building plans" in done.stderr


def test_the_kernels_are_named(built):
    _, _, done = built
    cudnn, sm90, decode, sage, qsa = (row["kernels"] for row in json.loads(done.stdout)[1:-1])
    assert cudnn[0].startswith("cudnn_generated") and "sm90" in cudnn[0] and "sdpa" in cudnn[0] and len(cudnn) == 4
    assert sm90[0].startswith("sm90_paged") and decode[0].startswith("portable_paged") and sage[0].startswith("sm90_sage") and qsa[0].startswith("qsa_gather")
    assert all(name in done.stderr for names in (cudnn, sm90, decode, sage, qsa) for name in names)


def test_the_store_holds_them_for_that_device(built, capsys):
    _, root, done = built
    assert inspect.main(["list", "--json", "--store", str(root)]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == {row["key"] for row in json.loads(done.stdout)[1:-1]}
    assert all(row["device"] == H200.identity() and row["hits"] == 0 and row["payload_bytes"] > 20_000 for row in rows.values())
    assert inspect.main(["verify", "--store", str(root)]) == 0
    assert "5 entries sound, 0 damaged" in capsys.readouterr().out


def test_a_second_run_builds_only_what_is_damaged(built, capsys):
    arguments, root, done = built
    keys = [row["key"] for row in json.loads(done.stdout)[1:-1]]
    payload = root / f"{keys[-1]}.plan"
    payload.write_bytes(payload.read_bytes()[:-1])
    before = {key: (root / f"{key}.plan").stat().st_mtime_ns for key in keys}
    again = build(arguments)
    rows = json.loads(again.stdout)[1:-1]
    assert again.returncode == 1 and [row["built"] for row in rows] == [False] * 4 + [True] and [row["key"] for row in rows] == keys
    assert "1 built, 4 there already, 2 failed" in again.stderr
    assert [key for key in keys if (root / f"{key}.plan").stat().st_mtime_ns != before[key]] == keys[-1:]
    assert [len(row["warnings"]) for row in rows] == [0] * 4 + [1] and rows[-1]["warnings"][0] in again.stderr and "built anew" in again.stderr
    assert inspect.main(["verify", "--store", str(root)]) == 0
    assert all(row["hits"] == 0 for row in PlanStore(root).entries()), "looking is no use"


# -- input that is none -------------------------------------------------------------------------------

@pytest.mark.parametrize("signatures, properties", [
    ("no JSON", None), ("{}", None), ("[1]", None), (None, None), ("[]", "no JSON"), ("[]", "{}"), ("[]", "[]"),
])
def test_what_cannot_be_read(signatures, properties, tmp_path):
    device = ["--device", "cpu"]
    if signatures is not None:
        (tmp_path / "signatures.json").write_text(signatures)
    if properties is not None:
        (tmp_path / "device.json").write_text(properties)
        device = ["--device-props", tmp_path / "device.json"]
    done = build([tmp_path / "signatures.json", "--store", tmp_path / "plans", *device])
    assert done.returncode == 2 and "build_plans: got" in done.stderr and "need a JSON list" in done.stderr and "Traceback" not in done.stderr


def test_nothing_to_build(tmp_path):
    done = build(["-", "--store", tmp_path / "plans", "--device", "cpu", "--json"], input="[]")
    assert done.returncode == 0 and json.loads(done.stdout) == []


def test_a_process_that_dies_loses_its_own_plan_only(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from build_plans import in_workers
    items = ["1 + 1", "__import__('os')._exit(3)", "6 * 7", "'last'"]
    assert dict(in_workers(eval, items, 2)) == {0: 2, 1: None, 2: 42, 3: "last"}


# -- build_ahead --------------------------------------------------------------------------------------

def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CudnnGraphsError, match=r"store: got .*file/plans, which cannot be written; need a directory"):
        PlanStore(tmp_path / "file" / "plans").build_ahead(PAGED, H200, "reference")


def test_a_directory_of_others_is_an_error(tmp_path):
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans").chmod(stat.S_IRWXU | stat.S_IRWXO)
    with pytest.raises(CudnnGraphsError, match=r"which is not used: others can write to it; .*; need a directory"):
        PlanStore(tmp_path / "plans").build_ahead(PAGED, H200, "reference")


# -- the command that a miss names --------------------------------------------------------------------

def missed(store: PlanStore, signature: Signature, device: Any, engine: str | None = None) -> str:
    """The command in a frozen store's message."""
    store.freeze()
    with pytest.raises(PlanMissError) as caught:
        store.get(signature, device, engine)
    return str(caught.value).partition(", or: ")[2]


def paste(command: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "1 built" in done.stderr, done.stderr


def test_pasted_for_a_device_that_is_here(tmp_path):
    """The process that missed finds what another built, frozen as it is. A path that a shell would take apart."""
    store = PlanStore(tmp_path / "it's mine; $HOME" / "plans")
    paste(missed(store, DECODE, "cpu"))
    plan = store.get(DECODE, "cpu")
    assert plan.built_for == DECODE and (store.stats().loads, store.stats().builds) == (1, 0)


def test_pasted_for_a_device_that_is_not_here(tmp_path, monkeypatch):
    """Its properties come with the command; the engine is the one that was asked for. A path from where the process runs, which is not the checkout."""
    pytest.importorskip("cuda.bindings")
    monkeypatch.chdir(tmp_path)
    command = missed(PlanStore("plans"), QSA, H200, "portable")
    assert "--engine portable" in command
    paste(command)
    store = PlanStore(tmp_path / "plans")
    assert [(entry["engine"], entry["device"], entry["signature"]) for entry in store.entries()] == [("portable", H200.identity(), QSA.to_json())]
    store.build_ahead(QSA, H200, "portable")
    assert store.stats().builds == 0


def test_a_miss_in_memory_names_no_command():
    assert missed(PlanStore(), DECODE, "cpu") == ""


# -- the store where it will serve --------------------------------------------------------------------

@pytest.fixture
def carried(tmp_path) -> list[Any]:
    """A store of three plans for the CPU, moved after it was built: what the check is given."""
    (tmp_path / "signatures.json").write_text(json.dumps([DECODE.to_json(), {**SAGE.to_json(), "engine": "reference"}, QSA.to_json()]))
    assert build([tmp_path / "signatures.json", "--store", tmp_path / "here" / "plans", "--device", "cpu"]).returncode == 0
    (tmp_path / "here").rename(tmp_path / "there")
    return [tmp_path / "signatures.json", "--store", tmp_path / "there" / "plans", "--device", "cpu", "--json"]


def test_a_carried_store_runs_frozen(carried):
    done = check(carried)
    said = json.loads(done.stdout)
    assert done.returncode == 0 and [plan["kernels"] for plan in said["plans"]] == [["attend_paged"], ["attend_sage"], ["query_sparse"]]
    assert (said["loads"], said["builds"], said["misses"], said["compiles"]) == (3, 0, 0, 0)
    assert "3 ran, 0 failed; 3 loads in" in done.stderr and "0 builds, 0 misses, 0 compiles" in done.stderr


def test_a_carried_store_that_lacks_a_plan(carried):
    signatures, store = carried[0], Path(carried[2])
    next(path for path in store.glob("*.plan.json") if '"Sage' in path.read_text()).unlink()
    done = check(carried)
    rows = json.loads(done.stdout)["plans"]
    assert done.returncode == 1 and [("error" in row) for row in rows] == [False, True, False]
    assert "PlanMissError" in rows[1]["error"] and "1 misses" in done.stderr
    signatures.write_text(json.dumps([DECODE.replace(batch_size=1).to_json()]))
    done = check(carried)
    assert done.returncode == 1 and f"served by {DECODE.label}" in done.stderr, "it was to be there itself"


@pytest.mark.parametrize("signatures, device", [("no JSON", "cpu"), ("{}", "cpu"), (None, "cpu"), ("[]", "cuda:99"), ("[]", "tpu")])
def test_what_cannot_be_checked(signatures, device, tmp_path):
    if signatures is not None:
        (tmp_path / "signatures.json").write_text(signatures)
    done = check([tmp_path / "signatures.json", "--store", tmp_path / "plans", "--device", device])
    assert done.returncode == 2 and "check_store: got" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("fill", [1.0, 0.4, 0.01])
@pytest.mark.parametrize("mask", ["dense", "causal"])
@pytest.mark.parametrize("page_table", ["indptr", "block_tables"])
def test_synthetic_paged_calls_are_sound(page_table, mask, fill, monkeypatch):
    """The one-shot finds no fault in them."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from synthetic_calls import synthetic_call
    signature = PagedBlockSparseSignature(3, 20, 500, 4, 2, 64, 4, 32, 16, mask_type=mask, page_table=page_table, kv_layout="combined", page_stride=4160,
                                          max_blocks_per_row=6)
    (q, cache, page_indptr, page_indices, lens, indptr, blocks), more = synthetic_call(signature, "cpu", fill=fill)
    out = block_sparse_attention_with_paged_kv_cache(q, cache, page_indptr, page_indices, indptr, blocks, 4, 32, max_seq_len_kv=500, seq_lens_kv=lens,
                                                     mask_type=mask, **more)
    assert out.isfinite().all() and out.any()


@pytest.mark.parametrize("seed", range(6))
def test_a_synthetic_call_always_sees_something(seed, monkeypatch):
    """An output of zeros is what the store check calls wrong: one valid bit of one key was a coin's throw."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from synthetic_calls import outputs_of, synthetic_call
    paged = PagedBlockSparseSignature(1, 1, 1, 8, 1, 64, 1, 8, 8, use_kv_valid_bits=True)
    for signature, fill in ((paged, 1.0), (QuerySparseSignature(3, 1), 0.006)):
        plan = PlanStore(None).get(signature, "cpu")
        outputs = outputs_of(plan, synthetic_call(signature, "cpu", seed=seed, fill=fill))
        assert all(value.any() for name, value in outputs.items() if name != "lse"), signature.label


@pytest.mark.parametrize("properties", ["5", "null", '["deviceVer"]', '"deviceVer"', "[" * 100_000])
def test_properties_that_are_none(properties, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import build_plans
    (tmp_path / "signatures.json").write_text("[]")
    (tmp_path / "properties.json").write_text(properties)
    monkeypatch.setattr(sys, "argv", ["build_plans.py", str(tmp_path / "signatures.json"), "--store", str(tmp_path / "plans"), "--device-props",
                                      str(tmp_path / "properties.json")])
    assert build_plans.main() == 2


def test_a_check_of_an_engine_that_is_no_name(tmp_path):
    """One bad line ends neither the others nor the table."""
    signature = PAGED.to_json()
    (tmp_path / "signatures.json").write_text(json.dumps([{**signature, "engine": ["sm90"]}, {**signature, "engine": 5}]))
    done = check([tmp_path / "signatures.json", "--store", tmp_path / "plans", "--device", "cpu", "--json"])
    assert done.returncode == 1 and "2 failed" in done.stderr and len(json.loads(done.stdout)["plans"]) == 2, done.stderr


# -- the recorded sweep -------------------------------------------------------------------------------

def test_the_sweeps_signatures():
    """30 different ones, every operation and engine among them, each of which the engine it names serves on an H200."""
    listed = json.loads((ROOT / "scripts" / "signatures_30.json").read_text())
    engines = [data.pop("engine") for data in listed]
    signatures = [Signature.from_json(data) for data in listed]
    assert len({(signature.key, engine) for signature, engine in zip(signatures, engines)}) == 30 and engines.count("cudnn") >= 10
    kinds = {(type(signature), engine) for signature, engine in zip(signatures, engines)}
    assert kinds >= {(kind, engine) for kind in (PagedBlockSparseSignature, SageBlockSparseSignature, QuerySparseSignature) for engine in ("portable", "sm90")}
    for signature, engine in zip(signatures, engines):
        said = verdict(engine, signature.lower(), H200)
        assert said.ok or "install" in said.reason, f"{signature.label}: {said.reason}"
