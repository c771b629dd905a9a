"""Sparse attention for NVIDIA GPUs as a cuDNN Frontend graph backend: plans built once, kept, run on the caller's stream.

Public names are loaded on first use; importing this package initializes nothing.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

logging.getLogger("cudnn_graphs").addHandler(logging.NullHandler())

_OPS = ("BlockSparsePagedTSWrapper", "PagedBlockSparseSignature", "block_sparse_attention_with_paged_kv_cache",
        "merge_attention_states", "SageBlockSparseSignature", "SageTensors", "bsa_attn_sm120_blk64_sage_fwd", "convert_sage_v_layout",
        "quantize_sage_qkv", "sage_block_sparse_attention", "select_blocks", "QsaMetadata", "QuerySparseSignature",
        "build_qsa_metadata", "qsa_forward", "qsa_indexed_forward", "select_qsa_blocks")
_PLANNING = ("Plan", "PlanMissError", "PlanStore", "default_store")

__all__ = sorted((*_OPS, *_PLANNING, "ops", "planning"))


def __getattr__(name: str) -> Any:
    if name in _OPS:
        return getattr(importlib.import_module(".ops", __name__), name)
    if name in _PLANNING:
        return getattr(importlib.import_module(".planning", __name__), name)
    if name in ("ops", "planning"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
