"""The engines by name. Each is imported when first used, so that a CPU-only install imports none of the GPU ones."""

from __future__ import annotations

import functools

from ..engines.base import Engine


@functools.cache
def engine_named(name: str) -> Engine:
    """The engine of the support table's `name`."""
    if name == "reference":
        from ..engines.reference import ReferenceEngine
        return ReferenceEngine()
    if name == "cudnn":
        from ..engines.cudnn_paged import CudnnPagedEngine
        return CudnnPagedEngine()
    from ..engines.kernel_engine import KernelEngine
    if name == "portable":
        from ..engines.portable_paged import design_portable_paged
        return KernelEngine(name, {"csr/paged": design_portable_paged})
    if name == "sm90":
        from ..engines.sm90_paged import design_sm90_paged
        return KernelEngine(name, {"csr/paged": design_sm90_paged})
    raise ValueError(f"engine: got {name!r}; need an engine of the support table; see cudnn_graphs.planning.support.ENGINES")
