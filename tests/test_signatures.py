"""Signatures: equal facts give equal keys in every process, every fact changes the key, nothing else is in it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields

import pytest
from paged_cases import PagedCase

from cudnn_graphs import PagedBlockSparseSignature, PlanStore
from cudnn_graphs.planning import Signature

BASE = PagedBlockSparseSignature(batch_size=8, seq_len_q=16, max_seq_len_kv=32768, num_qo_heads=64, num_kv_heads=8, head_dim=128, q_block_size=16,
                                 kv_block_size=64, page_size=64)
CHANGES = {
    "batch_size": 9, "seq_len_q": 17, "max_seq_len_kv": 32769, "num_qo_heads": 32, "num_kv_heads": 4, "head_dim": 64, "q_block_size": 8, "kv_block_size": 128,
    "page_size": 32, "mask_type": "causal", "use_kv_valid_bits": True, "dtype": "float16", "return_lse": True, "max_blocks_per_row": 100,
    "kv_layout": "combined", "page_stride": 8 * 64 * 128 + 64, "page_table": "block_tables", "shared_pattern": True, "assume_finite": True,
}


def test_every_field_changes_the_key():
    assert CHANGES.keys() == {f.name for f in fields(PagedBlockSparseSignature)}
    keys = {BASE.key} | {BASE.replace(**{name: value}).key for name, value in CHANGES.items()}
    assert len(keys) == 1 + len(CHANGES)


def test_the_key_is_the_same_in_another_process_and_in_another_hash_seed():
    code = "import sys, json; from cudnn_graphs.planning import Signature; import cudnn_graphs.ops; print(Signature.from_json(json.loads(sys.argv[1])).key)"
    for seed in ("1", "2"):
        said = subprocess.run([sys.executable, "-c", code, json.dumps(BASE.to_json())], env={"PYTHONHASHSEED": seed, "PATH": ""}, capture_output=True,
                              text=True, timeout=120, check=True)
        assert said.stdout.strip() == BASE.key


def test_the_key_of_these_facts_is_this_one():
    """A plan directory outlives a release: a changed key makes every plan in it a miss, so change it on purpose."""
    assert PagedBlockSparseSignature(1, 1, 64, 8, 1, 64, 1, 64, 64).key == "5306bcb41f15a8847ad312ccc98a2302b36378cf66bd06eac9c63a05681f2c97"


@pytest.mark.parametrize("changes", [{}, *({name: value} for name, value in CHANGES.items())], ids=lambda c: next(iter(c), "none"))
def test_json_round_trip(changes):
    signature = BASE.replace(**changes)
    back = Signature.from_json(json.loads(json.dumps(signature.to_json())))
    assert back == signature and hash(back) == hash(signature) and back.key == signature.key and type(back) is PagedBlockSparseSignature


@pytest.mark.parametrize("broken", [{"type": "NoSuchSignature"}, {"type": None}, {"head": 3}, {"head_dim": 100}])
def test_json_of_something_else_is_a_value_error(broken):
    with pytest.raises(ValueError, match="; need "):
        Signature.from_json({**BASE.to_json(), **broken})


def test_json_without_a_needed_field_is_a_value_error():
    with pytest.raises(ValueError, match="head_dim"):
        Signature.from_json({n: v for n, v in BASE.to_json().items() if n != "head_dim"})


def test_frozen_and_hashable():
    with pytest.raises(FrozenInstanceError):
        BASE.head_dim = 64
    assert len({BASE, BASE.replace(), BASE.replace(batch_size=9)}) == 2


def test_what_a_run_may_change_is_in_no_signature():
    """Scale, live lengths, the pattern and num_pages: one plan, one build."""
    store = PlanStore()
    for i, changes in enumerate(({}, {"sm_scale": 0.3}, {"lens": [200, 3]}, {"seed": 9}, {"lens": [17, 199]})):
        case = PagedCase(**changes).make()
        assert case.signature() == PagedCase().make().signature(), f"call {i}"
        positional, keywords = case.arguments()
        store.get(case.signature(), "cpu").run(*positional, **keywords)
    assert store.stats().builds == 1


def test_none_is_every_block_and_a_compact_stride_is_none():
    assert BASE.max_blocks_per_row == 512 and BASE.replace(max_blocks_per_row=512) == BASE
    assert BASE.replace(max_blocks_per_row=512).key == BASE.key
    assert BASE.replace(page_stride=8 * 64 * 128) == BASE
    combined = BASE.replace(kv_layout="combined", page_stride=2 * 8 * 64 * 128)
    assert combined.page_stride is None


def test_causal_with_one_query_is_dense():
    assert BASE.replace(seq_len_q=1, mask_type="causal").lower() == BASE.replace(seq_len_q=1).lower()
    assert BASE.replace(mask_type="causal").lower().masks == {"length", "causal"}


@pytest.mark.parametrize("capacity", ["batch_size", "max_seq_len_kv", "max_blocks_per_row"])
def test_a_capacity_fits_anything_smaller(capacity):
    larger = BASE.replace(**{capacity: getattr(BASE, capacity) + 64})
    assert larger.fits(BASE) and not BASE.fits(larger) and BASE.fits(BASE)
    assert larger.size() > BASE.size()


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - {"batch_size", "max_seq_len_kv", "max_blocks_per_row"}))
def test_nothing_fits_over_another_fact(name):
    large = BASE.replace(batch_size=99, **{name: CHANGES[name]})
    assert not large.fits(BASE)


def test_differences():
    other = BASE.replace(head_dim=64, batch_size=2)
    assert BASE.differences(other) == {"head_dim": (128, 64), "batch_size": (8, 2)}
    assert BASE.differences(BASE) == {}


@pytest.mark.parametrize(("changes", "parts"), [
    ({}, ["paged B8 q16 kv32768 H64/8 D128 blocks 16x64 (max 512) page 64 bf16"]),
    ({"dtype": "float16", "mask_type": "causal", "use_kv_valid_bits": True, "return_lse": True}, ["fp16 causal bits lse"]),
    ({"kv_layout": "combined", "page_table": "block_tables", "shared_pattern": True, "page_stride": 2**20, "assume_finite": True},
     ["combined padded table shared finite"]),
])
def test_label_is_one_short_line(changes, parts):
    label = BASE.replace(**changes).label
    assert all(part in label for part in parts) and "\n" not in label and len(label) < 140


def test_lowering_keeps_every_fact():
    lowered = BASE.replace(page_stride=2**20, shared_pattern=True, page_table="block_tables", return_lse=True, assume_finite=True).lower()
    assert (lowered.kind, lowered.group, lowered.rows_per_head, lowered.packed_rows, lowered.sub_page) == ("csr/paged", 8, 1, 128, 64)
    assert (lowered.max_spans_per_row, lowered.page_stride, lowered.shared_pattern, lowered.page_table) == (512, 2**20, True, "block_tables")
    assert (lowered.return_lse, lowered.assume_finite, lowered.qk_dtype, lowered.masks) == (True, True, "bfloat16", {"length"})
    assert json.loads(json.dumps(lowered.to_json()))["masks"] == ["length"]


def test_replace_keeps_every_block_every_block():
    signature = PagedBlockSparseSignature(1, 1, 1024, 8, 1, 64, 1, 64, 64)
    assert signature.replace(max_seq_len_kv=2048).max_blocks_per_row == 32
    assert signature.replace(max_seq_len_kv=2048, max_blocks_per_row=5).max_blocks_per_row == 5
    assert signature.replace(max_blocks_per_row=5).replace(max_seq_len_kv=2048).max_blocks_per_row == 5
