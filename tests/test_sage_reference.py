"""The CPU engine of Sage block-sparse attention against the float64 oracle."""

import pytest
import torch
from oracle_sage import errors, sage_attention
from sage_cases import SageCase, table

from cudnn_graphs.reference import sage as reference


def run(case):
    arguments = case.arguments()
    reference.attend_sage(arguments)
    return arguments.out, arguments.lse


@pytest.mark.parametrize("facts", list(table()), ids=str)
def test_every_rule(facts, monkeypatch):
    monkeypatch.setattr(reference, "GATHER_BYTES", 1 << 20)
    case = SageCase(**facts).make().poison()
    total, worst, lse_error = errors(*run(case), *sage_attention(case))
    assert total < 3e-3 and worst < 5e-3 and lse_error < 1e-4


@pytest.mark.parametrize("facts", [dict(), dict(sizes_rank=3), dict(v_layout="interleaved16")], ids=str)
def test_tensors_lie_where_the_inputs_do_whatever_the_default_device(facts):
    case = SageCase(**facts).make()
    want = [part.clone() for part in run(case)]
    with torch.device("meta"):
        assert all(map(torch.equal, run(case), want))


@pytest.mark.parametrize("layout", ["natural", "interleaved16"])
@pytest.mark.parametrize("facts", [dict(), dict(sizes_rank=3), dict(uniform=True, contiguous=True), dict(seq_k=4033, capacity=12, count=12)], ids=str)
def test_one_hot_rows_place_every_token(facts, layout):
    case = SageCase(v_layout=layout, seq_q=200, **facts).make().one_hot()
    out, _ = run(case)
    seen = case.target >= 0
    assert seen.any()
    assert torch.equal(out.float()[seen], case.code.view(torch.float8_e4m3fn).float().T[case.target[seen]])


def test_a_visible_nan_does_reach_the_output():
    case = SageCase(heads=1, seq_q=64, seq_k=64, count=1).make()
    case.v.view(torch.uint8)[0, 0, 5, 9] = 0xFF
    out, _ = run(case)
    assert out[..., 5].isnan().all() and out[..., :5].isfinite().all() and out[..., 6:].isfinite().all()


@pytest.mark.parametrize("name, index, queries", [("q_scale", (..., 1), slice(32, 64)), ("k_scale", (...,), slice(None))])
def test_scores_that_are_nan_show(name, index, queries):
    case = SageCase(heads=2, seq_q=200, seq_k=300).make()
    getattr(case, name)[index] = float("nan")
    for result in run(case):
        seen = torch.zeros(result.shape[:3], dtype=torch.bool)
        seen[:, :, queries] = True
        assert result[seen].isnan().all() and result[~seen].isfinite().all()


def test_a_duplicate_counts_twice():
    case = SageCase(heads=1, seq_q=64, count=3, capacity=3).make()
    case.index[..., :] = torch.tensor([2, 4, 2])
    want, want_lse = sage_attention(case)
    total, _, lse_error = errors(*run(case), want, want_lse)
    case.index[..., :] = torch.tensor([2, 4, -1])
    assert total < 3e-3 and lse_error < 1e-4 and (sage_attention(case)[1] - want_lse).abs().min() > 0.1
