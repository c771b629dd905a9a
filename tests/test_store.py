"""The plan store: what is found, built, loaded, refused, evicted and never believed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import json
import logging
import multiprocessing
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import H200
from paged_cases import PagedCase

from cudnn_graphs import PagedBlockSparseSignature, PlanMissError, PlanStore
from cudnn_graphs.engines.base import Compiled
from cudnn_graphs.errors import CaptureError, CudnnGraphsError
from cudnn_graphs.planning import default_store, process_store
from cudnn_graphs.planning import plan as plan_module
from cudnn_graphs.planning import store as store_module
from cudnn_graphs.planning.process_store import default_root
from cudnn_graphs.planning.signature import Signature
from cudnn_graphs.runtime import environment, streams
from cudnn_graphs.runtime import files as files_module
from cudnn_graphs.runtime.cubins import CubinCache
from cudnn_graphs.runtime.devices import DeviceFacts
from cudnn_graphs.runtime.nvrtc import Cubin, KernelSource, Resources
from cudnn_graphs.runtime.streams import on_device

CODE = bytes(random.Random(0).randbytes(3000))


def signature(**changes: Any) -> PagedBlockSparseSignature:
    facts = dict(batch_size=2, seq_len_q=16, max_seq_len_kv=512, num_qo_heads=4, num_kv_heads=2, head_dim=64, q_block_size=8, kv_block_size=16, page_size=16)
    return PagedBlockSparseSignature(**{**facts, **changes})


class StubEngine:
    """An engine whose plans are 3000 bytes that must come back as they were."""

    name = "reference"

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.loaded = 0
        self.digest = "sources as they are"
        self.before_compile = lambda: None

    def compile(self, descriptor: Any, device: Any, cubins: Any) -> Compiled:
        self.compiled.append(descriptor)
        self.before_compile()
        return Compiled({"config": {}, "workspace_bytes": 0, "kernels": [{"name": "stub"}]}, {"code": CODE})

    def load(self, descriptor: Any, device: Any, compiled: Compiled) -> Any:
        assert compiled.parts == {"code": CODE}, "a damaged payload reached the engine"
        self.loaded += 1
        return type("Executable", (), {"workspace_bytes": 0, "launch": lambda *a: None})()

    def source_digest(self, descriptor: Any, device: Any) -> str:
        return self.digest


@pytest.fixture
def engine(monkeypatch) -> StubEngine:
    stub = StubEngine()
    monkeypatch.setattr(store_module, "engine_named", lambda name: stub)
    return stub


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "plans"


@pytest.fixture
def warnings(caplog) -> Iterator[Any]:
    """The warnings logged since the last call of what it returns."""
    caplog.set_level(logging.WARNING, logger="cudnn_graphs")

    def taken() -> list[str]:
        texts = [r.getMessage() for r in caplog.records if r.name == "cudnn_graphs"]
        caplog.clear()
        return texts
    return taken


def counts(store: PlanStore) -> dict[str, int]:
    return {n: v for n, v in store.stats().to_json().items() if v and not n.endswith("seconds")}


def entry_files(root: Path) -> tuple[Path, Path]:
    """Header and payload of the one entry of a directory."""
    (header,) = root.glob("*.plan.json")
    return header, header.with_suffix("")


# -- lookup -------------------------------------------------------------------------------------------

def test_miss_then_hits(engine):
    store = PlanStore()
    plans = [store.get(signature(), "cpu") for _ in range(3)]
    assert plans[0] is plans[1] is plans[2]
    assert counts(store) == {"misses": 1, "builds": 1, "hits": 2} and len(engine.compiled) == 1
    assert store.stats().build_seconds > 0 and plans[0].describe()["build_seconds"] > 0


def test_a_fit_is_counted_apart_and_the_smallest_that_fits_serves(engine):
    store = PlanStore()
    for batch in (64, 8, 16):
        store.build([signature(batch_size=batch)], "cpu")
    store.build([signature(batch_size=8, head_dim=128)], "cpu")
    for _ in range(2):
        plan = store.get(signature(batch_size=3), "cpu")
        assert plan.built_for == signature(batch_size=8) and plan.signature == signature(batch_size=3)
        assert plan.describe()["serves"] == signature(batch_size=3).to_json()
    assert counts(store) == {"misses": 4, "builds": 4, "fits": 2}
    assert "serves" not in store.get(signature(batch_size=8), "cpu").describe()


def test_a_fit_from_disk(engine, root):
    PlanStore(root).build([signature(batch_size=8)], "cpu")
    store = PlanStore(root)
    assert store.get(signature(), "cpu").built_for == signature(batch_size=8)
    assert counts(store) == {"fits": 1, "loads": 1}


def test_build_is_exact_where_get_would_fit(engine):
    store = PlanStore()
    large, small = store.build([signature(batch_size=8), signature()], "cpu")
    assert (large.built_for, small.built_for) == (signature(batch_size=8), signature()) and counts(store)["builds"] == 2


def test_memory_only_writes_nothing(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    store = PlanStore(None)
    store.build([signature()], "cpu")
    assert list(tmp_path.rglob("*")) == [] and store.entries()[0]["where"] == "memory"


def test_a_lookup_in_memory_touches_no_file(engine, root, monkeypatch):
    store = PlanStore(root)
    store.build([signature()], "cpu")
    monkeypatch.setattr(Path, "open", None)
    monkeypatch.setattr(Path, "read_bytes", None)
    monkeypatch.setattr(store_module, "choose", None)
    for _ in range(3):
        store.get(signature(), "cpu")
    assert counts(store) == {"misses": 1, "builds": 1, "hits": 3}


def test_single_flight(engine):
    store = PlanStore()
    engine.before_compile = lambda: time.sleep(0.05)
    together, plans = threading.Barrier(16), []

    def ask() -> None:
        together.wait(timeout=10)
        plans.append(store.get(signature(), "cpu"))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(plans) == 16 and len(engine.compiled) == 1 and len({id(p._built) for p in plans}) == 1
    assert counts(store) == {"misses": 1, "builds": 1, "hits": 15}


def test_different_plans_build_at_the_same_time(engine):
    store, both = PlanStore(), threading.Barrier(2)
    engine.before_compile = lambda: both.wait(timeout=10)        # neither passes before the other has come
    threads = [threading.Thread(target=store.build, args=([signature(head_dim=d)], "cpu")) for d in (64, 128)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not both.broken and counts(store)["builds"] == 2


def test_a_failed_build_is_tried_again(engine):
    store = PlanStore()
    engine.before_compile = lambda: (_ for _ in ()).throw(RuntimeError("no compiler"))
    with pytest.raises(RuntimeError, match="no compiler"):
        store.get(signature(), "cpu")
    engine.before_compile = lambda: None
    assert store.get(signature(), "cpu").engine == "reference" and counts(store)["builds"] == 1


# -- freezing -----------------------------------------------------------------------------------------

def test_frozen_misses_name_the_nearest_signature_and_the_command(engine, root):
    store = PlanStore(root)
    store.build([signature(), signature(head_dim=128, dtype="float16", seq_len_q=77)], "cpu")
    store.freeze()
    assert store.frozen
    wanted = signature(head_dim=256, batch_size=3)
    with pytest.raises(PlanMissError) as caught:
        store.get(wanted, "cpu")
    text = str(caught.value)
    assert text.startswith(f"signature: got {wanted.label} for reference on cpu, which the frozen store does not hold; ")
    assert f"nearest cached: {signature().label}, differing in batch_size 3 (cached: 2), head_dim 256 (cached: 64); " in text
    assert f"echo '{json.dumps([wanted.to_json()])}' | python scripts/build_plans.py - --store {root}" in text
    assert len(engine.compiled) == 2 and counts(store) == {"misses": 3, "builds": 2}
    assert isinstance(caught.value, RuntimeError)


def test_frozen_hits_and_fits_are_served_and_thaw_builds_again(engine, root):
    PlanStore(root).build([signature(batch_size=8)], "cpu")
    store = PlanStore(root)
    store.freeze()
    assert store.get(signature(batch_size=8), "cpu").engine == "reference"
    assert store.get(signature(batch_size=5), "cpu").built_for.batch_size == 8
    with pytest.raises(PlanMissError, match="batch_size 9 .cached: 8."):
        store.get(signature(batch_size=9), "cpu")
    store.thaw()
    assert store.get(signature(batch_size=9), "cpu").built_for.batch_size == 9


def test_a_frozen_empty_store_says_it_is_empty(engine):
    store = PlanStore()
    store.freeze()
    with pytest.raises(PlanMissError, match="the store holds none of this type"):
        store.get(signature(), "cpu")


# -- the directory ------------------------------------------------------------------------------------

def test_a_second_process_builds_nothing(root):
    """The real engine, another interpreter, the same bits."""
    case = PagedCase().make()
    first = PlanStore(root)
    first.build([case.signature()], "cpu")
    code = """
import sys, json
sys.path.insert(0, sys.argv[2])
from devices import H200
from paged_cases import PagedCase
from cudnn_graphs import PlanStore
case = PagedCase().make()
store = PlanStore(sys.argv[1])
positional, keywords = case.arguments()
plan = store.get(case.signature(), "cpu")
out, lse = plan.run(*positional, **keywords)
print(json.dumps([store.stats().to_json(), plan.describe()["load_seconds"], out.double().sum().item()]))
"""
    said = subprocess.run([sys.executable, "-c", code, str(root), str(Path(__file__).parent)], capture_output=True, text=True, timeout=120, check=True)
    stats, load_seconds, total = json.loads(said.stdout)
    assert (stats["builds"], stats["misses"], stats["loads"]) == (0, 0, 1) and load_seconds > 0
    positional, keywords = case.arguments()
    assert total == first.get(case.signature(), "cpu").run(*positional, **keywords)[0].double().sum().item()
    assert PlanStore(root).entries()[0]["hits"] == 1


def test_an_entry_says_everything(engine, root):
    store = PlanStore(root)
    plan = store.build([signature()], "cpu")[0]
    (entry,) = PlanStore(root).entries()
    assert entry["signature"] == signature().to_json() and entry["label"] == signature().label and entry["signature_key"] == signature().key
    assert (entry["engine"], entry["device"]["name"], entry["where"], entry["hits"], entry["pinned"]) == ("reference", "cpu", "disk", 0, False)
    assert entry["payload_bytes"] > 3000 and entry["build_seconds"] > 0 and entry["versions"]["torch"] == torch.__version__
    assert entry["environment"] == {"package": environment.package_version()} and entry["declined"].keys() == {"cudnn", "portable", "sm90"}
    (here,) = store.entries()
    assert here["where"] == "memory, disk" and here["pinned"]
    described = plan.describe()
    assert {n: described[n] for n in ("key", "signature", "compiled", "device", "source_digest")} == {
        n: entry[n] for n in ("key", "signature", "compiled", "device", "source_digest")}
    json.dumps(described)


def test_files_are_private_and_nothing_temporary_stays(engine, root):
    PlanStore(root).build([signature()], "cpu")
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert {p.suffix for p in root.iterdir()} == {".plan", ".json"}
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in root.iterdir())


def damaged_once(engine: StubEngine, root: Path, warnings: Any) -> None:
    """The one entry is a miss with one warning, is built anew, and is then sound again."""
    warnings()
    built = len(engine.compiled)
    store = PlanStore(root)
    store.get(signature(), "cpu")
    store.get(signature(), "cpu")
    assert counts(store) == {"misses": 1, "builds": 1, "hits": 1} and len(engine.compiled) == built + 1
    said = warnings()
    assert len(said) == 1 and "will be built anew" in said[0], said
    again = PlanStore(root)
    again.get(signature(), "cpu")
    assert counts(again) == {"loads": 1} and again.verify() == [] and warnings() == []


def flips() -> list[tuple[str, float, int]]:
    """File, relative offset and bit: all over the header and the payload."""
    rng = random.Random(1)
    return [(part, rng.random(), rng.randrange(8)) for part in ("header",) * 70 + ("payload",) * 40]


def test_bit_flips(engine, root, warnings):
    PlanStore(root).build([signature()], "cpu")
    files = dict(zip(("header", "payload"), entry_files(root)))
    for part, where, bit in flips():
        data = bytearray(files[part].read_bytes())
        data[int(where * len(data))] ^= 1 << bit
        files[part].write_bytes(data)
        assert PlanStore(root).verify() != []
        damaged_once(engine, root, warnings)


@pytest.mark.parametrize("part", ["header", "payload"])
@pytest.mark.parametrize("change", [
    lambda data: b"", lambda data: data[:len(data) // 2], lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"\xff" * len(data),
    lambda data: b"[1, 2]", lambda data: b'{"record": {}, "sha256": ""}', lambda data: b"null",
], ids=["empty", "half", "one byte short", "one byte long", "noise", "list", "other record", "null"])
def test_truncated_and_foreign_files(engine, root, warnings, part, change):
    PlanStore(root).build([signature()], "cpu")
    path = dict(zip(("header", "payload"), entry_files(root)))[part]
    path.write_bytes(change(path.read_bytes()))
    damaged_once(engine, root, warnings)


def test_an_entry_under_another_entrys_name(engine, root, warnings):
    store = PlanStore(root)
    store.build([signature(), signature(head_dim=128)], "cpu")
    mine, other = (next(e["key"] for e in store.entries() if e["signature"]["head_dim"] == d) for d in (64, 128))
    for suffix in (".plan", ".plan.json"):
        shutil.copy(root / f"{other}{suffix}", root / f"{mine}{suffix}")
    assert [key for key, _ in PlanStore(root).verify()] == [mine]
    warnings()
    again = PlanStore(root)
    assert again.build([signature()], "cpu")[0].built_for.head_dim == 64 and counts(again)["builds"] == 1
    assert len(warnings()) == 1


def test_a_header_alone_and_a_payload_alone_are_misses(engine, root):
    """What a process killed while it wrote or deleted leaves behind."""
    for remove in (0, 1):
        PlanStore(root).build([signature()], "cpu")
        entry_files(root)[remove].unlink()
        store = PlanStore(root)
        store.get(signature(), "cpu")
        assert counts(store) == {"misses": 1, "builds": 1}


def test_a_payload_that_the_loader_refuses_is_built_anew(engine, root, warnings, monkeypatch):
    PlanStore(root).build([signature()], "cpu")
    store, load, failed = PlanStore(root), engine.load, []

    def refuse_once(*args: Any) -> Any:
        if not failed:
            failed.append(True)
            raise RuntimeError("ARCH_MISMATCH")
        return load(*args)

    monkeypatch.setattr(engine, "load", refuse_once)
    store.get(signature(), "cpu")
    assert counts(store) == {"misses": 1, "builds": 1}
    said = warnings()
    assert len(said) == 1 and "ARCH_MISMATCH" in said[0]


def test_another_version_is_a_miss(engine, root, warnings, monkeypatch):
    PlanStore(root).build([signature()], "cpu")
    monkeypatch.setattr(environment, "package_version", lambda: "99.0")
    damaged_once(engine, root, warnings)


def test_other_kernel_sources_are_a_miss(engine, root, warnings):
    PlanStore(root).build([signature()], "cpu")
    engine.digest = "sources as they are now"
    damaged_once(engine, root, warnings)


def gpu(**changes: Any) -> DeviceFacts:
    facts = dict(kind="cuda", index=None, name="NVIDIA H200", capability=(9, 0), sm_count=132, smem_per_block=232448, l2_bytes=62914560)
    return DeviceFacts(**{**facts, **changes})


def test_another_devices_entry_is_listed_and_never_served(engine, root):
    PlanStore(root).build_ahead(signature(batch_size=64), gpu(), "reference")
    store = PlanStore(root)
    assert [e["device"]["name"] for e in store.entries()] == ["NVIDIA H200"]
    for other in ("cpu", gpu(sm_count=114), gpu(smem_per_block=101376), gpu(name="NVIDIA H100"), gpu(l2_bytes=1)):
        assert store.get(signature(), other, "reference").built_for == signature()
    assert counts(store) == {"misses": 5, "builds": 5}
    assert store.get(signature(), gpu(), "reference").built_for == signature(batch_size=64)


def test_another_devices_files_under_this_devices_name(engine, root, warnings):
    store = PlanStore(root)
    ahead = store.build_ahead(signature(), gpu(), "reference")["key"]
    store.build([signature()], "cpu")
    mine = next(e["key"] for e in store.entries() if e["device"]["kind"] == "cpu")
    for suffix in (".plan", ".plan.json"):
        (root / f"{mine}{suffix}").unlink()
        (root / f"{ahead}{suffix}").rename(root / f"{mine}{suffix}")
    damaged_once(engine, root, warnings)


def test_a_refusal_on_one_device_is_no_refusal_on_another(root):
    store = PlanStore(root)
    with pytest.raises(NotImplementedError, match="portable on cpu"):
        store.get(signature(), "cpu", "portable")
    with pytest.raises(NotImplementedError, match="sm90 on NVIDIA A100"):
        store.build_ahead(signature(), gpu(name="NVIDIA A100", capability=(8, 0)), "sm90")


def test_build_ahead_needs_a_directory(engine):
    with pytest.raises(CudnnGraphsError, match="store: got memory only; need a directory"):
        PlanStore().build_ahead(signature(), gpu(), "reference")


# -- many processes -----------------------------------------------------------------------------------

def _share(root: Path, seed: int, failures: Any) -> None:
    try:
        order = [signature(batch_size=b) for b in range(1, 21)]
        random.Random(seed).shuffle(order)
        store = PlanStore(root)
        store.build(order, "cpu")
        assert len(store.entries()) == 20
    except BaseException as error:  # noqa: BLE001 - the parent reports it
        failures.put(repr(error))


def test_eight_processes_share_a_directory(engine, root, warnings):
    context = multiprocessing.get_context("fork")
    failures = context.Queue()
    processes = [context.Process(target=_share, args=(root, seed, failures)) for seed in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        assert process.exitcode == 0
    assert failures.empty(), failures.get()
    store = PlanStore(root)
    assert store.verify() == [] and len(store.entries()) == 20
    store.build([signature(batch_size=b) for b in range(1, 21)], "cpu")
    assert counts(store) == {"loads": 20} and warnings() == []
    assert list(root.glob(".tmp-*")) == []


# -- directories that are not for us ------------------------------------------------------------------

def refuse_writes(monkeypatch: Any) -> None:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(30, "Read-only file system")
    monkeypatch.setattr(files_module.tempfile, "mkstemp", refused)


def test_a_read_only_directory_still_serves_and_new_plans_stay_in_memory(engine, root, warnings, monkeypatch):
    PlanStore(root).build([signature()], "cpu")
    before = sorted(root.iterdir())
    refuse_writes(monkeypatch)
    store = PlanStore(root)
    store.get(signature(), "cpu")
    assert warnings() == []
    store.build([signature(head_dim=128), signature(head_dim=256)], "cpu")
    store.get(signature(head_dim=128), "cpu")
    assert counts(store) == {"loads": 1, "misses": 2, "builds": 2, "hits": 1}
    said = warnings()
    assert len(said) == 1 and "cannot be written" in said[0] and "Read-only file system" in said[0] and "CUDNN_GRAPHS_CACHE_DIR" in said[0]
    assert [p for p in sorted(root.iterdir()) if p.suffix != ".uses"] == before


def test_a_directory_that_cannot_be_made(engine, tmp_path, warnings):
    (tmp_path / "file").write_text("")
    store = PlanStore(tmp_path / "file" / "plans")
    store.build([signature(), signature(head_dim=128)], "cpu")
    assert counts(store) == {"misses": 2, "builds": 2} and len(store.entries()) == 2
    said = warnings()
    assert len(said) == 1 and "cannot be written" in said[0]


def test_a_disk_that_fills_up_later_warns_once(engine, root, warnings, monkeypatch):
    store = PlanStore(root)
    store.build([signature()], "cpu")
    refuse_writes(monkeypatch)
    store.build([signature(head_dim=128), signature(head_dim=256)], "cpu")
    assert len(warnings()) == 1 and counts(store)["builds"] == 3


def others_can_write(root: Path) -> None:
    root.chmod(0o777)


def group_can_write(root: Path) -> None:
    root.chmod(0o770)


def kernels_beside_it_are_writable(root: Path) -> None:
    (root.parent / "kernels").mkdir(exist_ok=True)
    (root.parent / "kernels").chmod(0o777)


@pytest.mark.parametrize("spoil", [others_can_write, group_can_write, kernels_beside_it_are_writable])
def test_a_directory_that_others_can_write_to_is_not_used(engine, root, warnings, spoil):
    PlanStore(root).build([signature()], "cpu")
    before = sorted(root.iterdir())
    spoil(root)
    store = PlanStore(root)
    store.build([signature(), signature(head_dim=128)], "cpu")
    assert counts(store) == {"misses": 2, "builds": 2} and store.root is None and sorted(root.iterdir()) == before
    said = warnings()
    assert len(said) == 1 and "chmod go-w" in said[0] and "trust=True" in said[0]
    trusted = PlanStore(root, trust=True)
    trusted.get(signature(), "cpu")
    assert counts(trusted) == {"loads": 1} and warnings() == []


def test_a_directory_of_another_user_is_not_used(engine, root, warnings, monkeypatch):
    PlanStore(root).build([signature()], "cpu")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 12345)
    store = PlanStore(root)
    store.get(signature(), "cpu")
    assert counts(store) == {"misses": 1, "builds": 1}
    said = warnings()
    assert len(said) == 1 and f"belongs to user {owner}" in said[0] and f"chown {owner + 12345} {root}" in said[0]
    trusted = PlanStore(root, trust=True)
    trusted.get(signature(), "cpu")
    assert counts(trusted) == {"loads": 1}


# -- bounds -------------------------------------------------------------------------------------------

def held(store: PlanStore, where: str) -> set[int]:
    return {e["signature"]["batch_size"] for e in store.entries() if where in e["where"]}


def test_memory_evicts_the_least_recently_used_by_count(engine):
    store = PlanStore(max_entries=3)
    store.build([signature(batch_size=b) for b in (1, 2, 3)], "cpu", pin=False)
    store.get(signature(batch_size=1), "cpu")
    store.build([signature(batch_size=4)], "cpu", pin=False)
    assert held(store, "memory") == {1, 3, 4} and store.stats().evictions == 1


def test_memory_evicts_by_bytes(engine):
    store = PlanStore(max_bytes=7000)       # two plans of 3000 bytes and their index
    store.build([signature(batch_size=b) for b in (1, 2, 3, 4)], "cpu", pin=False)
    assert held(store, "memory") == {3, 4} and store.stats().evictions == 2


def test_pinned_plans_are_never_evicted(engine, root):
    store = PlanStore(root, max_entries=2)
    store.build([signature(batch_size=b) for b in (1, 2)], "cpu")
    store.build([signature(batch_size=b) for b in (3, 4, 5)], "cpu", pin=False)
    assert {1, 2} <= held(store, "memory") and {1, 2} <= held(store, "disk")
    assert held(store, "disk") == {1, 2, 5} == held(store, "memory")


def test_an_evicted_plan_that_is_in_use_keeps_working(engine):
    store = PlanStore(max_entries=1)
    plan = store.get(signature(), "cpu")
    store.get(signature(head_dim=128), "cpu")
    assert plan.describe()["signature"] == signature().to_json() and plan.workspace_bytes == 0
    store.get(signature(), "cpu")
    assert counts(store)["builds"] == 3 and [entry["hits"] for entry in store.entries()] == [0]


def test_the_directory_evicts_the_least_recently_loaded(engine, root):
    store = PlanStore(root, max_entries=3)
    for batch in (1, 2, 3):
        store.build([signature(batch_size=batch)], "cpu", pin=False)
        header = max(root.glob("*.json"), key=lambda p: p.stat().st_mtime_ns)
        os.utime(header, (1000 + batch, 1000 + batch))
    again = PlanStore(root, max_entries=3)
    again.build([signature(batch_size=1)], "cpu", pin=False)       # a load is a use
    again.build([signature(batch_size=4)], "cpu", pin=False)
    assert held(PlanStore(root), "disk") == {1, 3, 4}


def test_the_directory_evicts_by_bytes(engine, root):
    store = PlanStore(root, max_bytes=7000)
    store.build([signature(batch_size=b) for b in (1, 2, 3, 4)], "cpu", pin=False)
    assert len(list(root.glob("*.plan"))) == len(list(root.glob("*.plan.json"))) == 2 and PlanStore(root).verify() == []


def test_temporary_files_of_a_killed_process_are_swept_after_an_hour(engine, root):
    store = PlanStore(root)
    store.build([signature()], "cpu")
    old, young = root / ".tmp-old", root / ".tmp-young"
    old.write_text(""), young.write_text("")
    os.utime(old, (time.time() - 3700,) * 2)
    store.build([signature(head_dim=128)], "cpu")
    assert not old.exists() and young.exists()


def test_clear_forgets_memory_and_directory(engine, root):
    store = PlanStore(root)
    plan = store.build([signature(), signature(head_dim=128)], "cpu")[0]
    store.get(signature(), "cpu")
    assert store.clear() == 2 and store.entries() == [] and list(root.iterdir()) == []
    assert plan.describe()["engine"] == "reference"
    store.get(signature(), "cpu")
    assert counts(store)["builds"] == 3


def test_verify_names_what_is_damaged(engine, root):
    store = PlanStore(root)
    store.build([signature(), signature(head_dim=128)], "cpu")
    assert store.verify() == [] and PlanStore().verify() == []
    payload = next(root.glob("*.plan"))
    payload.write_bytes(payload.read_bytes()[:-1] + b"?")
    assert [(key, "checksum" in why) for key, why in store.verify()] == [(payload.name.removesuffix(".plan"), True)]


# -- capture ------------------------------------------------------------------------------------------

def test_nothing_is_built_loaded_cleared_or_evicted_under_capture(engine, root, monkeypatch):
    PlanStore(root).build([signature(head_dim=128)], "cpu")
    store = PlanStore(root, max_entries=2)
    store.get(signature(), "cpu")
    monkeypatch.setattr(store_module, "is_capturing", lambda device=None: True)
    before = counts(store)
    with pytest.raises(CaptureError, match="loading plan"):
        store.get(signature(head_dim=128), "cpu")
    with pytest.raises(CaptureError, match="building paged"):
        store.get(signature(head_dim=256), "cpu")
    with pytest.raises(CaptureError, match="clearing the store"):
        store.clear()
    assert store.get(signature(), "cpu").engine == "reference"
    after = counts(store)
    assert (after["builds"], after.get("loads"), after.get("evictions")) == (before["builds"], None, None)


# -- defaults and the cubin cache ---------------------------------------------------------------------

def test_default_root(monkeypatch, tmp_path):
    assert default_root() == Path(os.environ["CUDNN_GRAPHS_CACHE_DIR"])
    assert default_store().root == default_root() / "plans" and default_store() is default_store()
    monkeypatch.delenv("CUDNN_GRAPHS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "cudnn_graphs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "cudnn_graphs"


def test_kernels_lie_beside_the_plans(tmp_path):
    assert PlanStore(tmp_path / "plans").cubins.directory == tmp_path / "kernels"
    assert PlanStore(tmp_path / "mine").cubins.directory == tmp_path / "mine" / "kernels"
    assert PlanStore().cubins.directory is None


SOURCE = KernelSource("stub_kernel", "extern \"C\" __global__ void stub_kernel() {}\n", threads=32)


@pytest.fixture
def compiler(monkeypatch) -> list[str]:
    """Stands in for NVRTC; what it compiled."""
    compiled: list[str] = []

    def compile_cubin(source: KernelSource, arch: str) -> Cubin:
        compiled.append(f"{source.entry} {arch}")
        return Cubin(CODE, Resources(8, 0, 0, source.smem_bytes, source.threads), "log")

    from cudnn_graphs.runtime import cubins
    monkeypatch.setattr(cubins, "compile_cubin", compile_cubin)
    monkeypatch.setattr(cubins, "nvrtc_version", lambda: (13, 0))
    return compiled


def test_a_cubin_is_compiled_once_per_source_and_architecture(compiler, tmp_path):
    first, second = CubinCache(tmp_path), CubinCache(tmp_path)
    for cache in (first, first, second):
        assert cache.get(SOURCE, "sm_90a").image == CODE
    second.get(SOURCE, "sm_80")
    second.get(KernelSource("stub_kernel", SOURCE.text + " ", threads=32), "sm_80")
    assert compiler == ["stub_kernel sm_90a", "stub_kernel sm_80", "stub_kernel sm_80"]


def test_a_damaged_cubin_is_compiled_again(compiler, tmp_path, warnings):
    CubinCache(tmp_path).get(SOURCE, "sm_90a")
    (path,) = tmp_path.glob("*.cubin")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert CubinCache(tmp_path).get(SOURCE, "sm_90a").image == CODE and len(compiler) == 2 and len(warnings()) == 1
    assert CubinCache(tmp_path).get(SOURCE, "sm_90a").image == CODE and len(compiler) == 2


def test_a_cubin_cache_that_cannot_be_written_warns_once(compiler, tmp_path, warnings, monkeypatch):
    cache = CubinCache(tmp_path)
    refuse_writes(monkeypatch)
    cache.get(SOURCE, "sm_90a"), cache.get(SOURCE, "sm_80"), cache.get(SOURCE, "sm_90a")
    assert len(compiler) == 2 and len(warnings()) == 1


def test_a_cubin_cache_is_bounded(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(CubinCache, "max_entries", 3)
    cache = CubinCache(tmp_path)
    for i in range(8):
        source = KernelSource("stub_kernel", f"{SOURCE.text}// {i}", threads=32)
        assert cache.get(source, "sm_80") is cache.get(source, "sm_80")
        assert len(cache._memory) <= 3 and len(cache._building) <= 3
        assert len(list(tmp_path.glob("*.cubin"))) == len(list(tmp_path.glob("*.cubin.json"))) == min(i + 1, 3)
    assert len(compiler) == 8
    CubinCache(tmp_path).get(source, "sm_80")
    assert len(compiler) == 8, "the newest was deleted"
    lone = tmp_path / "of-a-process-that-ended-between-image-and-header.cubin"
    lone.write_bytes(CODE)
    os.utime(lone, (0, 0))
    CubinCache(tmp_path).get(SOURCE, "sm_89")
    assert not lone.exists()


def test_a_kernel_of_no_plan_is_loaded_once_and_goes_with_its_cache(compiler, monkeypatch):
    from cudnn_graphs.runtime import launch
    capturing = []
    monkeypatch.setattr(streams, "is_capturing", lambda device: bool(capturing))
    monkeypatch.setattr(launch, "LoadedKernel", lambda cubin, entry, index: (cubin.image, entry, index))
    device, cache = dataclasses.replace(H200, index=0), CubinCache()
    capturing.append(True)
    with pytest.raises(CaptureError, match="stub_kernel: got a first call under CUDA graph capture"):
        cache.loaded(SOURCE, device)
    capturing.clear()
    kernel = cache.loaded(SOURCE, device)
    capturing.append(True)
    assert cache.loaded(SOURCE, device) is kernel == (CODE, "stub_kernel", 0) and len(compiler) == 1
    alive = weakref.ref(cache)
    del cache
    gc.collect()
    assert alive() is None


def test_nothing_is_printed(engine, root, capfd):
    PlanStore(root).build([signature()], "cpu")
    assert capfd.readouterr() == ("", "")


# -- what an adversary tried ----------------------------------------------------------------------------

def plant(root: Path, key: str, header: dict[str, Any], payload: bytes = b"x") -> None:
    """A record whose checksums agree, whatever its header says."""
    root.mkdir(exist_ok=True, mode=0o700)
    files_module.write_atomic(root / f"{key}.plan", payload, header)


def test_sound_records_of_foreign_content_are_misses(engine, root, warnings):
    """Another format's, a mangled and a deeply nested header must not stop a lookup, a listing or a write."""
    PlanStore(root).build([signature()], "cpu")
    good = json.loads(next(root.glob("*.json")).read_text())["record"]["header"]
    changes: list[dict[str, Any]] = [{"format": 2}, {"signature": [1]}, {"signature": {**good["signature"], "type": ["x"]}}, {"created": "yesterday"},
                                     {"device": 7}, {"engine": None}, {"signature": {**good["signature"], "batch_size": 2**31}}]
    plant(root, "0" * 40, {})
    for i, change in enumerate(changes, 1):
        plant(root, str(i) * 40, {**good, "key": str(i) * 40, **change})
    (root / f"{'9' * 40}.plan.json").write_text("[" * 200_000)
    store = PlanStore(root)
    assert store.get(signature(batch_size=64), "cpu").built_for.batch_size == 64 and counts(store) == {"misses": 1, "builds": 1}
    assert {e["signature"]["batch_size"] for e in store.entries()} == {2, 64, 2**31} and len(set(warnings())) == 8
    store.freeze()
    with pytest.raises(PlanMissError):
        store.get(signature(batch_size=65), "cpu")


def test_a_header_that_claims_more_than_its_key_is_never_served(engine, root, warnings):
    """A listing that says "fits" is only a candidate; what was loaded is asked again, and its name is made of its signature."""
    PlanStore(root).build([signature()], "cpu")
    path, _ = entry_files(root)
    good = json.loads(path.read_text())["record"]["header"]
    larger = signature(batch_size=900)
    plant(root, good["key"], {**good, "signature": larger.to_json(), "signature_key": larger.key}, CODE)
    store = PlanStore(root)
    for wanted in (signature(), signature(batch_size=800)):
        assert store.get(wanted, "cpu").built_for == wanted
    assert counts(store) == {"misses": 2, "builds": 2} and any("does not match its key" in text for text in warnings())


def test_what_a_caller_does_to_a_listing_changes_nothing(engine, root):
    store = PlanStore(root)
    plan = store.build([signature()], "cpu")[0]
    for opened in (store, PlanStore(root)):
        for said in (plan.describe(), *opened.entries()):
            said["signature"]["batch_size"] = 900
            said["compiled"]["kernels"].clear()
        assert plan.describe()["signature"] == opened.entries()[0]["signature"] == signature().to_json()
        assert plan.describe()["compiled"]["kernels"] == [{"name": "stub"}]
        assert opened.get(signature(batch_size=800), "cpu").built_for.batch_size == 800
        opened.clear()
        PlanStore(root).build([signature()], "cpu")


def test_a_plan_built_later_that_fits_better_is_used(engine):
    store = PlanStore()
    for batch in (64, 8, 3):
        store.build([signature(batch_size=batch)], "cpu", engine="reference")
        assert store.get(signature(batch_size=3), "cpu").built_for.batch_size == batch


def test_nothing_grows_with_the_number_of_signatures_asked(engine):
    store = PlanStore(max_entries=4)
    store.build([signature(batch_size=1000)], "cpu")
    for batch in range(1, 200):
        store.get(signature(batch_size=batch), "cpu")
        with pytest.raises(NotImplementedError):
            store.get(signature(batch_size=batch), "cpu", "portable")
    assert len(store._views) <= 16 and len(store._refused) <= 4 and store._flights == {}
    assert counts(store) == {"misses": 1, "builds": 1, "fits": 199}


def test_an_evicted_plan_is_let_go(engine):
    store = PlanStore(max_entries=1)
    built = weakref.ref(store.get(signature(), "cpu")._built.executable)
    store.get(signature(head_dim=128), "cpu")
    gc.collect()
    assert built() is None, "its workspaces are still held"


def test_threads_while_the_directory_is_deleted(engine, root):
    """Lookups, listings and clears of six threads; the directory goes every few ms."""
    logging.getLogger("cudnn_graphs").setLevel(logging.CRITICAL)
    store, failures, until = PlanStore(root, max_entries=10), [], time.monotonic() + 1.5

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < until:
                wanted = signature(batch_size=rng.randrange(1, 40), head_dim=rng.choice([64, 128]))
                plan = store.get(wanted, "cpu")
                assert plan.signature == wanted and plan.built_for.fits(wanted)
                rng.choice([store.entries, store.verify, store.stats, store.clear, *[lambda: None] * 40])()
        except BaseException as error:  # noqa: BLE001 - reported by the test
            failures.append(repr(error))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    while time.monotonic() < until:
        shutil.rmtree(root, ignore_errors=True)
        time.sleep(0.01)
    for thread in threads:
        thread.join(timeout=30)
    logging.getLogger("cudnn_graphs").setLevel(logging.NOTSET)
    assert failures == [] and store._flights == {}
    stats = store.stats()
    assert stats.builds == stats.misses == len(engine.compiled)


def test_killed_writers_leave_nothing_damaged_that_is_served(root):
    code = """
import random, sys
sys.path.insert(0, sys.argv[1])
from test_store import StubEngine, signature, store_module
from cudnn_graphs import PlanStore
stub = StubEngine()
store_module.engine_named = lambda name: stub
store = PlanStore(sys.argv[2])
print("ready", flush=True)
while True:
    store.build([signature(batch_size=random.randrange(1, 9))], "cpu")
    store.clear()
"""
    for pause in (0.05, 0.11):
        writer = subprocess.Popen([sys.executable, "-c", code, str(Path(__file__).parent), str(root)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        time.sleep(pause)
        writer.kill()
        writer.wait(timeout=30)
    stub = StubEngine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "engine_named", lambda name: stub)
        PlanStore(root).build([signature(batch_size=b) for b in range(1, 9)], "cpu")
        again = PlanStore(root)
        again.build([signature(batch_size=b) for b in range(1, 9)], "cpu")
        assert counts(again) == {"loads": 8} and again.verify() == []


def test_orphans_of_a_killed_process_are_swept_after_an_hour(engine, root):
    store = PlanStore(root)
    store.build([signature()], "cpu")
    orphans = [root / f"{'a' * 40}{suffix}" for suffix in (".plan", ".uses")]
    for orphan in orphans:
        orphan.write_text("")
        os.utime(orphan, (time.time() - 3700,) * 2)
    for path in entry_files(root):
        os.utime(path, (time.time() - 3700,) * 2)
    store.build([signature(head_dim=128)], "cpu")
    assert not any(orphan.exists() for orphan in orphans) and len(list(root.glob("*.plan"))) == 2 and store.verify() == []


def test_a_directory_that_others_open_after_the_store_was_opened(engine, root, warnings):
    PlanStore(root).build([signature()], "cpu")
    for spoil in (lambda: root.chmod(0o777), lambda: None):
        store = PlanStore(root)
        spoil()
        store.build([signature(), signature(head_dim=128)], "cpu")
        assert counts(store) == {"misses": 2, "builds": 2} and store.root is None and len(list(root.glob("*.plan"))) == 1
        said = warnings()
        assert len(said) == 1 and "others can write to it" in said[0]


def test_a_directory_out_of_reach_is_memory_only(engine, tmp_path, warnings, monkeypatch):
    """As of a user whose HOME is another's: every look raises PermissionError."""
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")
    store = PlanStore(tmp_path / "plans")
    refuse_writes(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refused)
        patch.setattr(Path, "stat", refused)
        store.build([signature(), signature(head_dim=128)], "cpu")
    assert counts(store) == {"misses": 2, "builds": 2} and len(warnings()) == 1


def test_default_store_is_one_however_many_threads_are_first(monkeypatch):
    monkeypatch.setattr(process_store, "_default", None)
    opened, together = [], threading.Barrier(8)

    def ask() -> None:
        together.wait(timeout=10)
        opened.append(default_store())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(opened) == 8 and len(set(map(id, opened))) == 1


def test_default_store_without_a_home_directory(monkeypatch, warnings):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")
    monkeypatch.setattr(process_store, "_default", None)
    monkeypatch.setattr(process_store, "default_root", homeless)
    assert default_store().root is None
    said = warnings()
    assert len(said) == 1 and "CUDNN_GRAPHS_CACHE_DIR" in said[0]


def test_another_kernels_cubin_under_this_name(compiler, tmp_path, warnings):
    first = CubinCache(tmp_path)
    first.get(SOURCE, "sm_80"), first.get(SOURCE, "sm_90a")
    old, new = sorted(tmp_path.glob("*.cubin"))
    for suffix in ("", ".json"):
        shutil.copy(f"{old}{suffix}", f"{new}{suffix}")
    CubinCache(tmp_path).get(SOURCE, "sm_90a")
    assert compiler[2:] == ["stub_kernel sm_90a"] and len(warnings()) == 1
    CubinCache(tmp_path).get(SOURCE, "sm_90a")
    assert len(compiler) == 3


def test_threads_on_one_stream_do_not_interleave_their_launches(monkeypatch):
    """They share the stream's workspace: kernels of two runs in between each other would read each other's partial results."""
    monkeypatch.setattr(plan_module, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(plan_module, "current_raw_stream", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(DeviceFacts, "torch_device", torch.device("cpu"))
    launched: list[tuple[int, int]] = []

    class ThreeLaunches:
        workspace_bytes = 256

        def launch(self, arguments: Any, workspace: int, stream: int) -> None:
            for _ in range(3):
                launched.append((threading.get_ident(), workspace))
                time.sleep(0.002)

    shared = plan_module.Plan(signature(), plan_module.BuiltPlan(signature(), gpu(index=0), "reference", ThreeLaunches(), {}, 0, {}, threading.Lock()))
    threads = [threading.Thread(target=shared.launch, args=(None,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len({workspace for _, workspace in launched}) == 1
    assert all(len(set(launched[i:i + 3])) == 1 for i in range(0, 18, 3))


def test_launches_beside_a_capture_on_another_device_are_refused(monkeypatch):
    """They would run at once, and the graph be without them."""
    capturing = iter((True, False, True, True, False))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(capturing))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(streams, "bind_context", lambda index: None)
    device = DeviceFacts("cuda", 0, "H200", (9, 0), 132, 232448, 1 << 26)
    said = r"got a CUDA graph being captured on cuda:1; need a capture on cuda:0.*torch.cuda.Stream\(0\)"
    with pytest.raises(CaptureError, match=said), on_device(device):
        raise AssertionError("launched")
    for _ in range(2):                  # captured on both, as a fork of one capture is; not captured at all
        with on_device(device):
            pass


@pytest.mark.parametrize("entries", [0, -3])
def test_a_store_that_may_keep_nothing(entries):
    with pytest.raises(ValueError, match="max_entries: got .*; need at least 1"):
        PlanStore(max_entries=entries)


def test_what_is_no_store_no_signature_and_no_path_is_said_so(root, engine):
    store = PlanStore(root)
    refused = {
        (ValueError, "root: got an empty path"): lambda: PlanStore(""),
        (TypeError, "max_entries, max_bytes: got 'a'"): lambda: PlanStore(root, max_entries="a"),
        (TypeError, "signatures: got .*build"): lambda: store.build(signature(), "cpu"),
        (TypeError, "signature: got NoneType"): lambda: store.get(None, "cpu"),
        (TypeError, "store: got str; need a PlanStore"): lambda: process_store.store_or_default(str(root)),
        (ValueError, r"signature: got \[1\]"): lambda: Signature.from_json([1]),
        (ValueError, "signature: got {"): lambda: Signature.from_json({"type": [1]}),
    }
    for (error, words), call in refused.items():
        with pytest.raises(error, match=words):
            call()


def test_a_copied_module_keeps_its_plans(root, engine):
    plan = PlanStore(root).get(signature(), "cpu")
    assert copy.deepcopy({"plan": plan})["plan"] is plan


def test_an_entry_that_cannot_be_listed_is_not_loaded(engine, root):
    PlanStore(root).build([signature()], "cpu")
    (path,) = root.glob("*.plan")
    payload, header = files_module.read_record(path)
    files_module.write_atomic(path, payload, {name: value for name, value in header.items() if name != "created"})
    store = PlanStore(root)
    store.get(signature(), "cpu")
    assert counts(store) == {"misses": 1, "builds": 1} and len(store.entries()) == 1
