"""Sharded attention on gloo with two and three processes, against the oracle: one spawn a world size, every scenario in it.

test_two_gpus.py runs the same scenarios on NCCL.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bad_rows import WIDTH, assert_only_bad_rows_changed, break_row, clean_case, kinds_of
from cases_qsa import correlated_bitmap, packed_batch, qkv, random_bitmap
from oracle_paged import assert_close, paged_attention
from oracle_qsa import bitmap_keys, errors, oracle_bitmap
from paged_cases import GARBAGE_PAGE, PagedCase, by_query
from paged_surface import drawn, heads
from shards import Owner, all_on, at_random, by_request, middle, round_robin, shard, stretches

from cudnn_graphs import PlanStore, merge_attention_states
from cudnn_graphs.engines.held_paged import HeldDesign
from cudnn_graphs.engines.portable_paged import PortablePagedDesign
from cudnn_graphs.engines.shard_kernels import (
    HeldLists,
    Inboxes,
    exchange_parts,
    exchange_source,
    gathered_source,
    held_source,
    load_kernels,
    merge_gathered,
    with_held_blocks,
)
from cudnn_graphs.errors import CudnnGraphsError
from cudnn_graphs.ops import peer_parts
from cudnn_graphs.ops.gathered_parts import PartLayout
from cudnn_graphs.ops.sharded import ShardedPagedAttention, sharded_qsa_forward
from cudnn_graphs.runtime.devices import DeviceFacts, device_facts
from cudnn_graphs.runtime.nvrtc import compile_cubin
from cudnn_graphs.runtime.streams import current_raw_stream

NAN = float("nan")
DRAWN = 8
Scenario = Callable[[int, int], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(check: Scenario) -> Scenario:
    SCENARIOS[check.__name__] = check
    return check


# -- running them -------------------------------------------------------------------------------------

class Here:
    """Where the scenarios of this process run."""

    device = "cpu"
    store = PlanStore()


def rank_main(rank: int, world: int, directory: str, backend: str, names: list[str]) -> None:
    """One rank: the scenarios in turn; what it said of each is left in a file."""
    torch.set_num_threads(1)
    if backend == "nccl":
        Here.device, Here.store = f"cuda:{rank}", PlanStore(Path(directory, "plans"))
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60),
                            device_id=torch.device(Here.device) if backend == "nccl" else None)
    said = {}
    for name in names:
        try:
            SCENARIOS[name](rank, world)
            said[name] = ""
        except Exception:  # noqa: BLE001 - the parent's test shows it
            said[name] = traceback.format_exc()[-1500:]
    Path(directory, f"rank{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def spawn(world: int, directory: Path, backend: str, names: list[str]) -> list[dict[str, str]]:
    """What each rank said of each scenario."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(r, world, str(directory), backend, names), daemon=True) for r in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=240)
    late = [process for process in ranks if process.is_alive()]
    for process in late:
        process.kill()
    assert not late and all(process.exitcode == 0 for process in ranks), f"exit codes {[process.exitcode for process in ranks]}"
    return [json.loads((directory / f"rank{r}.json").read_text()) for r in range(world)]


def assert_none_wrong(said: list[dict[str, str]], name: str) -> None:
    wrong = [f"rank {rank}:\n{of[name]}" for rank, of in enumerate(said) if of[name]]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module", params=[2, 3], ids=["two ranks", "three ranks"])
def said(request, tmp_path_factory) -> list[dict[str, str]]:
    return spawn(request.param, tmp_path_factory.mktemp("ranks"), "gloo", list(SCENARIOS))


# -- the paged operation ------------------------------------------------------------------------------

def planned(case: PagedCase, **changes) -> ShardedPagedAttention:
    return ShardedPagedAttention(case.signature(page_stride=None, **changes), device=Here.device, store=Here.store)


def check(case: PagedCase, owner: Owner, rank: int) -> None:
    """Against float64, and the same bits on every rank."""
    positional, keywords = shard(case, owner, rank, Here.device)
    out, lse = (x.cpu() for x in by_query(*planned(case).run(*positional, **keywords)))
    assert_close(*interleave((out, lse), paged_attention(case)))
    same_everywhere(out.view(torch.int16), lse)


def interleave(got, want):
    return got[0], want[0], got[1], want[1]


def same_everywhere(*tensors: torch.Tensor) -> None:
    digest = hashlib.sha256(b"".join(t.cpu().contiguous().numpy().tobytes() for t in tensors)).hexdigest()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digest)
    assert len(set(everyone)) == 1, "ranks differ in bits"


@scenario
def masks_are_those_of_the_whole_sequence(rank, world):
    for seed, masks in enumerate(({}, {"mask_type": "causal"}, {"bits": True}, {"mask_type": "causal", "bits": True})):
        case = PagedCase(seq_len_q=40, q_block_size=16, max_seq_len_kv=300, blocks_per_row=12, seed=seed, **masks).make()
        for owner in (round_robin(world), stretches(world), middle(world), at_random(world)):
            check(case, owner, rank)


@scenario
def a_rank_may_have_nothing_visible(rank, world):
    case = PagedCase(mask_type="causal", bits=True).make()
    for owner in (all_on(0), all_on(world - 1), by_request(world)):
        check(case, owner, rank)
    check(PagedCase(blocks_per_row=0).make(), round_robin(world), rank)
    check(PagedCase(lens=[0, 77, 0], batch=3).make(), round_robin(world), rank)


@scenario
def drawn_calls_of_the_surface(rank, world):
    for seed in range(DRAWN):
        check(PagedCase(**{**drawn(seed), "batch": 2}).make(), at_random(world, seed), rank)


@scenario
def every_relation_of_page_and_block(rank, world):
    for page_size, kv_block_size in ((8, 64), (64, 8), (16, 192), (256, 320), (64, 64)):
        check(PagedCase(page_size=page_size, kv_block_size=kv_block_size, max_seq_len_kv=700, **heads(2)).make(), round_robin(world), rank)


@scenario
def rows_bad_by_their_metadata_are_zero(rank, world):
    """Those that every rank can tell: a page is one rank's affair."""
    for mask_type in ("dense", "causal"):
        case = clean_case(mask_type, "block_tables")
        op = planned(case, max_blocks_per_row=WIDTH)
        positional, keywords = shard(case, round_robin(world), rank, Here.device)
        clean = op.run(*positional, **keywords)
        for kind in kinds_of(mask_type, "block_tables"):
            if "page" in kind:
                continue
            broken, rows = break_row(case, kind)
            metadata = (x.to(Here.device) for x in (broken.seq_lens, broken.block_indptr, broken.block_indices))
            assert_only_bad_rows_changed(case, rows, clean, op.run(*positional[:4], *metadata, **keywords))


@scenario
def outputs_are_written_where_the_caller_says(rank, world):
    case = PagedCase(strided_q=True).make()
    positional, keywords = shard(case, round_robin(world), rank, Here.device)
    wide = torch.full((2, 16, 8, 64), NAN, dtype=case.dtype, device=Here.device)
    out, lse = wide[:, :, 2:6], torch.full((2, 4, 16), NAN, device=Here.device)
    result = planned(case).run(*positional, **keywords, out=out, lse=lse)
    assert result[0] is out and result[1] is lse
    assert_close(*interleave(by_query(out, lse), paged_attention(case)))
    assert wide[:, :, :2].isnan().all() and wide[:, :, 6:].isnan().all()
    silent = planned(case, return_lse=False)
    assert torch.equal(silent.run(*positional, **keywords), out)
    try:
        silent.run(*positional, **keywords, lse=lse)
        raise AssertionError("lse was accepted")
    except ValueError as error:
        assert "return_lse" in str(error)


@scenario
def a_smaller_batch_and_a_smaller_group(rank, world):
    groups = [dist.new_group([r]) for r in range(world)]
    case = PagedCase(mask_type="causal").make()
    positional, keywords = shard(case, all_on(0), 0, Here.device)
    op = ShardedPagedAttention(case.signature(batch_size=5, max_seq_len_kv=1000), group=groups[rank], device=Here.device, store=Here.store)
    assert_close(*interleave(by_query(*op.run(*positional, **keywords)), paged_attention(case)))
    try:
        ShardedPagedAttention(case.signature(), group=groups[(rank + 1) % world], device=Here.device, store=Here.store)
        raise AssertionError("a foreign group was accepted")
    except CudnnGraphsError as error:
        assert "group: got" in str(error)


@scenario
def parts_too_large_for_an_inbox_are_gathered(rank, world):
    """To the same bits. Batches of changing size, in turns."""
    cases = [PagedCase(batch=batch, mask_type="causal", seed=batch).make() for batch in (3, 1, 2, 3)]
    results = []
    for largest in (peer_parts.LARGEST_PART, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer_parts, "LARGEST_PART", largest)
            op = planned(cases[0], max_seq_len_kv=1000)
        assert (op.exchange == "peer memory") == (Here.device != "cpu" and largest > 0), op.exchange
        for case in cases:
            positional, keywords = shard(case, at_random(world), rank, Here.device)
            results.append(op.run(*positional, **keywords))
            assert_close(*interleave(by_query(*results[-1]), paged_attention(case)))
    half = len(cases)
    assert all(torch.equal(x, y) for a, b in zip(results[:half], results[half:]) for x, y in zip(a, b))


@scenario
def ranks_that_disagree_are_told(rank, world):
    case = PagedCase().make()
    planned(case, kv_layout=("tuple", "combined")[rank % 2])      # a cache is a rank's own affair
    try:
        planned(case, batch_size=2 + rank)
        raise AssertionError("unequal signatures were accepted")
    except ValueError as error:
        assert "'batch_size': (2, 3)" in str(error)


@scenario
def shards_are_checked_when_asked(rank, world):
    for page_table in ("indptr", "block_tables"):
        case = PagedCase(page_table=page_table, kv_block_size=64).make()
        positional, keywords = shard(case, round_robin(world), rank, Here.device)
        op = planned(case)

        def verdict(page, op=op, positional=positional, keywords=keywords):
            """What is said once rank 0 has `page` for the second page of request 1."""
            _, _, indptr, indices, lens, *_ = positional
            table = keywords["block_tables"]
            if rank == 0 and page is not None:
                indices, table = (None if x is None else x.clone() for x in (indices, table))
                if table is None:
                    indices[int(indptr[1]) + 1] = page
                else:
                    table[1, 1] = page
            try:
                op.check_shards(indptr, indices, lens, block_tables=table)
            except ValueError as error:
                return str(error)
            return ""

        held_by_0 = round_robin(world)(1, 0, 4) == 0
        assert verdict(None) == ""
        assert ("2 holders of page 1 of request 1" in verdict(1)) != held_by_0
        assert ("0 holders of page 1 of request 1" in verdict(-1)) == held_by_0
        torn, _ = shard(PagedCase(page_table="indptr", kv_block_size=16).make(), round_robin(world), rank, Here.device)
        try:
            op.check_shards(torn[2], torn[3], torn[4])
            raise AssertionError("blocks torn apart were accepted")
        except ValueError as error:
            assert "pages apart from the first of their block" in str(error)


# -- packed query-sparse attention --------------------------------------------------------------------

def token_shards(total: int, world: int) -> list[list[int]]:
    """Where each rank's tokens begin and the last end: uneven, blocks cut, one rank without any."""
    return [[0, *(1 + total * r // world for r in range(1, world)), total], [0, total // 7 + 1] + [total] * (world - 1), [0] * world + [total]]


@scenario
def query_sparse_attention_over_token_shards(rank, world):
    for causal, select in ((True, random_bitmap), (False, correlated_bitmap), (False, lambda metadata, _: torch.zeros_like(random_bitmap(metadata, 0.3)))):
        metadata = packed_batch(4, 14, causal=causal)
        selected = select(metadata, 0.3 if causal else 2)
        q, k, v = qkv(metadata.lo.numel())
        want = oracle_bitmap(q, k, v, selected, metadata, 1 / 16)
        attended = {key for t in range(len(q)) for key in bitmap_keys(t, selected, *metadata[:2], *metadata[4:], len(q))}
        unseen = [t for t in range(len(q)) if t not in attended]
        k[unseen], v[unseen] = NAN, NAN
        for ends in token_shards(len(k), world):
            mine = slice(ends[rank], ends[rank + 1])
            given = (x.to(Here.device) for x in (q, k[mine], v[mine], selected, *metadata))
            out, out_fp32, lse = sharded_qsa_forward(*given, first_token=mine.start, store=Here.store)
            assert torch.equal(out, out_fp32.bfloat16())
            for got in (out, out_fp32):
                overall, worst, lse_error = errors(got, lse, *want)
                assert overall < 3.5e-3 and worst < 1e-2 and lse_error < 1e-4
            same_everywhere(out_fp32, lse)


@scenario
def query_sparse_refuses_a_shard_outside_the_batch(rank, world):
    metadata = packed_batch(2, 10)
    q, k, v = qkv(metadata.lo.numel())
    try:
        sharded_qsa_forward(*(x.to(Here.device) for x in (q, k, v, random_bitmap(metadata, 0.3), *metadata)), first_token=1, store=Here.store)
        raise AssertionError("accepted")
    except ValueError as error:
        assert "first_token: got 1 with" in str(error)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_gloo(said, name):
    assert_none_wrong(said, name)


# -- without a group ----------------------------------------------------------------------------------

def decoding(**changes: Any) -> PagedCase:
    """So many requests that a row gets one CTA."""
    return PagedCase(**{"batch": 70, "seq_len_q": 1, "q_block_size": 1, "num_qo_heads": 16, "num_kv_heads": 2, "head_dim": 128, "kv_block_size": 64,
                        "page_size": 64, "max_seq_len_kv": 500, "page_table": "block_tables", **changes}).make()


DECODING: dict[str, dict[str, Any]] = {
    "as it is": {}, "many requests": {"batch": 140, "page_table": "indptr"}, "bits": {"bits": True}, "no blocks": {"blocks_per_row": 0},
    "causal": {"seq_len_q": 3, "q_block_size": 4, "mask_type": "causal"}, "empty requests": {"lens": [0, 1, 500, 64, 0] * 14},
    "small blocks": {"kv_block_size": 8, "page_size": 16, "head_dim": 64},
    "large blocks": {"kv_block_size": 128, "shared_pattern": True, "dtype": torch.float16}, "wide heads": {"head_dim": 256, "max_seq_len_kv": 300},
}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("changes", [{}, {"page_table": "block_tables", "shared_pattern": True}, {"seq_len_q": 1}, {"seq_len_q": 8300, "batch": 1}],
                         ids=["indptr", "table, shared", "one row", "many rows"])
def test_held_blocks_are_listed_in_order_and_others_are_not(changes, device):
    case = PagedCase(**{"seq_len_q": 40, "max_seq_len_kv": 300, "page_size": 8, "poison": None, **changes}).make()
    owner, facts = at_random(2), device_facts(device)
    for rank in (0, 1):
        positional, keywords = shard(case, owner, rank, device)
        given = case.signature().bind(facts, *positional, **keywords)
        (batch, heads_listed, ends), width = given.block_indptr.shape, given.max_blocks_per_row
        lists = HeldLists.of(batch + 1, heads_listed, ends - 1, width, facts.torch_device)      # room for one request more
        kept = with_held_blocks(given, lists, facts, PlanStore().cubins)
        (indptr, indices), (kept_indptr, kept_indices) = (((a.block_indptr.tolist(), a.block_indices.tolist())) for a in (given, kept))
        for b, length in enumerate(case.seq_lens.tolist()):
            for h in range(len(indptr[b])):
                for r in range(case.rows):
                    listed = indices[indptr[b][h][r]:indptr[b][h][r + 1]]
                    left = kept_indices[kept_indptr[b][h][r]:kept_indptr[b][h][r + 1]]
                    assert left == [j for j in listed if owner(b, j, -(-length // 16)) == rank]


@pytest.mark.gpu
@pytest.mark.parametrize("changes", DECODING.values(), ids=DECODING)
def test_attention_over_held_blocks_has_the_bits_of_two_launches(changes):
    """Rows whose CTA takes blocks off its list itself, clean and bad ones, against the plan over lists that a launch before made."""
    case, facts, cubins = decoding(**changes), device_facts("cuda"), Here.store.cubins
    signature = case.signature()
    design = HeldDesign.of(signature.lower(), facts, 2)
    if design is None:
        pytest.skip("this GPU splits such rows")
    kernel, plan = cubins.loaded(design.kernel, facts), Here.store.get(signature, "cuda", "portable")
    heads = 1 if case.shared_pattern else case.num_kv_heads
    lists = HeldLists.of(case.batch, heads, 1, signature.max_blocks_per_row, facts.torch_device)
    for rank in (0, 1):
        positional, keywords = shard(case, at_random(2), rank, "cuda")
        given = signature.bind(facts, *positional, **keywords)
        for broken in (False, True):
            if broken:
                given.block_indices[given.block_indptr[2, heads - 1, 0].long()] = GARBAGE_PAGE
                given.block_indptr[3, 0, 1] = given.block_indptr[3, 0, 0] - 1
                given.seq_lens[4], given.seq_lens[5] = -1, case.max_seq_len_kv + 1
            given.out.fill_(NAN), given.lse.fill_(NAN)
            plan.launch(with_held_blocks(given, lists, facts, cubins))
            want = given.out.clone(), given.lse.clone()
            given.out.fill_(NAN), given.lse.fill_(NAN)
            design.launch(kernel, given, current_raw_stream(facts))
            assert torch.equal(given.out.view(torch.int16), want[0].view(torch.int16)) and torch.equal(given.lse.view(torch.int32), want[1].view(torch.int32))
            if broken:
                assert torch.isneginf(given.lse[4:6]).all() and (given.out[4:6] == 0).all() and torch.isneginf(given.lse[3, 0]).all()


def test_where_attention_takes_blocks_off_the_lists_itself():
    facts = DeviceFacts("cuda", 0, "H200", (9, 0), 132, 232448, 1 << 26)
    design = lambda **changes: HeldDesign.of(decoding(**changes).signature().lower(), facts, 2)  # noqa: E731
    assert all(design(**changes) is not None for changes in DECODING.values())
    assert design(seq_len_q=2) is None and design(batch=3) is None, "a row of many CTAs"
    assert design(max_seq_len_kv=60000, kv_block_size=8, batch=140, blocks_per_row=3) is None, "a list of 30 KB"
    assert design().tile.stages == 3 and design(batch=140).tile == PortablePagedDesign(decoding(batch=140).signature().lower(), facts).tile


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100", "sm_120"])
def test_kernels_compile_without_spills(arch):
    pytest.importorskip("cupy")
    merges = [merge(d, n) for merge in (gathered_source, exchange_source) for d, n in ((torch.bfloat16, 64), (torch.float16, 256))]
    capability, smem, served = {"sm_80": ((8, 0), 166912, 2), "sm_90a": ((9, 0), 232448, 4), "sm_100": ((10, 0), 232448, 4),
                                "sm_120": ((12, 0), 101376, 3)}[arch]
    facts = DeviceFacts("cuda", 0, "some GPU", capability, 132, smem, 1 << 26)
    held = [HeldDesign.of(decoding(**DECODING[name]).signature().lower(), facts, 2) for name in ("as it is", "causal", "many requests", "wide heads")]
    assert sum(design is not None for design in held) == served
    for source in (held_source(1), held_source(2), *merges, gathered_source(torch.float32, 256), *(design.kernel for design in held if design is not None)):
        resources = compile_cubin(source, arch).resources
        assert resources.spill_bytes == resources.stack_bytes == 0, source.entry


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, head_dim", [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 256), (torch.float32, 256)])
def test_the_merge_kernel_agrees_with_torch(dtype, head_dim):
    """Three parts [2, 5, 3, D] in the layout of ops/gathered_parts.py: some without keys, some NaN, into a strided out."""
    gen = torch.Generator("cuda").manual_seed(0)
    outs = torch.randn(3, 2, 5, 3, head_dim, generator=gen, device="cuda").to(dtype)
    lses = torch.randn(3, 2, 3, 5, generator=gen, device="cuda") * 20
    lses[0, 0], outs[0, 0] = -float("inf"), NAN
    lses[:, 1, 1, 2] = -float("inf")
    outs[1, 1, 4, 2, 0], lses[2, 1, 0, 0] = NAN, NAN
    part_bytes = -(-(outs[0].nbytes + lses[0].nbytes) // 256) * 256
    parts = torch.empty(3, part_bytes, dtype=torch.uint8, device="cuda")
    for part, out, lse in zip(parts, outs, lses, strict=True):
        part[:out.nbytes], part[out.nbytes:out.nbytes + lse.nbytes] = out.flatten().view(torch.uint8), lse.flatten().view(torch.uint8)
    want, want_lse = merge_attention_states(outs, lses)
    wide = torch.full((2, 5, 9, head_dim), 7.0, dtype=dtype, device="cuda")
    out, lse = wide[:, :, 3:6], torch.empty_like(lses[0])
    merge_gathered(parts, outs[0].nbytes, out, lse, device_facts("cuda"), PlanStore().cubins)
    assert torch.allclose(out.float(), want.float(), atol=1e-6, rtol=0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps, equal_nan=True)
    assert torch.allclose(lse, want_lse, atol=1e-5, equal_nan=True)
    assert (wide[:, :, :3] == 7).all() and (wide[:, :, 6:] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, head_dim, ranks", [(torch.bfloat16, 64, 2), (torch.bfloat16, 128, 3), (torch.float16, 256, 8)])
def test_the_exchange_kernel_merges_to_the_same_bits(dtype, head_dim, ranks):
    """All ranks on one GPU, a stream each, with batches of changing size: what is sent may be any bits, such as those of an empty inbox."""
    gen, facts, cubins = torch.Generator("cuda").manual_seed(0), device_facts("cuda"), PlanStore().cubins
    whole = PartLayout((3, 5, 6, head_dim), dtype)
    memory = torch.full((ranks, 2 * ranks * whole.nbytes), 0xff, dtype=torch.uint8, device="cuda")
    inboxes = [Inboxes(tuple(x.data_ptr() for x in memory), rank, torch.zeros(2, dtype=torch.int32, device="cuda"), whole.nbytes, whole.lse_offset, memory)
               for rank in range(ranks)]
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    for turn, batch in enumerate((3, 1, 2, 3, 3, 1)):
        layout = PartLayout((batch, 5, 6, head_dim), dtype)
        parts = torch.empty(ranks, layout.nbytes, dtype=torch.uint8, device="cuda")
        for rank, (out, lse) in enumerate(map(layout.views, parts)):
            out.normal_(generator=gen), lse.normal_(generator=gen).mul_(20)
            out[0, 0, 0], lse[0, rank % 6, 0] = (NAN, -float("inf")) if turn % 2 else (1.0, NAN)
            out.view(torch.int16)[0, 1, 1], lse.view(torch.int32)[0, 2, 2] = -1, -1
        lses = torch.stack([layout.views(part)[1] for part in parts])
        lses[:, -1, 3, 4] = -float("inf")
        for part, lse in zip(parts, lses):
            layout.views(part)[1].copy_(lse)
        want, want_lse = torch.empty(layout.out_shape, dtype=dtype, device="cuda"), torch.empty(layout.lse_shape, device="cuda")
        merge_gathered(parts, layout.lse_offset, want, want_lse, facts, cubins)
        results = [(torch.full((batch, 5, 9, head_dim), 7.0, dtype=dtype, device="cuda"), torch.empty_like(want_lse)) for _ in range(ranks)]
        load_kernels([exchange_source(dtype, head_dim)], facts, cubins)
        torch.cuda.synchronize()            # loading a module would wait for a rank that waits for another
        for rank, (out, lse) in enumerate(results):
            with torch.cuda.stream(streams[rank]):
                exchange_parts(parts[rank], layout.lse_offset, inboxes[rank], out[:, :, 2:8], lse, facts, cubins)
        torch.cuda.synchronize()
        for out, lse in results:
            assert torch.equal(out[:, :, 2:8].contiguous().view(torch.int16), want.view(torch.int16))
            assert torch.equal(lse.view(torch.int32), want_lse.view(torch.int32))
            assert (out[:, :, :2] == 7).all() and (out[:, :, 8:] == 7).all()
        assert (memory == 0xff).all()


def test_sharded_attention_needs_a_process_group():
    case = PagedCase().make()
    with pytest.raises(CudnnGraphsError, match="init_process_group"):
        ShardedPagedAttention(case.signature())
    with pytest.raises(TypeError, match="signature: got int"):
        ShardedPagedAttention(7)


def test_lists_of_all_rows_must_fit_int32():
    with pytest.raises(OverflowError, match="max_blocks_per_row: got"):
        ShardedPagedAttention(PagedCase(batch=64).make().signature(batch_size=2**20, max_seq_len_kv=2**20))
