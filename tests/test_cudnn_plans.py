"""Loaded cuDNN plans: one that is alive stands in for its equals, so that captured ones are few. With a stand-in of cudnn."""

from __future__ import annotations

import contextlib
import gc
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from devices import H200

from cudnn_graphs.runtime import cudnn_plans
from cudnn_graphs.runtime.cudnn_plans import load_plan

DEVICES = [replace(H200, index=i) for i in (0, 1)]


@pytest.fixture
def loaded(monkeypatch):
    """The blobs that were made graphs of."""
    blobs = []
    graph = lambda handle: SimpleNamespace(deserialize=lambda handle, blob: blobs.append(blob), execute=lambda *args, **named: None)  # noqa: E731
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(pygraph=graph))
    monkeypatch.setattr(cudnn_plans, "handle_for", lambda device, stream: 0)
    monkeypatch.setattr(cudnn_plans, "_preload_nvrtc", lambda: None)
    monkeypatch.setattr(cudnn_plans, "_captured", set())
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    return blobs


def test_equal_plans_are_loaded_once_while_one_is_alive(loaded):
    first = load_plan(b"one build", DEVICES[0], "identity")
    assert load_plan(b"another build", DEVICES[0], "identity") is first
    others = [load_plan(b"other", DEVICES[0], "other identity"), load_plan(b"one build", DEVICES[1], "identity")]
    assert loaded == [b"one build", b"other", b"one build"] and first not in others
    del first, others
    gc.collect()
    load_plan(b"a third build", DEVICES[0], "identity")
    assert loaded[-1] == b"a third build", "nothing kept the first"


def test_a_captured_plan_lives_on_and_is_one(loaded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for build in range(3):
        load_plan(f"build {build}".encode(), DEVICES[0], "captured").execute({}, 0, 0)
        gc.collect()
    assert loaded == [b"build 0"] and len(cudnn_plans._captured) == 1
