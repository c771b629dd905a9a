"""What a signature remembers of calls that passed lets nothing through that is refused alone: addresses that moved, values that changed."""

from __future__ import annotations

import copy
import pickle
import re

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


def test_the_same_addresses_with_larger_tensors():
    """A batch of one whose out begins where q ends; at the same addresses a batch of two, whose q reaches into out."""
    case = PagedCase().make()
    (q, cache, page_indptr, *rest), keywords = case.arguments()
    seq_lens, block_indptr, block_indices = rest[1:]
    memory, one, signature = torch.zeros(3 * q[0].numel(), dtype=q.dtype), q[0].numel(), case.signature()

    def bind(batch):
        given, out = memory[:batch * one].view(batch, *q.shape[1:]), memory[one:(batch + 1) * one].view(batch, *q.shape[1:])
        signature.bind(CPU, given, cache, page_indptr[:batch + 1], rest[0], seq_lens[:batch], block_indptr[:batch], block_indices, **keywords, out=out)

    signature.bind(CPU, q, cache, page_indptr, *rest, **keywords, out=torch.empty_like(q))      # a batch of two is known
    for _ in range(2):
        bind(1)
        with pytest.raises(ValueError, match="out: got memory shared with q"):
            bind(2)


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
    """All that a signature keeps, not so much for each structure: 256 of each were 35 MB."""
    monkeypatch.setattr(known_calls, "_MOST_STRUCTURES", 4)
    monkeypatch.setattr(known_calls, "_MOST_PLACES", 4)
    signature, args, keywords, _ = call
    kept = signature._passed
    room = torch.empty(keywords["out"].numel() + 8 * 40, dtype=torch.bfloat16)
    for i in range(20):
        out = room[16 * i:][:keywords["out"].numel()].view(keywords["out"].shape)       # 32 bytes further each time: one structure, 20 places
        signature.bind(CPU, *args, **(keywords | {"out": out}))
        assert 1 <= len(kept._known) <= 4 and 1 <= len(kept._places) <= 4
    for i in range(1, 20):
        out = torch.empty(keywords["out"].numel() + 16 * i, dtype=torch.bfloat16)[:keywords["out"].numel()].view(keywords["out"].shape)
        lse = torch.empty(keywords["lse"].numel() + 4, dtype=torch.float32)[i % 4:][:keywords["lse"].numel()].view(keywords["lse"].shape)
        if "sage" not in signature.label:       # whose lse starts on 16 bytes
            signature.bind(CPU, *args, **(keywords | {"out": out, "lse": lse}))
        assert 1 <= len(kept._known) <= 4 and len(kept._places) <= 4


def test_addresses_count_only_where_an_output_is_given(call):
    signature, args, keywords, _ = call
    signature._passed._places.clear()
    given = {name: value for name, value in keywords.items() if name not in ("out", "out_fp32", "lse")}
    for _ in range(5):
        signature.bind(CPU, args[0].clone(), *args[1:], **given)
    assert not signature._passed._places


def test_a_copy_remembers_nothing(call):
    """What a signature keeps would be sent with it to other processes: megabytes of this one's addresses."""
    signature, args, keywords, _ = call
    for copied in (copy.copy(signature), copy.deepcopy(signature), pickle.loads(pickle.dumps(signature))):
        assert copied == signature and hash(copied) == hash(signature) and copied.key == signature.key and copied._passed._known == {}
    assert len(pickle.dumps(signature)) < 1000


# -- one thing changed -------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.uint32, torch.bool, torch.float8_e4m3fn)


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def changed(x):
    """`x` with one property changed, each in turn; whether it still may pass is the checks' to say."""
    zeros = lambda *shape: torch.zeros(shape).to(x.dtype)  # noqa: E731
    yield from (None, 3, [1, 2], x.float().numpy(), x.to("meta"), freed(x), x.reshape(-1), x[None], x[..., None], x[0], zeros(), zeros(0))
    yield from (x.to(dtype) for dtype in DTYPES if dtype != x.dtype)
    yield x.float().to_sparse()
    yield torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(3, 3)])
    for size in (1, 2, 4, 8):                       # elements further on: aligned otherwise
        yield zeros(x.numel() + size)[size:].view(x.shape)
    for d, n in enumerate(x.shape):
        before, after = x.shape[:d], x.shape[d + 1:]
        yield from (zeros(*before, m, *after) for m in (0, n - 1, n + 1))
        wide = zeros(*before, 2 * n, *after)
        yield from (wide.narrow(d, 0, n), wide.unflatten(d, (n, 2)).select(d + 1, 0), x.narrow(d, 0, 1).expand(x.shape))
        if after:
            yield zeros(*before, after[0], n, *after[1:]).transpose(d, d + 1)


def said(signature, args, keywords):
    try:
        signature.bind(CPU, *args, **keywords)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {re.sub('0x[0-9a-f]+', 'ADDRESS', str(error))}"
    return ""


def test_whatever_is_changed_is_refused_as_if_it_came_first(call):
    """Every argument in turn, after a call that passed: the words are those of a signature that knows of no call."""
    signature, args, keywords, _ = call
    places = [(i, None) for i in range(len(args))] + [(name, None) for name in keywords]
    places = [(at, part) for at, _ in places for part in ((0, 1) if isinstance(at, int) and isinstance(args[at], tuple) else (None,))]
    refused = 0
    for at, part in places:
        whole = args[at] if isinstance(at, int) else keywords[at]
        value = whole if part is None else whole[part]
        for other in changed(value) if isinstance(value, torch.Tensor) else (torch.zeros(2, dtype=torch.int32), -1, 99, 2.0, "a"):
            new = other if part is None else tuple(other if i == part else x for i, x in enumerate(whole))
            positional = [new if i == at else x for i, x in enumerate(args)]
            named = {name: new if name == at else x for name, x in keywords.items()}
            first = said(copy.copy(signature), positional, named)
            signature.bind(CPU, *args, **keywords)      # remembered again, whatever was pushed out
            assert said(signature, positional, named) == first and said(signature, positional, named) == first, (at, part, other)
            refused += bool(first)
    assert refused > 300


def test_a_tensor_whose_storage_was_freed(call):
    """FSDP frees storages under tensors that keep shape and device: torch's own operators crash on them."""
    signature, args, keywords, _ = call
    with pytest.raises(ValueError, match="a tensor whose storage was freed"):
        signature.bind(CPU, freed(args[0]), *args[1:], **keywords)
    with pytest.raises(ValueError, match="out: got a tensor whose storage was freed"):
        signature.bind(CPU, *args, **(keywords | {"out": freed(keywords["out"])}))


@pytest.mark.parametrize("sparse", [lambda x: x.float().to_sparse(), lambda x: torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(3, 3)])])
def test_a_tensor_that_is_not_dense(call, sparse):
    signature, args, keywords, _ = call
    with pytest.raises(TypeError, match="need a dense one"):
        signature.bind(CPU, sparse(args[0]), *args[1:], **keywords)
    with pytest.raises(TypeError, match="out: got a .* tensor; need a dense one"):
        signature.bind(CPU, *args, **(keywords | {"out": sparse(args[0])}))
