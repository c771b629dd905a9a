"""A workspace that the caller gives is the call's own: checked before the launch, exactly, and only as far as the plan uses it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paged_cases import PagedCase

from cudnn_graphs.memory import share_memory
from cudnn_graphs.planning.plan import BuiltPlan, Plan
from cudnn_graphs.runtime.devices import device_facts

BYTES = 1024


def plan_and_arguments(**facts: Any) -> tuple[Plan, Any]:
    """A plan that needs BYTES of workspace, and one bound call of it."""
    case = PagedCase(**facts).make()
    signature, device = case.signature(), device_facts("cpu")
    positional, keywords = case.arguments()
    built = BuiltPlan(signature, device, "stub", SimpleNamespace(workspace_bytes=BYTES), {}, 0, {}, threading.Lock())  # type: ignore[arg-type]
    return Plan(signature, built), signature.bind(device, *positional, **keywords)


def aligned(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(-1).view(torch.uint8)[-memory.data_ptr() % 256:]


@pytest.mark.parametrize("name", ["q", "out", "block_indices"])
def test_memory_of_the_call_is_refused(name):
    plan, arguments = plan_and_arguments()
    arena = torch.zeros(1 << 16, dtype=torch.uint8)
    value = getattr(arguments, name)
    room = aligned(arena)[:value.nbytes].view(value.dtype).view(value.shape)
    setattr(arguments, name, room)
    with pytest.raises(ValueError, match=f"workspace: got memory shared with {name}; need memory of its own"):
        plan._checked(aligned(arena), arguments)
    assert plan._checked(aligned(arena), None) is not None, "unvalidated runs are trusted"


def test_only_what_the_plan_uses_counts():
    plan, arguments = plan_and_arguments()
    arena = aligned(torch.zeros(1 << 16, dtype=torch.uint8))
    arguments.q = arena[BYTES:BYTES + arguments.q.nbytes].view(arguments.q.dtype).view(arguments.q.shape)
    assert plan._checked(arena, arguments) is arena


def test_a_workspace_may_lie_in_the_padding_of_pages():
    plan, arguments = plan_and_arguments(padded_pages=2, page_size=64, max_seq_len_kv=300)
    pages, stride, inner = arguments.k.shape[0], arguments.k.stride(0), arguments.k[0].numel()
    cache = torch.zeros(pages * stride + 256, dtype=arguments.k.dtype)
    first = -cache.data_ptr() % 256 // 2
    arguments.k = cache[first:first + pages * stride].as_strided(arguments.k.shape, arguments.k.stride(), first)
    inside = cache[first + inner:first + stride].view(torch.uint8)
    assert inside.data_ptr() % 256 == 0 and inside.numel() >= BYTES
    assert plan._checked(inside, arguments) is inside
    with pytest.raises(ValueError, match="memory shared with k"):
        plan._checked(cache[first + inner - 128:first + stride].view(torch.uint8), arguments)


def test_what_is_no_dense_tensor_is_refused_on_every_plan():
    plan, arguments = plan_and_arguments()
    for bad in ("x", torch.zeros(8, dtype=torch.uint8).to_sparse()):
        with pytest.raises(TypeError, match="workspace: got .*; need a dense uint8 tensor"):
            plan.launch(arguments, bad)
    freed = torch.zeros(1 << 14, dtype=torch.uint8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="workspace: got 16384 bytes at 0x0"):
        plan._checked(freed, arguments)


def test_strides_too_hard_to_tell_apart_count_as_sharing():
    """numpy would look for an address that both reach for longer than anyone waits."""
    memory = torch.empty(0, dtype=torch.bfloat16).untyped_storage()
    memory.resize_(2 * 3 * 19031448 + (1 << 20))        # never touched, so never in RAM
    whole = torch.empty(0, dtype=torch.bfloat16).set_(memory)
    q = whole.as_strided((3, 1021, 12, 256), (9515728, 9320, 256, 1))
    out = whole.as_strided((3, 1021, 12, 256), (19031448, 18640, 256, 1), 3064)
    assert share_memory(q, out)
    assert not share_memory(q[:, ::2], q[:, 1::2]) and share_memory(q[:, ::2], q[:, 2:4])
