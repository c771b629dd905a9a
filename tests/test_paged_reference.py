"""The reference engine over the whole surface, against the oracle; everything unseen poisoned."""

from __future__ import annotations

import pytest
import torch
from bad_rows import WIDTH, assert_only_bad_rows_changed, break_row, clean_case, kinds_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_paged import assert_close, paged_attention
from paged_cases import PagedCase, by_query
from paged_surface import BLOCKS, DTYPES, PACKED, PAGES, heads, table

from cudnn_graphs import BlockSparsePagedTSWrapper, PlanStore

NAN = float("nan")


@pytest.fixture(scope="module")
def store() -> PlanStore:
    return PlanStore()


def run(store: PlanStore, case: PagedCase, **given):
    """Run into outputs that hold NaN, so that what is not written shows."""
    positional, keywords = case.arguments()
    out = torch.full(case.q.shape, NAN, dtype=case.dtype)
    lse = torch.full((case.batch, case.num_qo_heads, case.seq_len_q), NAN)
    return store.get(case.signature(), "cpu").run(*positional, **{**keywords, "out": out, "lse": lse, **given})


def check(result, case: PagedCase) -> None:
    (out, lse), (want, want_lse) = by_query(*result), paged_attention(case)
    assert_close(out, want, lse, want_lse)


@st.composite
def calls(draw) -> PagedCase:
    q_block_size, group = draw(st.sampled_from(PACKED))
    seq_len_q = draw(st.sampled_from((1, q_block_size, q_block_size + 1, 2 * q_block_size)) | st.integers(1, 40))
    causal = draw(st.booleans())
    longest = draw(st.integers(seq_len_q if causal else 1, 400))
    batch = draw(st.integers(1, 3))
    lens = draw(st.lists(st.integers(seq_len_q, longest) | st.just(0) if causal else st.integers(0, longest), min_size=batch, max_size=batch))
    return PagedCase(
        batch=batch, seq_len_q=seq_len_q, head_dim=draw(st.sampled_from((64, 128, 256))), q_block_size=q_block_size, max_seq_len_kv=longest, lens=lens,
        kv_block_size=draw(st.sampled_from(BLOCKS)), page_size=draw(st.sampled_from(PAGES)), mask_type="causal" if causal else "dense",
        bits=draw(st.booleans()), dtype=draw(st.sampled_from(DTYPES)), kv_layout=draw(st.sampled_from(("tuple", "combined"))),
        page_table=draw(st.sampled_from(("indptr", "block_tables"))), shared_pattern=draw(st.booleans()), padded_pages=draw(st.integers(0, 1)),
        strided_q=draw(st.booleans()), blocks_per_row=draw(st.sampled_from((None, None, 0, 1, 99))), sm_scale=draw(st.sampled_from((None, 0.03, 1.0))),
        poison=draw(st.sampled_from((NAN, float("inf"), float("-inf")))), seed=draw(st.integers(0, 2**16)), **heads(group, draw(st.integers(1, 2)))).make()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(calls())
def test_any_call_of_the_surface(store, case):
    check(run(store, case), case)


@pytest.mark.parametrize("facts", list(table()))
def test_table_of_the_surface(store, facts):
    case = PagedCase(**facts).make()
    check(run(store, case), case)


# -- outputs ------------------------------------------------------------------------------------------

def test_outputs_given_are_the_ones_returned(store):
    case = PagedCase().make()
    positional, keywords = case.arguments()
    out, lse = torch.empty_like(case.q), torch.empty(case.batch, case.num_qo_heads, case.seq_len_q)
    result = store.get(case.signature(), "cpu").run(*positional, **keywords, out=out, lse=lse)
    assert result[0] is out and result[1] is lse
    check(result, case)


def test_out_inside_a_fused_buffer_leaves_its_neighbours_alone(store):
    case = PagedCase(strided_q=True).make()
    fused = torch.full((case.batch, case.seq_len_q, 3 * case.num_qo_heads, case.head_dim), 7.0, dtype=case.dtype)
    middle = fused[:, :, case.num_qo_heads:2 * case.num_qo_heads]
    check(run(store, case, out=middle), case)
    assert (fused[:, :, :case.num_qo_heads] == 7.0).all() and (fused[:, :, 2 * case.num_qo_heads:] == 7.0).all()


def test_without_lse_only_out_is_returned(store):
    case = PagedCase().make()
    positional, keywords = case.arguments()
    plan = store.get(case.signature(return_lse=False), "cpu")
    out = plan.run(*positional, **keywords)
    assert isinstance(out, torch.Tensor) and torch.equal(out, run(store, case)[0])
    assert isinstance(case.one_shot(return_lse=False, store=store), torch.Tensor)


def test_inputs_are_not_written(store):
    case = PagedCase(mask_type="causal", bits=True).make()
    before = {n: t.clone() for n, t in case.tensors.items() if isinstance(t, torch.Tensor)}
    run(store, case)
    for name, value in before.items():
        assert torch.equal(value.view(torch.uint8), case.tensors[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("facts", list(table())[:12])
def test_one_shot_wrapper_and_plan_are_bit_equal(store, facts):
    case = PagedCase(**facts).make()
    wrapper = BlockSparsePagedTSWrapper()
    wrapper.plan(case.batch, case.seq_len_q, case.max_seq_len_kv, case.num_qo_heads, case.num_kv_heads, case.head_dim, case.q_block_size,
                 case.kv_block_size, case.page_size, device="cpu", mask_type=case.mask_type, use_kv_valid_bits=case.bits, q_data_type=case.dtype,
                 return_lse=True, store=store)
    positional, keywords = case.arguments()
    results = [run(store, case), wrapper.run(*positional, **keywords), case.one_shot(store=store)]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


# -- plans and batches --------------------------------------------------------------------------------

def test_a_larger_plan_serves_a_smaller_batch():
    case, own = PagedCase().make(), PlanStore()
    large = own.build([case.signature(batch_size=7, max_seq_len_kv=999, max_blocks_per_row=60)], "cpu")[0]
    plan = own.get(case.signature(), "cpu")
    assert plan.built_for == large.signature and own.stats().builds == 1
    positional, keywords = case.arguments()
    check(plan.run(*positional, **keywords), case)
    check(large.run(*positional, **{**keywords, "kv_valid_bits": None}), case)


def test_one_plan_serves_caches_of_different_num_pages(store):
    small, large = (PagedCase(lens=lens).make() for lens in ([200, 20], [200, 190]))
    assert small.signature() == large.signature() and small.k_cache.shape[0] != large.k_cache.shape[0]
    check(run(store, small), small)
    check(run(store, large), large)


def test_a_new_pattern_is_not_a_new_plan():
    """The one-shot rounds the widest row up to a power of two."""
    own = PlanStore()
    for seed, width in enumerate((5, 6, 7, 8)):
        case = PagedCase(blocks_per_row=width, seed=seed).make()
        check(case.one_shot(store=own), case)
    assert own.stats().builds == 1
    wider = PagedCase(blocks_per_row=9).make()
    check(wider.one_shot(store=own), wider)
    assert own.stats().builds == 2


# -- empty and bad rows -------------------------------------------------------------------------------

def test_empty_block_indices(store):
    case = PagedCase(blocks_per_row=0).make()
    case.tensors["block_indices"] = torch.empty(0, dtype=torch.int32)
    case.block_indptr.zero_()
    for out, lse in (run(store, case), case.one_shot(store=store)):
        assert (out == 0).all() and lse.isneginf().all()


def test_bits_that_hide_everything(store):
    case = PagedCase(bits=True).make()
    case.valid_bits.view(torch.int32).zero_()
    out, lse = run(store, case)
    assert (out == 0).all() and lse.isneginf().all()


def test_a_block_wholly_in_the_future_contributes_nothing(store):
    case = PagedCase(mask_type="causal", seq_len_q=32, lens=[32, 32], kv_block_size=8, blocks_per_row=1, poison=None).make()
    case.block_indices[3:-1] = 3        # tokens 24 to 31, which the first 24 queries do not see
    out, lse = run(store, case)
    assert (out[:, :24] == 0).all() and lse[..., :24].isneginf().all()
    assert (out[:, 24:].float().abs().amax(-1) > 0).all() and lse[..., 24:].isfinite().all()


def test_length_0_with_listed_blocks_is_zero(store):
    case = clean_case()
    clean = run(store, case)
    case.seq_lens[1] = 0
    assert_only_bad_rows_changed(case, {(1, h, r) for h in range(2) for r in range(3)}, clean, run(store, case))


def test_gaps_and_shared_ranges_between_rows(store):
    """Each (b, h) has its own offsets: all of them may name one range."""
    case = PagedCase(seed=5).make()
    case.block_indptr[:, 1] = case.block_indptr[:, 0]
    case.tensors["cache"] = tuple(torch.nan_to_num(c, nan=0.5) for c in case.cache)
    case.tensors["k_cache"], case.tensors["v_cache"] = case.cache
    check(run(store, case), case)
    check(case.one_shot(store=store), case)


CLEAN = [("dense", "indptr"), ("dense", "block_tables"), ("causal", "indptr"), ("causal", "block_tables")]


@pytest.mark.parametrize(("mask_type", "page_table", "kind"), [(m, t, k) for m, t in CLEAN for k in kinds_of(m, t)])
def test_a_bad_row_is_zero_and_changes_nothing_else(store, mask_type, page_table, kind):
    case = clean_case(mask_type, page_table)
    plan = store.build([case.signature(max_blocks_per_row=WIDTH)], "cpu")[0]

    def once(of: PagedCase):
        positional, keywords = of.arguments()
        return plan.run(*positional, **keywords)

    clean = once(case)
    check(clean, case)
    broken, rows = break_row(case, kind)
    assert_only_bad_rows_changed(case, rows, clean, once(broken))


def test_an_id_that_begins_at_the_length_is_outside_it(store):
    """A length of whole blocks: no token of block 6 is live, and its row is bad, not just shorter."""
    case = clean_case(lens=[96, 75])
    clean = run(store, case)
    broken, rows = break_row(case, "id past the length")
    assert_only_bad_rows_changed(case, rows, clean, run(store, broken))


def test_unsorted_and_repeated_ids_are_memory_safe(store):
    case = clean_case()
    case.block_indices[3:-1] = case.block_indices[3:-1].flip(0).clamp(max=4)
    out, lse = run(store, case)
    assert out.shape == case.q.shape and lse.isfinite().any()


# -- numbers ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits(store, dtype):
    case = PagedCase(dtype=dtype, k_magnitude=12.0, mask_type="causal").make()
    check(run(store, case), case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_give_the_mean_of_the_values(store, dtype):
    case = PagedCase(dtype=dtype, blocks_per_row=99, lens=[200, 64]).make()
    case.q.zero_()
    out, lse = run(store, case)
    check((out, lse), case)
    values = torch.cat([case.v_cache[p, 0].float() for p in case.pages_of[1]])[:64]
    assert torch.allclose(out[1, 0, 0].float(), values.mean(0), atol=2e-3)
    assert torch.allclose(lse[1, 0], torch.full((16,), 64.0).log())


def test_scores_far_below_any_finite_stand_in_for_minus_infinity(store):
    case = PagedCase(poison=None).make()
    case.q.fill_(10.0)
    case.k_cache.fill_(-1280.0)
    out, lse = by_query(*run(store, case))
    want, want_lse = paged_attention(case)
    assert want_lse[want_lse.isfinite()].max() < -1e5
    assert_close(out, want)
    assert torch.allclose(lse.double(), want_lse, rtol=1e-6)


def test_the_first_chunk_of_a_row_masked_and_later_keys_valid(store):
    case = PagedCase(bits=True, blocks_per_row=99, lens=[200, 200]).make()
    bits = case.valid_bits.view(torch.int32)
    bits.zero_()
    bits[:, 5] = 1 << 7             # token 167 alone
    for b in range(2):
        page = case.pages_of[b][167 // 16]
        case.k_cache[page, :, 167 % 16] = 1.0
        case.v_cache[page, :, 167 % 16] = torch.arange(64).to(case.dtype)
    out, lse = run(store, case)
    assert torch.equal(out.float(), torch.arange(64.0).expand_as(out))
    assert torch.allclose(lse.transpose(1, 2), case.q.float().sum(-1) / 8, atol=1e-4)


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("part", ["k", "v"])
def test_a_visible_non_finite_key_reaches_exactly_the_queries_that_see_it(store, part, value):
    """A key on the causal diagonal: earlier queries do not see it, later ones get what the oracle gets."""
    case = PagedCase(mask_type="causal", blocks_per_row=99, lens=[200, 111]).make()
    token = 200 - 16 + 5            # seen by query 5 and later
    for head in (0, 1):
        (case.k_cache if part == "k" else case.v_cache)[case.pages_of[0][token // 16], head, token % 16, 3] = value
    want, want_lse = paged_attention(case)
    assert want[:5].isfinite().all() and not want[5:16].isfinite().all() and want[16:].isfinite().all()
    out, lse = by_query(*run(store, case))
    assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.double().isposinf(), want.isposinf())
    assert torch.equal(lse.isfinite(), want_lse.isfinite())
    finite = want.isfinite().all(-1)
    assert_close(out[finite], want[finite], lse[finite], want_lse[finite])


@pytest.mark.parametrize("page_table", ["indptr", "block_tables"])
@pytest.mark.parametrize("surroundings", ["float64", "bfloat16", "autocast", "grad"])
def test_the_callers_torch_state_changes_no_bit(store, surroundings, page_table):
    """Serving engines set a 16-bit default dtype; a caller may be under autocast, or q may want a gradient."""
    case = PagedCase(page_table=page_table).make()
    want, want_lse = run(store, case)
    if surroundings == "grad":
        case.tensors["q"].requires_grad_() if "q" in case.tensors else case.q.requires_grad_()
    before = torch.get_default_dtype()
    try:
        if surroundings in ("float64", "bfloat16"):
            torch.set_default_dtype(getattr(torch, surroundings))
        positional, keywords = case.arguments()
        with torch.autocast("cpu", torch.bfloat16, enabled=surroundings == "autocast"):
            out, lse = store.get(case.signature(), "cpu").run(*positional, **keywords)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and lse.dtype == torch.float32 and not out.requires_grad


def test_a_page_table_without_columns(store):
    """Nothing to read: every row that selects anything is bad."""
    case = PagedCase(page_table="block_tables").make()
    for table_of_none in (torch.empty(2, 0, dtype=torch.int32), torch.empty(2, 9, dtype=torch.int32)[:, :0]):
        out, lse = run(store, case, block_tables=table_of_none)
        assert (out == 0).all() and (lse == float("-inf")).all()
