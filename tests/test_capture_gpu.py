"""CUDA graphs of every operation on every engine: replays read everything anew, share nothing, and outlive the store."""

from __future__ import annotations

import gc

import pytest
import torch
from gpu_operations import OPERATIONS, SERVED, Captured, busy_case, equal, inputs_of, new_store, on_gpu

from cudnn_graphs import BlockSparsePagedTSWrapper, Plan, PlanStore
from cudnn_graphs.errors import CaptureError
from cudnn_graphs.planning import verdict
from cudnn_graphs.runtime import cudnn_plans
from cudnn_graphs.runtime.devices import device_facts

pytestmark = pytest.mark.gpu

each_engine = pytest.mark.parametrize("name, engine", SERVED)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> PlanStore:
    return new_store(tmp_path_factory.mktemp("captured"))


def planned(store: PlanStore, name: str, engine: str) -> Plan:
    signature = inputs_of(name, engine, 0)[0]
    said = verdict(engine, signature.lower(), device_facts("cuda"))
    if not said.ok:
        pytest.skip(said.reason)
    return store.build([signature], "cuda", engine=engine, pin=False)[0]


@each_engine
def test_a_replay_reads_everything_again(name, engine, store):
    operation, plan = OPERATIONS[name], planned(store, name, engine)
    calls = [inputs_of(name, engine, seed)[1] for seed in range(4)]
    want = [operation.run(plan, tensors) for tensors in calls]
    assert not any(equal(a, b) for a, b in zip(want, want[1:], strict=False)), "the calls are alike: this proves nothing"
    captured = Captured(operation, plan, calls)
    for i in (0, 1, 2, 3, 0):
        captured.prepare(calls[i])
        captured.graph.replay()
        assert equal(captured.outputs, want[i]), f"call {i}"


@each_engine
def test_two_captures_of_one_plan_replayed_interleaved(name, engine, store):
    operation, plan = OPERATIONS[name], planned(store, name, engine)
    calls = [inputs_of(name, engine, seed)[1] for seed in range(2)]
    want = [operation.run(plan, tensors) for tensors in calls]
    both = [Captured(operation, plan, [tensors]) for tensors in calls]
    streams = [torch.cuda.Stream() for _ in both]
    for turn in range(6):
        for captured, tensors in zip(both, calls, strict=True):
            captured.prepare(tensors)
        torch.cuda.synchronize()
        for captured, stream in zip(both, streams, strict=True):
            with torch.cuda.stream(stream if turn else torch.cuda.current_stream()):        # one stream first, then two at once
                captured.graph.replay()
        torch.cuda.synchronize()
        for captured, expected in zip(both, want, strict=True):
            assert equal(captured.outputs, expected), f"turn {turn}"


@each_engine
def test_a_replay_beside_runs_of_the_same_plan(name, engine, store):
    """The graph's workspace is its own, not the one that the plan keeps for a stream."""
    operation, plan = OPERATIONS[name], planned(store, name, engine)
    calls = [inputs_of(name, engine, seed)[1] for seed in range(2)]
    want = [operation.run(plan, tensors) for tensors in calls]
    captured, other = Captured(operation, plan, calls[:1]), torch.cuda.Stream()
    for _ in range(10):
        captured.prepare(calls[0])
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            captured.graph.replay()
        beside = operation.run(plan, calls[1])
        torch.cuda.synchronize()
        assert equal(captured.outputs, want[0]) and equal(beside, want[1])


def test_captured_cudnn_plans_do_not_pile_up_with_builds(tmp_path):
    """They are kept for the process's life, one of those that can stand in for each other."""
    kept = []
    for build in range(3):
        store = new_store(tmp_path / str(build))
        signature, tensors = inputs_of("paged", "cudnn", 0)
        plan = store.build([signature], "cuda", engine="cudnn")[0]
        Captured(OPERATIONS["paged"], plan, [tensors])
        kept.append(len(cudnn_plans._captured))
    assert kept[0] == kept[2] > 0


@each_engine
def test_a_graph_outlives_its_plan_and_its_store(name, engine, store, tmp_path):
    """Cleared, evicted, dropped and collected, with the freed memory written over."""
    operation = OPERATIONS[name]
    planned(store, name, engine)
    signature, tensors = inputs_of(name, engine, 0)
    own = new_store(tmp_path)
    own.max_entries = 1
    plan = own.get(signature, "cuda", engine)
    want = operation.run(plan, tensors)
    captured = Captured(operation, plan, [tensors])
    assert own.clear() == 1
    evicting = own.get(inputs_of("qsa_indexed", "portable", 0)[0], "cuda", "portable")
    plan = own.get(signature, "cuda", engine)           # as new, which pushes the other out, and is pushed out by it
    del evicting, plan
    own.get(inputs_of("qsa_indexed", "portable", 0)[0], "cuda", "portable")
    own.clear()
    del own
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(16)]
    for _ in range(3):
        captured.prepare(tensors)
        captured.graph.replay()
        assert equal(captured.outputs, want)
    del junk


def test_capture_refuses_what_it_cannot_record(store, tmp_path):
    """Building, loading and clearing, and the calls that would plan; runs of plans that are there go on."""
    served = [(name, engine) for name, engine in SERVED if verdict(engine, inputs_of(name, engine, 0)[0].lower(), device_facts("cuda")).ok]
    plans = {pair: planned(store, *pair) for pair in served}
    want = {pair: OPERATIONS[pair[0]].run(plan, inputs_of(*pair, 0)[1]) for pair, plan in plans.items()}
    case = on_gpu(busy_case("portable"))
    empty, unread, wrapper = PlanStore(tmp_path / "plans"), PlanStore(store.root), BlockSparsePagedTSWrapper()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        got = {}
        for pair, plan in plans.items():
            signature, tensors = inputs_of(*pair, 0)
            with pytest.raises(CaptureError, match="got building .* startup"):
                empty.get(signature, "cuda", pair[1])
            with pytest.raises(CaptureError, match="got loading .* startup"):
                unread.get(signature, "cuda", pair[1])
            got[pair] = OPERATIONS[pair[0]].run(plan, tensors)
        with pytest.raises(CaptureError, match="got clearing the store"):
            store.clear()
        with pytest.raises(CaptureError, match="plan\\(\\) before, run\\(\\) inside"):
            case.one_shot(store=store)
        with pytest.raises(CaptureError, match="call plan\\(\\) first"):
            wrapper.plan(2, 40, 300, 4, 2, 128, 16, 32, 16, device="cuda", store=empty)
    assert empty.stats().builds == 0 and not empty.entries() and unread.stats().loads == 0
    graph.replay()
    assert all(equal(got[pair], want[pair]) for pair in plans)
