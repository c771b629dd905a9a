"""Steady state of every operation: nothing allocated, nothing waited for, and threads on streams give the serial bits."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from gpu_operations import OPERATIONS, SERVED, equal, inputs_of, new_store

from cudnn_graphs import PlanStore
from cudnn_graphs.planning import verdict
from cudnn_graphs.runtime.devices import device_facts

pytestmark = pytest.mark.gpu

THREADS, STREAMS, ROUNDS, SEEDS = 8, 4, 150, 3


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> PlanStore:
    return new_store(tmp_path_factory.mktemp("serving"))


def served(name: str, engine: str) -> str | None:
    """Why not, or None."""
    said = verdict(engine, inputs_of(name, engine, 0)[0].lower(), device_facts("cuda"))
    return None if said.ok else said.reason


@pytest.mark.parametrize("name, engine", SERVED)
def test_run_neither_allocates_nor_synchronizes(name, engine, store):
    if reason := served(name, engine):
        pytest.skip(reason)
    operation, (signature, tensors) = OPERATIONS[name], inputs_of(name, engine, 0)
    plan = store.get(signature, "cuda", engine)
    want = operation.run(plan, tensors)
    outputs = {name: torch.full_like(value, float("nan")) for name, value in want.items()}
    for validate in (True, False):
        operation.run(plan, tensors, **outputs, validate=validate)       # the plan keeps a workspace from here on
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for validate in (True, False):
            operation.run(plan, tensors, **outputs, validate=validate)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert equal(outputs, want)


def test_threads_and_streams_give_the_serial_bits(store, record_property):
    """Every thread takes its plans from the store, on streams of its own, each with a workspace that the plan keeps for it."""
    jobs = [(OPERATIONS[name], engine, *inputs_of(name, engine, seed)) for name, engine in SERVED if served(name, engine) is None for seed in range(SEEDS)]
    serial = [operation.run(store.get(signature, "cuda", engine), tensors) for operation, engine, signature, tensors in jobs]
    torch.cuda.synchronize()
    failures: list[Any] = []
    runs = [0] * THREADS

    def work(me: int) -> None:
        draw = random.Random(me)
        try:
            streams = [torch.cuda.Stream() for _ in range(STREAMS)]
            for _ in range(ROUNDS):
                results = []
                for stream in streams:
                    at = draw.randrange(len(jobs))
                    operation, engine, signature, tensors = jobs[at]
                    with torch.cuda.stream(stream):
                        results.append((at, operation.run(store.get(signature, "cuda", engine), tensors)))
                for stream, (at, result) in zip(streams, results, strict=True):
                    with torch.cuda.stream(stream):
                        runs[me] += 1
                        if not equal(result, serial[at]):
                            failures.append((me, at))
            assert torch.cuda.current_device() == 0 and torch.cuda.current_stream() == torch.cuda.default_stream()
        except Exception as error:  # noqa: BLE001 - whatever a thread dies of is the test's failure
            failures.append(error)

    before = store.stats()
    threads = [threading.Thread(target=work, args=(me,), daemon=True) for me in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    record_property("runs", sum(runs))
    record_property("signatures", len({(engine, signature) for _, engine, signature, _ in jobs}))
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures[:5]
    after = store.stats()
    assert sum(runs) == THREADS * STREAMS * ROUNDS == after.hits - before.hits and after.builds == before.builds
