"""cuDNN handles: one a thread and device, handed on when a thread ends, never destroyed."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from devices import H200

from cudnn_graphs.runtime import cudnn_plans
from cudnn_graphs.runtime.cudnn_plans import handle_for

DEVICES = [replace(H200, index=i) for i in (0, 1)]


@pytest.fixture
def made(monkeypatch):
    """Handles made so far, by a stand-in of cudnn."""
    made, streams = [], {}
    fake = SimpleNamespace(create_handle=lambda: made.append(len(made)) or made[-1], set_stream=lambda handle, stream: streams.update({handle: stream}))
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(cudnn_plans, "_thread", threading.local())
    monkeypatch.setattr(cudnn_plans, "_left", type(cudnn_plans._left)(cudnn_plans._left.default_factory))
    return made


def in_thread(call):
    got = []
    thread = threading.Thread(target=lambda: got.append(call()))
    thread.start()
    thread.join()
    return got[0]


def test_threads_that_come_and_go_share_one_after_the_other(made):
    assert {in_thread(lambda: (handle_for(DEVICES[0], 0), handle_for(DEVICES[0], 7))) for _ in range(50)} == {(0, 0)}
    assert in_thread(lambda: handle_for(DEVICES[1], 0)) == 1, "a handle of another device"
    assert made == [0, 1]


def test_threads_at_once_have_one_each(made):
    barrier, got = threading.Barrier(8), []

    def work():
        got.append(handle_for(DEVICES[0], 0))
        barrier.wait(timeout=30)
        got.append(handle_for(DEVICES[0], 0))

    for _ in range(3):
        got.clear()
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got) == sorted([*range(8), *range(8)])
