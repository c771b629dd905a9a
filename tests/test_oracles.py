"""Our own oracles against the one the specification names, where it is at hand (../shared of a developer's checkout)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from oracle_paged import paged_attention
from paged_cases import PagedCase, by_query
from paged_surface import drawn, table

JUDGE = Path(__file__).resolve().parents[2] / "shared" / "oracle" / "sparse_attention_oracle.py"

pytestmark = pytest.mark.skipif(not JUDGE.exists(), reason=f"{JUDGE} is not here")


@pytest.fixture(scope="module")
def judge():
    spec = importlib.util.spec_from_file_location("sparse_attention_oracle", JUDGE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = [f for f in (*table(), *map(drawn, range(12))) if f.get("max_seq_len_kv", 0) < 1000 and f.get("page_table") != "block_tables"]


@pytest.mark.parametrize("facts", SMALL[::4])
def test_paged(judge, facts):
    case = PagedCase(**facts).make()
    want = judge.paged_block_sparse(case.q, case.cache, case.page_indptr, case.page_indices, case.block_indptr.expand(-1, case.num_kv_heads, -1),
                                    case.block_indices, case.q_block_size, case.kv_block_size, seq_lens_kv=case.seq_lens, kv_valid_bits=case.valid_bits,
                                    mask_type=case.mask_type, sm_scale=case.sm_scale)
    out, lse = paged_attention(case)
    judged_out, judged_lse = by_query(*want)
    assert torch.allclose(out, judged_out, rtol=0, atol=1e-12)
    assert torch.equal(lse.isneginf(), judged_lse.isneginf()) and torch.allclose(lse, judged_lse, rtol=0, atol=1e-9)


def test_paged_with_a_nan_that_only_later_queries_see(judge):
    case = PagedCase(mask_type="causal", blocks_per_row=99, lens=[200, 111]).make()
    token = 200 - 16 + 5
    case.v_cache[case.pages_of[0][token // 16], 1, token % 16, 3] = float("nan")
    want, _ = judge.paged_block_sparse(case.q, case.cache, case.page_indptr, case.page_indices, case.block_indptr, case.block_indices, case.q_block_size,
                                       case.kv_block_size, seq_lens_kv=case.seq_lens, mask_type="causal")
    assert want.isnan().any()
    assert torch.allclose(paged_attention(case)[0], want.flatten(0, 1), rtol=0, atol=1e-12, equal_nan=True)
