"""Paged block-sparse attention on a GPU, engine by engine: the surface, then everything that only a device can show."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch
from bad_rows import WIDTH, assert_only_bad_rows_changed, break_row, clean_case, kinds_of
from gpu_operations import busy_case, compiled_store, graph_of, on_gpu
from oracle_paged import assert_close, paged_attention
from paged_cases import PagedCase, by_query
from paged_surface import drawn, table

from cudnn_graphs import BlockSparsePagedTSWrapper, Plan, PlanStore
from cudnn_graphs.planning import verdict
from cudnn_graphs.runtime.devices import device_facts

pytestmark = pytest.mark.gpu

KERNEL_ENGINES = [e for e in ("portable", "sm90") if e == "portable" or importlib.util.find_spec("cudnn_graphs.engines.sm90_paged")]
ENGINES = ["cudnn", *KERNEL_ENGINES]
RANDOM_CASES = 60
NAN = float("nan")


# -- plans, made once ---------------------------------------------------------------------------------

@functools.cache
def surface() -> list[tuple[PagedCase, torch.Tensor, torch.Tensor]]:
    """Every case of the surface on the device, with the oracle's out and lse."""
    cases = [PagedCase(**facts).make() for facts in (*table(), *map(drawn, range(RANDOM_CASES)))]
    return [(on_gpu(case), *paged_attention(case)) for case in cases]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> PlanStore:
    return compiled_store(tmp_path_factory.mktemp("store"), [(case.signature(), engine) for case, _, _ in surface() for engine in ENGINES])


def planned(store: PlanStore, case: PagedCase, engine: str, **changes: Any) -> Plan:
    return store.build([case.signature(**changes)], "cuda", engine=engine)[0]


def run(plan: Plan, case: PagedCase, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run into outputs and a workspace that hold NaN."""
    positional, keywords = case.arguments()
    out = torch.full(case.q.shape, NAN, dtype=case.dtype, device="cuda")
    lse = torch.full((case.batch, case.num_qo_heads, case.seq_len_q), NAN, device="cuda")
    workspace = torch.full((max(plan.workspace_bytes, 1),), 0xFF, dtype=torch.uint8, device="cuda")
    return plan.run(*positional, **{**keywords, "out": out, "lse": lse, "workspace": workspace, **given})


def check(result: tuple[torch.Tensor, torch.Tensor], case: PagedCase) -> None:
    assert_close(*interleave(by_query(*result), paged_attention(case)))


def interleave(got: tuple[Any, Any], want: tuple[Any, Any]) -> tuple[Any, ...]:
    return got[0], want[0], got[1], want[1]


def equal(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


# -- the surface --------------------------------------------------------------------------------------

@pytest.mark.parametrize("engine", ENGINES)
def test_surface(engine, store, record_property):
    """Every case: against the oracle, twice with the same bits, nothing but visible bytes read, and none declined without a rule."""
    served, declined, wrong = 0, [], []
    for case, want, want_lse in surface():
        if not verdict(engine, case.signature().lower(), device_facts("cuda")).ok:
            declined.append(case)
            continue
        plan = planned(store, case, engine)
        first, second = run(plan, case), run(plan, case)
        served += 1
        try:
            assert_close(*interleave(by_query(*first), (want, want_lse)))
            assert equal(first, second), "two runs differ in bits"
        except AssertionError as error:
            wrong.append(f"{case}: {error}".replace("\n", " "))
    record_property("surface_cases", served)
    record_property("surface_declined", len(declined))
    assert not wrong, f"{engine}: {len(wrong)} of {served} cases are wrong:\n" + "\n".join(wrong[:12])
    if engine == "cudnn":
        assert all(c.bits or (c.mask_type == "causal" and c.seq_len_q > 1) for c in declined), "cudnn declined a dense case"
        assert declined, "no case of the table is beyond cudnn: the test above proves nothing"
    else:
        assert not declined, f"{engine} declined {declined[:3]}"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("page_table", ["indptr", "block_tables"])
@pytest.mark.parametrize("mask_type", ["dense", "causal"])
def test_bad_rows_are_zero_and_change_nothing_else(engine, mask_type, page_table, store):
    if engine == "cudnn" and mask_type == "causal":
        pytest.skip("cudnn serves no causal mask")
    case = on_gpu(clean_case(mask_type, page_table))
    plan = planned(store, case, engine, max_blocks_per_row=WIDTH)
    clean = run(plan, case)
    check(clean, case)
    wrong = []
    for kind in kinds_of(mask_type, page_table):
        broken, rows = break_row(case, kind)
        try:
            assert_only_bad_rows_changed(case, rows, clean, run(plan, broken))
        except AssertionError as error:
            wrong.append(f"{kind}: {error}".replace("\n", " "))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("engine", ENGINES)
def test_length_0_with_listed_blocks_is_zero(engine, store):
    case = on_gpu(clean_case())
    plan = planned(store, case, engine, max_blocks_per_row=WIDTH)
    clean = run(plan, case)
    case.seq_lens[1] = 0
    rows = {(1, h, r) for h in range(case.num_kv_heads) for r in range(case.rows)}
    assert_only_bad_rows_changed(case, rows, clean, run(plan, case))


@pytest.mark.parametrize("engine", KERNEL_ENGINES)
@pytest.mark.parametrize("part", ["k", "v"])
def test_a_visible_nan_reaches_exactly_the_queries_that_see_it(engine, part, store):
    """A key on the causal diagonal: earlier queries of the same tile do not see it."""
    case = busy_case(engine, bits=False, blocks_per_row=99, lens=[300, 111])
    token = 300 - 40 + 20       # the diagonal of query 20, in the middle of a row and of a tile
    for head in (0, 1):
        (case.k_cache if part == "k" else case.v_cache)[case.pages_of[0][token // 16], head, token % 16, 5] = NAN
    want, want_lse = paged_attention(case)
    assert want.isnan().any() and want[:20].isfinite().all()
    case = on_gpu(case)
    out, lse = (x.cpu() for x in by_query(*run(planned(store, case, engine), case)))
    assert torch.equal(out.isnan(), want.isnan()) and torch.equal(lse.isnan(), want_lse.isnan())
    finite = want.isfinite().all(-1)
    assert_close(out[finite], want[finite], lse[finite], want_lse[finite])


@pytest.mark.parametrize("engine", ENGINES)
def test_scores_far_below_any_finite_stand_in_for_minus_infinity(engine, store):
    """Every score is about -1e5 and equal, so out is the mean of V."""
    case = busy_case(engine, bits=False, mask_type="dense", poison=None)
    case.q.fill_(10.0)
    case.k_cache.fill_(-1024.0)
    want, want_lse = paged_attention(case)
    case = on_gpu(case)
    out, lse = (x.cpu() for x in by_query(*run(planned(store, case, engine), case)))
    assert_close(out, want)
    assert torch.allclose(lse.double(), want_lse, rtol=1e-6)


# -- what one plan serves -----------------------------------------------------------------------------

@pytest.mark.parametrize("engine", ENGINES)
def test_one_plan_serves_caches_of_different_num_pages(engine, store):
    small, large = (on_gpu(busy_case(engine, lens=lens)) for lens in ([300, 50], [300, 299]))
    assert small.k_cache.shape[0] < large.k_cache.shape[0]
    plan = planned(store, small, engine)
    for case in (small, large, small):
        check(run(plan, case), case)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_larger_plan_serves_a_smaller_batch(engine, tmp_path):
    case = on_gpu(busy_case(engine))
    own = PlanStore(tmp_path / "plans")
    large = planned(own, case, engine, batch_size=5, max_seq_len_kv=1000, max_blocks_per_row=25)
    own.freeze()
    plan = own.get(case.signature(max_blocks_per_row=10), "cuda", engine)
    assert plan.built_for == large.signature and own.stats().fits == 1
    check(run(plan, case), case)


@pytest.mark.parametrize("engine", ENGINES)
def test_strided_q_and_out_leave_their_neighbours_alone(engine, store):
    case = on_gpu(busy_case(engine, strided_q=True))
    fused = torch.full((case.batch, case.seq_len_q, 3 * case.num_qo_heads, case.head_dim), 7.0, dtype=case.dtype, device="cuda")
    middle = fused[:, :, case.num_qo_heads:2 * case.num_qo_heads]
    result = run(planned(store, case, engine), case, out=middle)
    assert result[0] is middle
    check(result, case)
    assert (fused[:, :, :case.num_qo_heads] == 7.0).all() and (fused[:, :, 2 * case.num_qo_heads:] == 7.0).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kv_layout", ["tuple", "combined"])
def test_offsets_past_2_to_the_32_elements(engine, kv_layout, store):
    """The live pages at the far end of a cache of more than 2^32 elements, everything before them NaN."""
    case = on_gpu(busy_case(engine, kv_layout=kv_layout, page_size=64, kv_block_size=64))
    per_page = case.k_cache[0].numel() * (2 if kv_layout == "combined" else 1)
    num_pages = 2**32 // per_page + 100
    small = case.cache if kv_layout == "combined" else torch.stack(case.cache)
    first = num_pages - case.k_cache.shape[0]
    caches = []
    for part in ([small] if kv_layout == "combined" else small):
        caches.append(torch.full((num_pages, *part.shape[1:]), NAN, dtype=case.dtype, device="cuda"))
        caches[-1][first:] = part
    want = paged_attention(case)
    case.page_indices.add_(first)
    case.tensors["cache"] = caches[0] if kv_layout == "combined" else tuple(caches)
    result = run(planned(store, case, engine), case)
    assert_close(*interleave(by_query(*result), want))


# -- streams ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("engine", ENGINES)
def test_work_goes_to_the_callers_stream(engine, store):
    """q arrives late on a side stream: a launch anywhere else would read it too early."""
    case = on_gpu(busy_case(engine))
    plan, late = planned(store, case, engine), case.q.clone()
    run(plan, case)
    case.q.fill_(NAN)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        case.q.copy_(late)
        result = run(plan, case)
    stream.synchronize()
    check(result, case)


# More items than the sm90 kernel's blocks take at once: the rest is drawn from a counter in the workspace.
MANY_ITEMS = {
    "wide": dict(batch=2, num_qo_heads=16, num_kv_heads=2, seq_len_q=1200, q_block_size=16),
    "narrow": dict(batch=2, num_qo_heads=4, num_kv_heads=4, seq_len_q=400, q_block_size=8),
    "trio": dict(batch=4, num_qo_heads=16, num_kv_heads=16, seq_len_q=400, q_block_size=8),
}


@pytest.mark.parametrize("kind", MANY_ITEMS)
@pytest.mark.parametrize("mask_type", ["dense", "causal"])
def test_more_items_than_the_device_takes_at_once(kind, mask_type, store):
    if "sm90" not in KERNEL_ENGINES or device_facts("cuda").capability != (9, 0):
        pytest.skip("of the sm90 engine")
    case = on_gpu(busy_case("sm90", bits=False, mask_type=mask_type, max_seq_len_kv=1300, lens=None, **MANY_ITEMS[kind]))
    plan = planned(store, case, "sm90")
    config = plan.describe()["compiled"]["config"]
    assert (config["chains"], config["consumers"]) == {"wide": (1, 2), "narrow": (1, 1), "trio": (3, 1)}[kind] and plan.workspace_bytes > 0
    first = run(plan, case)
    check(first, case)
    outputs = [torch.empty_like(part) for part in first]
    graph = graph_of(lambda: run(plan, case, out=outputs[0], lse=outputs[1]))
    for _ in range(3):          # the counter starts anew
        for part in outputs:
            part.fill_(NAN)
        graph.replay()
        assert equal(tuple(outputs), first)


# What scores lie around, by token; queries hold the root of 128 in the first dimension, so that 1 in a key is 1 of a score.
AROUND = {
    "rising": lambda token: token * 0.1,                                    # the maximum moves in every tile
    "falling": lambda token: 130.0 - token * 0.1,                            # and never: later probabilities vanish
    "leaping": lambda token: 60.0 if token % 97 == 0 else -60.0,
    "low": lambda token: -30.0,                                             # no score is positive
    "level": lambda token: 0.0,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("shape", ({"seq_len_q": 416, "num_qo_heads": 16}, {"seq_len_q": 40}), ids=("wide", "narrow"))
def test_scores_of_every_order_of_size(shape, around, store):
    """The maximum of a row is looked for when some score outgrows it only: on every side of that, lse and out are right."""
    if "sm90" not in KERNEL_ENGINES or device_facts("cuda").capability != (9, 0):
        pytest.skip("of the sm90 engine")
    case = busy_case("sm90", bits=False, mask_type="dense", max_seq_len_kv=700, lens=None, poison=None, **shape)
    case.q[..., 0] = 128 ** 0.5
    for pages in case.pages_of:
        for i, page in enumerate(pages):
            for slot in range(case.page_size):
                case.k_cache[page, :, slot, 0] = AROUND[around](i * case.page_size + slot)
    if around == "level":       # scores of -0.0, the smallest of all integers
        case.q.zero_()
        case.k_cache.copy_(-case.k_cache.abs())
    want = paged_attention(case)
    case = on_gpu(case)
    assert_close(*interleave(by_query(*run(planned(store, case, "sm90"), case)), want))


# -- the public calls ---------------------------------------------------------------------------------

@pytest.mark.parametrize("engine", ENGINES)
def test_one_shot_and_wrapper_agree_with_the_plan(engine, store):
    case = on_gpu(busy_case(engine))
    one_shot = case.one_shot(engine=engine, store=store)
    check(one_shot, case)
    wrapper = BlockSparsePagedTSWrapper()
    wrapper.plan(case.batch, case.seq_len_q, case.max_seq_len_kv, case.num_qo_heads, case.num_kv_heads, case.head_dim, case.q_block_size,
                 case.kv_block_size, case.page_size, device="cuda", mask_type=case.mask_type, use_kv_valid_bits=case.bits, q_data_type=case.dtype,
                 return_lse=True, engine=engine, store=store)
    positional, keywords = case.arguments()
    check(wrapper.run(*positional, **keywords), case)
    assert wrapper.current_plan.engine == engine


def test_the_default_pick_is_a_gpu_engine_and_the_reference_runs_when_named(store):
    case = on_gpu(busy_case("portable"))
    assert store.get(case.signature(), "cuda").engine in ENGINES
    check(case.one_shot(store=store), case)
    named = planned(store, case, "reference")
    assert named.engine == "reference"
    check(run(named, case), case)


FAULTS = {
    "page_id": lambda c: c.page_indices.index_fill_(0, c.page_indptr[1:2].long() + 1, -4),
    "page_id past the cache": lambda c: c.page_indices.index_fill_(0, torch.tensor([2], device=c.page_indices.device), c.k_cache.shape[0]),
    "length": lambda c: c.seq_lens[1:].fill_(97),
    "length 0": lambda c: c.seq_lens[1:].fill_(0),
    "page_table": lambda c: c.page_indptr[2:].sub_(4),
    "page_table start": lambda c: c.page_indptr[:1].fill_(1),
    "block_indptr": lambda c: c.block_indptr[1, 1, -1:].fill_(2),
    "block_indptr past": lambda c: c.block_indptr[1, 1, -1:].fill_(10**6),
    "block_id": lambda c: c.block_indices[3:4].fill_(6),
    "block_id negative": lambda c: c.block_indices[3:4].fill_(-1),
    "block_order": lambda c: c.block_indices[4:5].copy_(c.block_indices[3:4]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_shot_says_of_gpu_values_what_it_says_of_cpu_values(fault, store):
    texts = []
    for case in (clean_case(), on_gpu(clean_case())):
        case.one_shot(store=store, engine="portable" if case.device == "cuda" else None)
        FAULTS[fault](case)
        out = torch.full(case.q.shape, 3.0, dtype=case.dtype, device=case.q.device)
        with pytest.raises(ValueError) as caught:
            case.one_shot(store=store, out=out)
        assert (out == 3.0).all(), "out was written"
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_workspace_must_hold_what_the_plan_says(engine, store):
    case = on_gpu(busy_case(engine, seq_len_q=1, q_block_size=16, max_seq_len_kv=4100, lens=[4100, 3000], mask_type="dense"))
    plan = planned(store, case, engine)
    if not plan.workspace_bytes:
        pytest.skip("this plan needs no workspace")
    room = torch.empty(plan.workspace_bytes + 256, dtype=torch.uint8, device="cuda")
    for bad in (room[:plan.workspace_bytes - 1], room[8:], room.view(torch.int8), room.cpu()):
        with pytest.raises(ValueError, match="workspace: got"):
            run(plan, case, workspace=bad)
    with pytest.raises(TypeError, match="workspace: got"):
        run(plan, case, workspace=room.data_ptr())
    arena = torch.empty(case.q.nbytes + plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="workspace: got memory shared with out"):
        run(plan, case, workspace=arena, out=arena[:case.q.nbytes].view(case.dtype).view(case.q.shape))
    check(run(plan, case, workspace=room[:plan.workspace_bytes]), case)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_second_store_loads_what_the_first_built(engine, tmp_path):
    case = on_gpu(busy_case(engine))
    first = PlanStore(tmp_path / "plans")
    built = run(planned(first, case, engine), case)
    second = PlanStore(tmp_path / "plans")
    plan = second.get(case.signature(), "cuda", engine)
    assert (second.stats().builds, second.stats().loads, second.stats().misses) == (0, 1, 0)
    assert equal(run(plan, case), built)
    said = plan.describe()
    assert said["engine"] == engine and said["load_seconds"] > 0 and said["declined"].keys() == {"reference", "cudnn", "portable", "sm90"} - {engine}
    assert all(kernel["name"] for kernel in said["compiled"]["kernels"])
    assert all(kernel.get("spill_bytes", 0) == 0 for kernel in said["compiled"]["kernels"])
