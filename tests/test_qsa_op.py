"""qsa_forward and qsa_indexed_forward on the CPU: results, outputs given, plans, and every error of the specification."""

import dataclasses

import pytest
import torch
from cases_qsa import HEAD_PAIRS, bitmap_indices, packed_batch, qkv, random_bitmap
from oracle_qsa import errors, oracle_bitmap, oracle_indexed

from cudnn_graphs.ops.qsa_metadata import build_qsa_metadata
from cudnn_graphs.ops.query_sparse import QuerySparseSignature, qsa_forward, qsa_indexed_forward
from cudnn_graphs.planning import PlanStore
from cudnn_graphs.planning.signature import Signature

NAN = float("nan")


@pytest.fixture(scope="module")
def store():
    return PlanStore(None)


def batch(heads=(12, 1), sequences=3):
    metadata = packed_batch(sequences, 16, seed=sequences)
    q, k, v = qkv(metadata.lo.numel(), heads)
    return q, k, v, random_bitmap(metadata, 0.5), metadata


def close(got, want, lse):
    total, worst, lse_error = errors(got[1], got[2], want, lse)
    assert total < 1e-5 and worst < 1e-4 and lse_error < 1e-4
    assert torch.equal(got[0], got[1].to(torch.bfloat16))


@pytest.mark.parametrize("heads", HEAD_PAIRS)
def test_bitmap_and_indices(store, heads):
    q, k, v, sel, metadata = batch(heads)
    close(qsa_forward(q, k, v, sel, *metadata, store=store), *oracle_bitmap(q, k, v, sel, metadata, 1 / 16))
    indices = bitmap_indices(sel, metadata, 40)
    close(qsa_indexed_forward(q, k, v, indices, -0.125, store=store), *oracle_indexed(q, k, v, indices, -0.125))


def test_one_plan_serves_every_length_of_its_class(store):
    for sequences in (1, 2, 5):
        q, k, v, sel, metadata = batch((6, 1), sequences)
        qsa_forward(q, k, v, sel, *metadata, store=store)
    assert sum(e["signature"]["num_qo_heads"] == 6 and e["signature"]["source"] == "bitmap" for e in store.entries()) == 1


def test_given_outputs_are_written_and_returned(store):
    q, k, v, sel, metadata = batch()
    out, out_fp32, lse = torch.full_like(q, NAN), torch.full(q.shape, NAN), torch.full((12, q.shape[0]), NAN)
    got = qsa_forward(q, k, v, sel, *metadata, out=out, out_fp32=out_fp32, lse=lse, store=store)
    assert got[0] is out and got[1] is out_fp32 and got[2] is lse
    assert out_fp32.isfinite().all()


def test_the_result_is_detached(store):
    q, k, v, sel, metadata = batch()
    assert not any(x.requires_grad for x in qsa_forward(q.requires_grad_(), k, v, sel, *metadata, store=store))


def test_a_plan_runs_named_arguments(store):
    q, k, v, sel, metadata = batch()
    plan = store.get(QuerySparseSignature(12, 1, "bitmap", q.shape[0]), device="cpu")
    got = plan.run(q, k, v, sel_blocks=sel, **metadata._asdict(), scale=0.25)
    close(got, *oracle_bitmap(q, k, v, sel, metadata, 0.25))
    with pytest.raises(TypeError, match="block_last"):
        plan.run(q, k, v, sel, *metadata[:-1])
    with pytest.raises(TypeError, match="arguments"):
        plan.run(q, k, v, sel, *metadata, 0.25, scale=0.25)


def test_signature():
    signature = QuerySparseSignature(12, 1, "bitmap", 700)
    assert signature.max_tokens == 1024 and signature == QuerySparseSignature(12, 1, "bitmap", 1024)
    assert Signature.from_json(signature.to_json()) == signature
    assert QuerySparseSignature(12, 1, "bitmap", 4096).fits(signature) and not signature.fits(QuerySparseSignature(12, 1, "bitmap", 4096))
    assert QuerySparseSignature(12, 1, max_tokens=2**31 - 1).max_tokens == 2**31 - 1
    assert signature.lower().kind == "bitmap/packed" and QuerySparseSignature(24, 2, "indices").lower().kind == "token_ids/packed"
    for heads in ((12, 2), (16, 1), (0, 0), (12.0, 1), (12, True)):
        with pytest.raises(NotImplementedError):
            QuerySparseSignature(*heads)
    with pytest.raises(ValueError):
        QuerySparseSignature(12, 1, "csr")


# -- errors: one change of a good call each -----------------------------------------------------------

def misaligned(x):
    return torch.cat([x.flatten(), x.flatten()[:1]])[1:].view(x.shape)


def good():
    metadata = build_qsa_metadata([0, 5, 12])
    q, k, v = qkv(12)
    return {"q": q, "k": k, "v": v, "sel_blocks": torch.ones(12, 4, dtype=torch.uint8), **metadata._asdict(), "scale": 0.1, "block_size": 4}


BITMAP_ERRORS = [
    ("q", lambda x: x[:0], NotImplementedError), ("q", lambda x: x[..., :128].contiguous(), NotImplementedError),
    ("q", lambda x: x.half(), NotImplementedError),
    ("q", lambda x: x[:, :5].contiguous(), NotImplementedError), ("k", lambda x: x.expand(12, 2, 256).contiguous(), NotImplementedError),
    ("block_size", lambda x: 8, NotImplementedError), ("block_size", lambda x: 4.0, NotImplementedError), ("block_size", lambda x: True, NotImplementedError),
    *((name, lambda x: x.tolist(), TypeError) for name in ("q", "k", "v", "sel_blocks", "lo", "hi", "blk_base", "tok_base", "block_first", "block_last")),
    *((name, lambda x: x[None], ValueError) for name in ("q", "k", "v", "sel_blocks", "lo", "block_first")),
    *((name, lambda x: x[1:], ValueError) for name in ("k", "v", "sel_blocks", "lo", "hi", "blk_base", "tok_base", "block_first", "block_last")),
    *((name, lambda x: x.long(), ValueError) for name in ("sel_blocks", "lo", "hi", "blk_base", "tok_base", "block_first", "block_last")),
    *((name, lambda x: x.float(), ValueError) for name in ("k", "v")),
    *((name, lambda x: x.repeat_interleave(2, 0)[::2], ValueError) for name in ("q", "k", "v", "sel_blocks", "lo", "block_last")),
    *((name, misaligned, ValueError) for name in ("q", "k", "v")),
    *((name, lambda x: x.to("meta"), ValueError) for name in ("k", "v", "sel_blocks", "lo", "block_last")),
    ("v", lambda x: x[..., :128].contiguous(), ValueError), ("sel_blocks", lambda x: x != 0, ValueError), ("sel_blocks", lambda x: x[:, :0], ValueError),
    *(("scale", lambda x, bad=bad: bad, ValueError) for bad in (NAN, float("inf"), 1e38, 10**400, True, "1", None, torch.tensor(1.0))),
]


@pytest.mark.parametrize("name, change, error", BITMAP_ERRORS)
def test_bitmap_errors(store, name, change, error):
    call = good()
    call[name] = change(call[name])
    with pytest.raises(error):
        qsa_forward(**call, store=store)
    qsa_forward(**good(), store=store)


def good_indexed():
    q, k, v = qkv(12)
    return {"q": q, "k": k, "v": v, "indices": torch.arange(8, dtype=torch.int32).repeat(12, 1), "scale": 0.1}


@pytest.mark.parametrize("change, error", [
    (lambda x: x[:, :0], NotImplementedError), (lambda x: x[:, :6].contiguous(), NotImplementedError), (lambda x: x.repeat(1, 257), NotImplementedError),
    (lambda x: x.long(), ValueError), (lambda x: x[1:], ValueError), (lambda x: x[0], ValueError), (lambda x: x[:, ::2], ValueError),
    (lambda x: None, TypeError)])
def test_indices_errors(store, change, error):
    call = good_indexed()
    call["indices"] = change(call["indices"])
    with pytest.raises(error):
        qsa_indexed_forward(**call, store=store)


@pytest.mark.parametrize("name, change, error", [
    ("out", lambda x: x.float(), ValueError), ("out", lambda x: x[1:], ValueError), ("out", misaligned, ValueError),
    ("out", lambda x: x[:1].expand(12, 12, 256), ValueError), ("out_fp32", lambda x: x.bfloat16(), ValueError), ("out_fp32", misaligned, ValueError),
    ("lse", lambda x: x[:, 1:].contiguous(), ValueError), ("lse", lambda x: x.double(), ValueError), ("lse", lambda x: 3, TypeError)])
def test_output_errors(store, name, change, error):
    call = good_indexed()
    outputs = {"out": torch.empty(12, 12, 256, dtype=torch.bfloat16), "out_fp32": torch.empty(12, 12, 256), "lse": torch.empty(12, 12)}
    outputs[name] = change(outputs[name])
    with pytest.raises(error):
        qsa_indexed_forward(**call, **outputs, store=store)


def test_outputs_may_not_share_memory(store):
    call = good_indexed()
    with pytest.raises(ValueError, match="out.*q"):
        qsa_indexed_forward(**call, out=call["q"], store=store)
    shared = torch.empty(12 * 12 * 256)
    with pytest.raises(ValueError, match="memory shared with"):
        qsa_indexed_forward(**call, out_fp32=shared.view(12, 12, 256), lse=shared[:144].view(12, 12), store=store)


def test_engines_that_need_a_gpu_say_so(store):
    for engine in ("portable", "sm90"):
        with pytest.raises(NotImplementedError, match="CUDA device"):
            qsa_indexed_forward(**good_indexed(), engine=engine, store=store)


def test_frozen_store_serves_a_smaller_batch():
    store = PlanStore(None)
    store.get(QuerySparseSignature(12, 1, "indices", 5000), device="cpu")
    store.freeze()
    qsa_indexed_forward(**good_indexed(), store=store)


def test_signatures_hold_no_length():
    assert {f.name for f in dataclasses.fields(QuerySparseSignature)} == {"num_qo_heads", "num_kv_heads", "source", "max_tokens", "assume_finite"}
