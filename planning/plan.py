"""A plan: one signature on one device, built, and ready to run from any thread and stream."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..engines.base import Executable
from ..errors import problem
from ..memory import share_memory
from ..runtime.devices import DeviceFacts
from ..runtime.streams import current_raw_stream, on_device
from .signature import Signature


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """One stream's buffer. Threads that share the stream share it, so `turn` keeps the launches of one run together."""

    buffer: torch.Tensor
    turn: threading.Lock


@dataclass(frozen=True, slots=True, eq=False)
class BuiltPlan:
    """What an engine built for one signature. Shared by every plan that runs on it."""

    signature: Signature
    device: DeviceFacts
    engine: str
    executable: Executable
    header: Mapping[str, Any]           # everything describe() says, as kept on disk
    payload_bytes: int
    workspaces: dict[int, Workspace]    # by raw stream
    lock: threading.Lock

    def workspace(self, stream: int) -> Workspace:
        """This stream's own buffer, on the plan's device, which is current; under capture a fresh one, which then belongs to the graph's memory pool."""
        if torch.cuda.is_current_stream_capturing():
            return self._new_workspace()
        workspace = self.workspaces.get(stream)
        if workspace is None:
            with self.lock:
                workspace = self.workspaces.get(stream) or self.workspaces.setdefault(stream, self._new_workspace())
        return workspace

    def _new_workspace(self) -> Workspace:
        return Workspace(torch.empty(self.executable.workspace_bytes, dtype=torch.uint8, device=self.device.torch_device), threading.Lock())


class Plan:
    """An immutable plan. `run` takes the operation's run arguments; `describe` says what was built and why.

    A plan may run on one built for larger capacities (`built_for`): the facts are equal, and every size
    that this signature bounds is still checked against this signature.
    """

    __slots__ = ("signature", "_built", "workspace_bytes")
    signature: Signature
    workspace_bytes: int
    _built: BuiltPlan

    def __init__(self, signature: Signature, built: BuiltPlan) -> None:
        object.__setattr__(self, "signature", signature)
        object.__setattr__(self, "_built", built)
        object.__setattr__(self, "workspace_bytes", built.executable.workspace_bytes)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}: a plan is immutable; make another from a changed signature")

    def __repr__(self) -> str:
        return f"<Plan {self.signature.label} on {self.engine}, {self.device.name}>"

    @property
    def engine(self) -> str:
        return self._built.engine

    @property
    def device(self) -> DeviceFacts:
        return self._built.device

    @property
    def built_for(self) -> Signature:
        return self._built.signature

    def run(self, *args: Any, workspace: torch.Tensor | None = None, validate: bool = True, **kwargs: Any) -> Any:
        """Run the operation: its own arguments, as its wrapper's `run` takes them.

        workspace: a uint8 tensor of at least `workspace_bytes` on the plan's device, 256-byte aligned, whatever is in it, apart from the
        call's tensors; runs that share one must be ordered, on one stream and from one thread at a time. Absent, one buffer per (plan,
        stream) is kept.
        Nothing is copied to the host and nothing synchronizes.
        Raises TypeError and ValueError as the operation documents; `validate=False` skips those host checks.
        """
        arguments = self.signature.bind(self._built.device, *args, validate=validate, **kwargs)
        self.launch(arguments, workspace, validate=validate)
        return arguments.result

    def launch(self, arguments: Any, workspace: torch.Tensor | None = None, *, validate: bool = True) -> None:
        """Launch bound arguments on the caller's current stream of the plan's device. validate: see that the workspace is apart from them."""
        built = self._built
        if workspace is not None and (not isinstance(workspace, torch.Tensor) or workspace.layout is not torch.strided):
            raise TypeError(problem("workspace", getattr(workspace, "layout", type(workspace).__name__), "a dense uint8 tensor",
                                    "allocate plan.workspace_bytes bytes"))
        if built.device.kind == "cpu":
            built.executable.launch(arguments, 0, 0)
            return
        with on_device(built.device):
            stream = current_raw_stream(built.device)
            if not self.workspace_bytes:
                built.executable.launch(arguments, 0, stream)
            elif workspace is not None:
                built.executable.launch(arguments, self._checked(workspace, arguments if validate else None).data_ptr(), stream)
            else:
                own = built.workspace(stream)
                with own.turn:
                    built.executable.launch(arguments, own.buffer.data_ptr(), stream)

    def _checked(self, workspace: torch.Tensor, arguments: Any | None) -> torch.Tensor:
        if workspace.device != self.device.torch_device or workspace.dtype != torch.uint8 or not workspace.is_contiguous():
            raise ValueError(problem("workspace", f"{workspace.dtype} on {workspace.device}", f"contiguous uint8 on {self.device.torch_device}",
                                     "allocate it with torch.empty(plan.workspace_bytes, dtype=torch.uint8)"))
        if workspace.numel() < self.workspace_bytes or workspace.data_ptr() % 256 or not workspace.data_ptr():
            raise ValueError(problem("workspace", f"{workspace.numel()} bytes at {workspace.data_ptr():#x}",
                                     f"{self.workspace_bytes} bytes aligned to 256", "allocate plan.workspace_bytes bytes"))
        used = workspace[:self.workspace_bytes]
        for name in () if arguments is None else arguments.__slots__:
            value = getattr(arguments, name)
            if isinstance(value, torch.Tensor) and share_memory(used, value):
                raise ValueError(problem("workspace", f"memory shared with {name}", "memory of its own", "give another buffer"))
        return workspace

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self                     # immutable, and what it runs on is shared: a copied module keeps its plans

    def describe(self) -> dict[str, Any]:
        """Signature, engine and why the others declined, kernels with registers, spills and shared memory, tile
        configuration, workspace bytes, build and load seconds, device and versions, as plain data."""
        header = copy.deepcopy(dict(self._built.header))
        if self.built_for != self.signature:
            header["serves"] = self.signature.to_json()
        return header
