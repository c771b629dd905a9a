"""Accept and reject cases drawn from the support table, on every kind of device, and what is picked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from devices import DEVICES, H200

from cudnn_graphs import PagedBlockSparseSignature, PlanStore
from cudnn_graphs.descriptor import SparseBlockDescriptor
from cudnn_graphs.planning import ENGINES, REQUIREMENTS, choose, verdict
from cudnn_graphs.runtime import environment
from cudnn_graphs.runtime.devices import CPU, DeviceFacts

PAGED = PagedBlockSparseSignature(batch_size=2, seq_len_q=16, max_seq_len_kv=512, num_qo_heads=8, num_kv_heads=2, head_dim=128, q_block_size=16,
                                  kv_block_size=64, page_size=64)
PLAIN = PAGED.lower()
# For each requirement, by a part of its words: a descriptor and a device that break it and no other of its engine.
BREAKS: dict[str, tuple[SparseBlockDescriptor, DeviceFacts]] = {
    "a CUDA device": (PLAIN, CPU),
    "compute capability 8.0 or later": (PLAIN, DEVICES["sm_75"]),
    "compute capability 9.0": (PLAIN, DEVICES["sm_100"]),
    "no causal mask": (PAGED.replace(mask_type="causal").lower(), DEVICES["sm_90"]),
    "no valid bits": (PAGED.replace(use_kv_valid_bits=True).lower(), DEVICES["sm_90"]),
    "a page stride": (PAGED.replace(page_stride=2 * 64 * 128 + 8).lower(), DEVICES["sm_90"]),
}
RULES = [r for r in REQUIREMENTS if r.kind == "csr/paged" and r.need != "nothing more"]


@pytest.fixture(autouse=True)
def everything_installed(monkeypatch):
    monkeypatch.setattr(environment, "_present", lambda module: True)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.engine}: {r.need[:40]}")
def test_each_requirement_alone_declines_with_its_own_words(rule):
    descriptor, device = next(pair for part, pair in BREAKS.items() if rule.need.startswith(part))
    broken = [r.need for r in RULES if r.engine == rule.engine and not r.holds(descriptor, device)]
    # Where there is no CUDA device at all, every rule about its capability is broken too.
    assert broken[0] == rule.need and (len(broken) == 1 or device.kind == "cpu")
    said = verdict(rule.engine, descriptor, device)
    assert not said.ok and said.reason.startswith(f"{rule.engine} on {device.name}") and said.reason.endswith(f"needs {rule.need}")
    if device.kind == "cuda":
        assert f"compute capability {device.capability[0]}.{device.capability[1]}" in said.reason


def test_every_break_is_used():
    assert all(any(r.need.startswith(part) for r in RULES) for part in BREAKS)


ACCEPTS = {
    "cpu": {"reference"}, "sm_75": {"reference"}, "sm_90": {"reference", "cudnn", "portable", "sm90"},
    **dict.fromkeys(("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"), {"reference", "cudnn", "portable"}),
}


@pytest.mark.parametrize("device", DEVICES)
def test_who_serves_a_plain_descriptor(device):
    assert {e for e in ENGINES if verdict(e, PLAIN, DEVICES[device]).ok} == ACCEPTS[device]
    masked = PAGED.replace(mask_type="causal", use_kv_valid_bits=True).lower()
    assert {e for e in ENGINES if verdict(e, masked, DEVICES[device]).ok} == ACCEPTS[device] - {"cudnn"}


@pytest.mark.parametrize("stride", [2 * 64 * 128 + 64 * 128, 2 * 64 * 128 + 8 * 64 * 128])
def test_cudnn_takes_a_page_stride_of_whole_sub_pages(stride):
    assert verdict("cudnn", PAGED.replace(page_stride=stride).lower(), DEVICES["sm_90"]).ok


def test_no_engine_serves_a_kind_nobody_wrote_rules_for():
    odd = replace(PLAIN, listing="bitmap")
    for engine in ENGINES:
        rules = [r for r in REQUIREMENTS if r.engine == engine and r.kind == odd.kind]
        assert rules or verdict(engine, odd, DEVICES["sm_90"]).reason == f"{engine} serves no {odd.kind} descriptor"


PICKS = {"cpu": "reference", "sm_80": "portable", "sm_89": "portable", "sm_100": "portable", "sm_120": "portable"}


@pytest.mark.parametrize("device", PICKS)
def test_the_pick_of_unmeasured_devices(device):
    engine, declined = choose(PLAIN, DEVICES[device])
    assert engine == PICKS[device] and declined.keys() == set(ENGINES) - {engine}
    assert all(declined.values()), "a declined engine without a reason"


@pytest.mark.parametrize("mask", ["dense", "causal"])
def test_the_pick_on_hopper_serves_it_and_is_always_the_same(mask):
    descriptor = PAGED.replace(mask_type=mask).lower()
    picks = {choose(descriptor, DEVICES["sm_90"])[0] for _ in range(3)}
    assert len(picks) == 1 and picks <= {"sm90", "portable", "cudnn"}
    assert verdict(picks.pop(), descriptor, DEVICES["sm_90"]).ok


def test_the_reference_is_never_picked_on_a_gpu_unless_named(monkeypatch):
    with pytest.raises(NotImplementedError) as caught:
        choose(PLAIN, DEVICES["sm_75"])
    assert "reference: not picked on this device unless named" in str(caught.value)
    assert choose(PLAIN, DEVICES["sm_75"], "reference")[0] == "reference"
    _, declined = choose(PLAIN, DEVICES["sm_80"])
    assert "never picked on a GPU unless named" in declined["reference"]


def test_a_forced_engine_that_declines_names_every_engines_reason():
    descriptor = PAGED.replace(mask_type="causal").lower()
    with pytest.raises(NotImplementedError) as caught:
        choose(descriptor, DEVICES["sm_80"], "cudnn")
    text = str(caught.value)
    assert text.startswith("engine 'cudnn' does not serve this: got csr/paged on fake 8.0; need an engine that serves it; ")
    assert "cudnn: cudnn on fake 8.0 (compute capability 8.0) needs no causal mask" in text
    assert "sm90: sm90 on fake 8.0 (compute capability 8.0) needs compute capability 9.0" in text
    assert "portable: " in text and "reference: " in text


def test_a_forced_engine_that_serves_says_so_of_the_others():
    engine, declined = choose(PLAIN, DEVICES["sm_80"], "cudnn")
    assert engine == "cudnn" and declined["portable"] == "serves it; cudnn was named"


def test_an_unknown_engine_is_a_value_error():
    with pytest.raises(ValueError, match="engine: got 'flash'; need one of reference, cudnn, portable, sm90 or None; leave it out"):
        choose(PLAIN, CPU, "flash")


@pytest.mark.parametrize("missing", ["cupy", "cuda.bindings"])
def test_a_cuda_device_without_its_packages_names_the_extra(monkeypatch, missing):
    monkeypatch.setattr(environment, "_present", lambda module: module != missing)
    with pytest.raises(NotImplementedError) as caught:
        choose(PLAIN, DEVICES["sm_90"])
    for engine in ("cudnn", "portable", "sm90"):
        assert f"{engine} needs {missing}; install the extra cuda12 or cuda13: pip install 'cudnn-graphs[cuda13]'" in str(caught.value)


def test_without_the_frontend_only_cudnn_declines(monkeypatch):
    monkeypatch.setattr(environment, "_present", lambda module: module != "cudnn")
    assert "cudnn needs cudnn" in verdict("cudnn", PLAIN, DEVICES["sm_90"]).reason
    assert verdict("portable", PLAIN, DEVICES["sm_90"]).ok


def test_a_refusal_is_remembered_with_its_reason(monkeypatch):
    store, asked = PlanStore(), []
    from cudnn_graphs.planning import store as store_module
    monkeypatch.setattr(store_module, "choose", lambda *a: asked.append(a) or choose(*a))
    texts = []
    for _ in range(3):
        with pytest.raises(NotImplementedError) as caught:
            store.get(PAGED, "cpu", "portable")
        texts.append(str(caught.value))
    assert len(set(texts)) == 1 and len(asked) == 1 and store.stats().negative_hits == 2
    assert store.get(PAGED, "cpu").engine == "reference"


def test_a_refusal_at_build_is_remembered_with_its_reason(monkeypatch):
    """As cuDNN's, which says only when asked to build whether it has a plan."""
    store, asked = PlanStore(), []
    from cudnn_graphs.planning.engines import engine_named

    def refuse(*args):
        asked.append(args)
        raise NotImplementedError("engine 'reference': got no plan")
    monkeypatch.setattr(engine_named("reference"), "compile", refuse, raising=False)
    for _ in range(3):
        with pytest.raises(NotImplementedError, match="got no plan"):
            store.get(PAGED, "cpu")
    stats = store.stats()
    assert (len(asked), stats.misses, stats.builds, stats.negative_hits) == (1, 1, 0, 2)


@pytest.mark.parametrize("batch, tokens, picked", [(32, 1, "portable"), (8, 1, "sm90"), (32, 16, "portable"), (4, 2048, "sm90")])
def test_the_h200_takes_what_was_fastest_there(batch, tokens, picked):
    """P6, P7, P5 and P1 of the benchmark."""
    heads = 64 if tokens == 1 else 32
    signature = PagedBlockSparseSignature(batch, tokens, 32768, heads, 8, 128, min(tokens, 64), 64, 64, max_blocks_per_row=64)
    assert choose(signature.lower(), H200)[0] == picked


def test_decoding_is_read_bound_whatever_its_block_of_queries():
    decode = PagedBlockSparseSignature(32, 1, 32768, 64, 8, 128, 1, 64, 64, max_blocks_per_row=64)
    assert {choose(decode.replace(q_block_size=size).lower(), H200)[0] for size in (1, 16, 64, 128)} == {"portable"}
