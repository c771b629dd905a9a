"""The library's own exceptions and the one wording every refusal uses."""

from __future__ import annotations


class CudnnGraphsError(RuntimeError):
    """A state or environment fault: something other than the arguments is wrong."""


class CaptureError(CudnnGraphsError):
    """A build, a load or a live check while a CUDA graph is being captured, or a launch on another device than the capture's."""


class PlanMissError(CudnnGraphsError):
    """A frozen store was asked for a plan it does not hold."""


def problem(name: str, got: object, need: object, fix: str) -> str:
    """The text of every argument error: what came, what is needed, what to do."""
    return f"{name}: got {got}; need {need}; {fix}"
