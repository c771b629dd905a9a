"""The engines by name. Each is imported when first used, so that a CPU-only install imports none of the GPU ones."""

from __future__ import annotations

import functools
from typing import cast

from ..engines.base import Engine


@functools.cache
def engine_named(name: str) -> Engine:
    """The engine of the support table's `name`."""
    if name == "reference":
        from ..engines.reference import ReferenceEngine
        return ReferenceEngine()
    if name == "cudnn":
        from ..engines.by_kind import EngineByKind
        from ..engines.cudnn_paged import CudnnPagedEngine
        from ..engines.cudnn_qsa import CudnnQsaEngine
        qsa = CudnnQsaEngine()
        return EngineByKind(name, {"csr/paged": CudnnPagedEngine(), "bitmap/packed": qsa, "token_ids/packed": qsa})
    from ..engines.asking_engine import AskingKernelEngine
    from ..engines.kernel_engine import Designer
    from ..graphs.sage import ask_cudnn
    designers: dict[str, Designer]
    if name == "portable":
        from ..engines.portable_paged import design_portable_paged
        from ..engines.portable_qsa import design_portable_qsa
        from ..engines.portable_sage import design_portable_sage
        designers = {"csr/paged": design_portable_paged, "padded/strided": cast(Designer, design_portable_sage),
                     "bitmap/packed": design_portable_qsa, "token_ids/packed": design_portable_qsa}
        return AskingKernelEngine(name, designers, {"padded/strided": ask_cudnn})
    if name == "sm90":
        from ..engines.sm90_paged import Sm90PagedDesign
        from ..engines.sm90_qsa import design_sm90_qsa
        from ..engines.sm90_sage import design_sm90_sage
        designers = {"csr/paged": Sm90PagedDesign, "padded/strided": cast(Designer, design_sm90_sage),
                     "bitmap/packed": design_sm90_qsa, "token_ids/packed": design_sm90_qsa}
        return AskingKernelEngine(name, designers, {"padded/strided": ask_cudnn})
    raise ValueError(f"engine: got {name!r}; need an engine of the support table; see cudnn_graphs.planning.support.ENGINES")
