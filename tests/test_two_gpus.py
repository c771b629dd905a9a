"""Two devices: everything on cuda:1 while cuda:0 is current, one store for both, one process each, and sharded attention on NCCL."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_qsa import bitmap_indices, packed_batch, qkv, random_bitmap
from gpu_operations import PAGED, Captured, busy_case, equal, paged_tensors
from oracle_paged import assert_close, paged_attention
from paged_cases import PagedCase, by_query
from sage_cases import SageCase
from shards import round_robin, shard
from test_paged_gpu import KERNEL_ENGINES, NAN
from test_sharded import SCENARIOS, assert_none_wrong, interleave, spawn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from gpu_sources import TWO_GPUS

import cudnn_graphs.planning.store as store_module
from cudnn_graphs import PlanStore, merge_attention_states
from cudnn_graphs.engines.base import Compiled
from cudnn_graphs.errors import CaptureError
from cudnn_graphs.ops import peer_parts
from cudnn_graphs.ops.sharded import ShardedPagedAttention
from cudnn_graphs.runtime.cubins import CubinCache
from cudnn_graphs.runtime.devices import DeviceFacts
from cudnn_graphs.runtime.streams import is_capturing

two_gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason=TWO_GPUS)]
gpus = lambda test: two_gpus[0](two_gpus[1](test))  # noqa: E731


CUBINS = CubinCache()           # of every store of this process: each kernel is compiled once


def new_store(root: Path | None) -> PlanStore:
    store = PlanStore(root)
    store.cubins = CUBINS
    return store


def on(case: PagedCase, device: str) -> PagedCase:
    """The same call with its tensors on `device`."""
    return PagedCase(**{f: getattr(case, f) for f in case.__dataclass_fields__ if f not in ("tensors", "device")}, device=device).make()


def check(result: tuple[torch.Tensor, torch.Tensor], case: PagedCase) -> None:
    assert_close(*interleave(by_query(*result), paged_attention(case)))


def run(store: PlanStore, case: PagedCase, engine: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    positional, keywords = case.arguments()
    return store.build([case.signature()], case.device, engine=engine)[0].run(*positional, **keywords)


# -- every operation on the device that is not current ------------------------------------------------

def paged_one_shot(device: str, store: PlanStore) -> Any:
    case = on(busy_case("portable"), device)
    result = case.one_shot(store=store)
    check(result, case)
    return result


def sage(device: str, store: PlanStore) -> Any:
    from cudnn_graphs.ops.sage_block_sparse import sage_block_sparse_attention
    case = SageCase(count=3).make().to(device)
    return sage_block_sparse_attention(case.q, case.k, case.v, case.q_scale, case.k_scale, case.v_scale, case.index, case.count, return_lse=True, store=store)


def sage_quantizer(device: str, store: PlanStore) -> Any:
    from cudnn_graphs.ops.sage_quantize import quantize_sage_qkv
    gen = torch.Generator().manual_seed(0)
    return quantize_sage_qkv(*(torch.randn(1, 2, 200, 128, generator=gen).bfloat16().to(device) for _ in range(3)))[:7]


def query_sparse(device: str, store: PlanStore) -> Any:
    from cudnn_graphs.ops.query_sparse import qsa_forward, qsa_indexed_forward
    metadata = packed_batch(4, 40)
    bitmap, (q, k, v) = random_bitmap(metadata, 0.4), (x.to(device) for x in qkv(metadata.lo.numel()))
    indices = bitmap_indices(bitmap, metadata, 64).to(device)
    by_bitmap = qsa_forward(q, k, v, bitmap.to(device), *(x.to(device) for x in metadata), store=store)
    return (*by_bitmap, *qsa_indexed_forward(q, k, v, indices, store=store))


def merged(device: str, store: PlanStore) -> Any:
    gen = torch.Generator().manual_seed(0)
    return merge_attention_states(torch.randn(3, 2, 5, 4, 64, generator=gen).to(device), torch.randn(3, 2, 4, 5, generator=gen).to(device))


OPERATIONS = {f.__name__: f for f in (paged_one_shot, sage, sage_quantizer, query_sparse, merged)}
OPERATIONS |= {f"paged on {engine}": lambda device, store, engine=engine: run(store, on(busy_case(engine), device), engine)
               for engine in (*KERNEL_ENGINES, "reference")}


@gpus
@pytest.mark.parametrize("name", OPERATIONS)
def test_runs_where_its_tensors_are(name, tmp_path):
    """The bits of both devices are equal, whichever is current, and it stays so."""
    store, results = new_store(tmp_path / "plans"), {}
    for current in (0, 1):
        for device in ("cuda:1", "cuda:0"):
            with torch.cuda.device(current):
                results[current, device] = OPERATIONS[name](device, store)
                assert torch.cuda.current_device() == current
    for (_, device), result in results.items():
        assert {str(x.device) for x in result} == {device}
        assert all(torch.equal(x.cpu().view(torch.uint8), y.cpu().view(torch.uint8)) for x, y in zip(result, results[0, "cuda:0"], strict=True))


@gpus
@pytest.mark.parametrize("engine", KERNEL_ENGINES)
def test_threads_that_never_used_cuda_run_on_either_device(engine, tmp_path):
    store, cases = new_store(tmp_path / "plans"), [on(busy_case(engine), f"cuda:{i}") for i in (0, 1)]
    plans = [store.build([case.signature()], case.device, engine=engine)[0] for case in cases]
    want, failures = [run(store, case, engine) for case in cases], []
    outs = [(torch.full_like(out, NAN), torch.full_like(lse, NAN)) for out, lse in want]
    torch.cuda.synchronize(0), torch.cuda.synchronize(1)

    def work(order: tuple[int, ...]) -> None:
        try:
            for i in order:
                positional, keywords = cases[i].arguments()
                plans[i].run(*positional, **keywords, out=outs[i][0], lse=outs[i][1])
        except Exception as error:  # noqa: BLE001 - whatever a thread dies of is the test's failure
            failures.append(error)

    for order in ((1,), (0,), (1, 0, 1), (0, 1, 0)):
        thread = threading.Thread(target=work, args=(order,))
        thread.start()
        thread.join(timeout=30)
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        assert not failures, failures
        for i in set(order):
            assert all(torch.equal(got, expected) for got, expected in zip(outs[i], want[i], strict=True))
            for x in outs[i]:
                x.fill_(NAN)


# -- one store for two devices ------------------------------------------------------------------------

class NoEngine:
    """Builds nothing and remembers for which device it was asked to load."""

    workspace_bytes = 0
    launch = None

    def compile(self, descriptor: Any, device: DeviceFacts, cubins: Any) -> Compiled:
        return Compiled({})

    def load(self, descriptor: Any, device: DeviceFacts, compiled: Compiled) -> NoEngine:
        return NoEngine()

    def source_digest(self, descriptor: Any, device: DeviceFacts) -> str:
        return ""


@pytest.mark.parametrize("on_disk", [False, True])
def test_plans_of_two_equal_devices_share_an_entry_and_nothing_loaded(on_disk, tmp_path, monkeypatch):
    """Two GPUs of one model are one device to the disk."""
    engine = NoEngine()
    monkeypatch.setattr(store_module, "engine_named", lambda name: engine)
    monkeypatch.setattr(store_module, "choose", lambda descriptor, device, engine: ("portable", {}))
    first, second = (DeviceFacts("cuda", index, "one model", (9, 0), 132, 232448, 1 << 26) for index in (0, 1))
    store, signature = PlanStore(tmp_path / "plans" if on_disk else None), PagedCase().make().signature()
    plans = [store.get(signature, device) for device in (first, second, first, second)]
    assert [plan.device.index for plan in plans] == [0, 1, 0, 1]
    smaller = store.get(signature.replace(batch_size=1), second)
    assert smaller.device.index == 1 and smaller.built_for == signature
    assert len(store.entries()) == 1 and store.stats().builds == (1 if on_disk else 2)
    assert store.clear() == 1


@gpus
@pytest.mark.parametrize("engine", KERNEL_ENGINES)
@pytest.mark.parametrize("on_disk", [False, True])
def test_one_store_serves_two_devices(engine, on_disk, tmp_path):
    store, cases = new_store(tmp_path / "plans" if on_disk else None), [on(busy_case(engine, seed=i), f"cuda:{i}") for i in (0, 1)]
    for case in cases * 2:
        check(run(store, case, engine), case)
    assert len(store.entries()) == 1
    store.freeze()
    for case in reversed(cases):
        check(run(store, case, engine), case)


def use_store(index: int, root: str, said: Any) -> None:
    """One process on one GPU: builds or loads, and says what it got."""
    try:
        store, case = PlanStore(root), on(busy_case("portable"), f"cuda:{index}")
        for engine in KERNEL_ENGINES:
            check(run(store, case, engine), case)
        said.put((index, store.stats().builds, store.stats().loads, store.verify()))
    except Exception as error:  # noqa: BLE001 - the parent's test shows it
        said.put((index, repr(error)))


@gpus
def test_two_processes_with_a_gpu_each_share_a_directory(tmp_path):
    context = multiprocessing.get_context("spawn")
    said, root = context.Queue(), str(tmp_path / "plans")
    for together in ((0, 1), (1,), (0,)):
        processes = [context.Process(target=use_store, args=(i, root, said), daemon=True) for i in together]
        for process in processes:
            process.start()
        got = [said.get(timeout=120) for _ in processes]
        for process in processes:
            process.join(timeout=30)
        assert all(len(x) == 4 and x[3] == [] and x[1] + x[2] == len(KERNEL_ENGINES) for x in got), got
    assert got[0][1] == 0, "the last process built what was on disk"


# -- CUDA graphs --------------------------------------------------------------------------------------

@gpus
@pytest.mark.parametrize("engine", KERNEL_ENGINES)
def test_a_graph_captured_on_the_second_device(engine, tmp_path):
    cases = [on(busy_case(engine, seed=seed), "cuda:1") for seed in range(2)]
    plan = new_store(tmp_path / "plans").build([cases[0].signature()], "cuda:1", engine=engine)[0]
    calls = [paged_tensors(case) for case in cases]
    want = [PAGED.run(plan, tensors) for tensors in calls]
    with torch.cuda.device(1):
        assert not is_capturing()
        captured = Captured(PAGED, plan, calls)
    for i in (0, 1, 0):                     # replayed while cuda:0 is current
        captured.prepare(calls[i])
        captured.graph.replay()
        torch.cuda.synchronize(1)
        assert equal(captured.outputs, want[i])


@gpus
def test_a_capture_on_another_device_is_refused(tmp_path):
    """Its launches would run at once and not be in the graph: torch's own capture stream is of the device of the process's first capture."""
    case = on(busy_case("portable"), "cuda:1")
    plan = new_store(tmp_path / "plans").build([case.signature()], "cuda:1", engine="portable")[0]
    tensors = paged_tensors(case)
    want = PAGED.run(plan, tensors)
    graph, here = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda:0")
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(0)):
        here += 1
        with pytest.raises(CaptureError, match="captured on cuda:0; need a capture on cuda:1"):
            PAGED.run(plan, tensors, **want)
    graph.replay()
    assert float(here) == 1 and torch.cuda.current_device() == 0


# -- NCCL ---------------------------------------------------------------------------------------------

GLOO_ALONE = {"drawn_calls_of_the_surface", "every_relation_of_page_and_block", "a_smaller_batch_and_a_smaller_group"}    # a plan a case: minutes of compiling
NCCL = [name for name in SCENARIOS if name not in GLOO_ALONE]


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[dict[str, str]]:
    return spawn(2, tmp_path_factory.mktemp("ranks"), "nccl", NCCL)


@gpus
@pytest.mark.parametrize("name", NCCL)
def test_on_nccl(said, name):
    assert_none_wrong(said, name)


def compare_with_one_gpu(rank: int, root: str, failed: Any) -> None:
    """A decode batch split over two GPUs, eager and replayed from a graph, against one GPU that holds everything."""
    import torch.distributed as dist
    try:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2, device_id=device)
        case = PagedCase(batch=8, seq_len_q=1, q_block_size=1, num_qo_heads=32, num_kv_heads=4, head_dim=128, kv_block_size=64, page_size=64,
                         max_seq_len_kv=4000, blocks_per_row=20, bits=True, mask_type="causal").make()
        store = PlanStore(Path(root, "plans"))
        whole = run(store, on(case, str(device)))
        graphs = [check_split(case, rank, device, store, whole, largest) for largest in (peer_parts.LARGEST_PART, 0)]
        failed.put("")
        dist.barrier()
        del graphs                          # before their communicator
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - the parent's test shows it
        failed.put(repr(error))


def check_split(case: PagedCase, rank: int, device: torch.device, store: PlanStore, whole: tuple[torch.Tensor, torch.Tensor], largest_part: int) -> Any:
    """Parts up to `largest_part` by peer memory, others by NCCL's all-gather."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_parts, "LARGEST_PART", largest_part)
        sharded = ShardedPagedAttention(case.signature(), device=device, store=store)
    assert sharded.exchange.startswith("peer memory" if largest_part else "all-gather"), sharded.exchange
    positional, keywords = shard(case, round_robin(2), rank, str(device))
    eager = sharded.run(*positional, **keywords)
    out, lse = torch.full_like(whole[0], NAN), torch.full_like(whole[1], NAN)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):       # NCCL's watchdog may ask for events meanwhile
        sharded.run(*positional, **keywords, out=out, lse=lse)
    for turn in range(5):                   # the ranks drift apart: each leads in turn
        if turn % 2 == rank:
            torch.cuda._sleep(1 << 20)
        out.fill_(NAN), lse.fill_(NAN)
        graph.replay()
    torch.cuda.synchronize()
    check((out, lse), case)
    assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])
    again = sharded.run(*positional, **keywords)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    assert (out.float() - whole[0].float()).norm() / whole[0].float().norm() < 3.5e-3 and (lse - whole[1]).abs().max() < 1e-5
    return graph


@gpus
def test_sharded_decode_in_a_graph_agrees_with_one_gpu(tmp_path):
    context = multiprocessing.get_context("spawn")
    failed = context.Queue()
    ranks = [context.Process(target=compare_with_one_gpu, args=(r, str(tmp_path), failed), daemon=True) for r in (0, 1)]
    for process in ranks:
        process.start()
    try:
        for _ in ranks:
            assert failed.get(timeout=120) == ""
        for process in ranks:
            process.join(timeout=30)
    finally:
        for process in ranks:               # a rank whose peer has failed waits for it
            process.kill()
