"""Versions of what a plan depends on, and which packages an engine misses here. Imports nothing heavy."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from typing import Any

_NEEDS = {
    "reference": (),
    "portable": ("cupy", "cuda.bindings"),
    "sm90": ("cupy", "cuda.bindings"),
    "cudnn": ("cudnn", "cupy", "cuda.bindings"),
}


@functools.cache
def _present(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def missing_packages(engine: str) -> list[str]:
    """Import names that `engine` needs and this installation lacks."""
    return [module for module in _NEEDS[engine] if not _present(module)]


@functools.cache
def package_version() -> str:
    try:
        return importlib.metadata.version("cudnn-graphs")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


@functools.cache
def _version(call: str) -> str | None:
    try:
        if call == "nvrtc":
            from .nvrtc import nvrtc_version
            return ".".join(map(str, nvrtc_version()))
        if call == "driver":
            import torch
            from cuda.bindings import driver
            return str(driver.cuDriverGetVersion()[1]) if torch.cuda.is_available() else None
        import cudnn
        return str(cudnn.backend_version()) if call == "cudnn" else cudnn.__version__
    except Exception:  # noqa: BLE001 - a library that is absent or broken has no version; that is the answer
        return None


def engine_environment(engine: str) -> dict[str, Any]:
    """Versions that must be equal between a plan's build and its load, for one engine.

    A cubin depends on nothing but its sources (their digest is kept beside this), so a newer NVRTC or
    driver keeps it; a cuDNN plan blob belongs to one cuDNN and one frontend.
    """
    environment: dict[str, Any] = {"package": package_version()}
    if engine == "cudnn":
        environment |= {"cudnn": _version("cudnn"), "frontend": _version("frontend")}
    return environment


def versions() -> dict[str, Any]:
    """Everything known, for headers and reports; None where a library is absent."""
    import torch
    return {"package": package_version(), "torch": torch.__version__, "cudnn": _version("cudnn"), "frontend": _version("frontend"),
            "nvrtc": _version("nvrtc"), "driver": _version("driver")}
