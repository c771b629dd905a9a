"""What a signature remembers of calls that passed lets nothing through that is refused alone: addresses that moved, values that changed."""

from __future__ import annotations

import pytest
import torch
from cases_qsa import packed_batch, qkv, random_bitmap
from paged_cases import PagedCase
from sage_cases import SageCase

from cudnn_graphs import QuerySparseSignature, SageBlockSparseSignature
from cudnn_graphs.ops import known_calls
from cudnn_graphs.runtime.devices import CPU


def paged():
    case = PagedCase().make()
    positional, keywords = case.arguments()
    return case.signature(), positional, keywords | {"out": torch.empty_like(case.q), "lse": torch.empty(2, 4, 16)}, {"out": case.q}


def sage():
    case = SageCase(seq_q=64, seq_k=128, counts=True).make()
    memory = torch.zeros(2 * case.q.numel(), dtype=torch.int8)
    case.q = memory[:case.q.numel()].view(case.q.shape)
    positional = (case.q, case.k, case.v, case.q_scale, case.k_scale, case.v_scale, case.index, case.count, None, case.nums)
    outputs = {"out": torch.empty(case.q.shape, dtype=torch.bfloat16), "lse": torch.empty(1, 2, 64)}
    return (SageBlockSparseSignature(1, 2, 64, 128, 5, has_counts=True, return_lse=True), positional, outputs,
            {"out": memory.view(torch.bfloat16).view(case.q.shape)})


def qsa():
    metadata = packed_batch(3, 16)
    q, k, v = qkv(metadata.lo.numel())
    outputs = {"out": torch.empty_like(q), "out_fp32": torch.empty(q.shape), "lse": torch.empty(q.shape[1], q.shape[0])}
    return QuerySparseSignature(12, 1, "bitmap", len(q)), (q, k, v, random_bitmap(metadata, 0.5), *metadata), outputs, {"out": q}


CALLS = {"paged": paged, "sage": sage, "qsa": qsa}


@pytest.fixture(params=CALLS)
def call(request):
    """A signature, a call of it that passed twice, and outputs of the same structure that share an input's memory."""
    signature, args, keywords, shared = CALLS[request.param]()
    for _ in range(2):
        signature.bind(CPU, *args, **keywords)
    assert len(signature._passed._known) == 1, "the second call was checked anew"
    return signature, args, keywords, shared


def test_an_output_moved_onto_an_input(call):
    signature, args, keywords, shared = call
    for _ in range(2):
        with pytest.raises(ValueError, match="out: got memory shared with q"):
            signature.bind(CPU, *args, **(keywords | shared))
    signature.bind(CPU, *args, **keywords)


def test_an_output_moved_onto_another(call):
    signature, args, keywords, _ = call
    widest = max((t for t in keywords.values() if isinstance(t, torch.Tensor)), key=lambda t: t.nbytes)
    lse = keywords["lse"]
    inside = widest.view(-1).view(torch.float32)[:lse.numel()].view(lse.shape)
    with pytest.raises(ValueError, match="lse: got memory shared with out"):
        signature.bind(CPU, *args, **(keywords | {"lse": inside}))


def test_one_tensor_changed_in_place(call):
    """The same objects: what they are is read at every call."""
    signature, args, keywords, _ = call
    for tensor in (args[0], keywords["out"]):
        before = tensor.data
        tensor.data = torch.zeros(3, 5, dtype=tensor.dtype)
        with pytest.raises(ValueError):
            signature.bind(CPU, *args, **keywords)
        tensor.data = before
    signature.bind(CPU, *args, **keywords)


def test_sages_count_is_read_at_every_call():
    signature, args, keywords, _ = sage()
    signature.bind(CPU, *args, **keywords)
    for count, error in ((6, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match="block_sparse_num"):
            signature.bind(CPU, *args[:7], count, *args[8:], **keywords)


def test_qsa_by_name_in_any_order():
    """lo and block_first swapped, and named so that the call looks like the one that passed."""
    signature, args, keywords, _ = qsa()
    names = ("sel_blocks", "lo", "hi", "blk_base", "tok_base", "block_first", "block_last")
    named = dict(zip(names, args[3:]))
    assert named["lo"].shape != named["block_first"].shape
    signature.bind(CPU, *args[:3], **named, **keywords)
    swapped = {"sel_blocks": named["sel_blocks"], "block_first": named["lo"], "hi": named["hi"], "blk_base": named["blk_base"],
               "tok_base": named["tok_base"], "lo": named["block_first"], "block_last": named["block_last"]}
    with pytest.raises(ValueError, match="lo: got"):
        signature.bind(CPU, *args[:3], **swapped, **keywords)


def test_what_is_kept_is_bounded(call, monkeypatch):
    monkeypatch.setattr(known_calls, "_MOST", 4)
    signature, args, keywords, _ = call
    kept = signature._passed._known
    room = torch.empty(keywords["out"].numel() + 8 * 40, dtype=torch.bfloat16)
    for i in range(20):
        out = room[16 * i:][:keywords["out"].numel()].view(keywords["out"].shape)       # 32 bytes further each time: one structure, 20 places
        signature.bind(CPU, *args, **(keywords | {"out": out}))
        assert 1 <= len(kept) <= 4 and all(len(known.apart) <= 4 for known in kept.values())
    for i in range(1, 20):
        out = torch.empty(keywords["out"].numel() + 16 * i, dtype=torch.bfloat16)[:keywords["out"].numel()].view(keywords["out"].shape)
        lse = torch.empty(keywords["lse"].numel() + 4, dtype=torch.float32)[i % 4:][:keywords["lse"].numel()].view(keywords["lse"].shape)
        if "sage" not in signature.label:       # whose lse starts on 16 bytes
            signature.bind(CPU, *args, **(keywords | {"out": out, "lse": lse}))
        assert 1 <= len(kept) <= 4
