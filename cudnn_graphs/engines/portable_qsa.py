"""Packed query-sparse attention for compute capability 8.0 and later: one query a CTA, keys gathered by cp.async."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..arguments import QuerySparseArguments
from ..descriptor import SparseBlockDescriptor
from ..runtime.devices import DeviceFacts
from ..runtime.launch import LoadedKernel
from ..runtime.nvrtc import KernelSource
from .qsa_launch import gather_smem_bytes, gather_source, pack_params

_MAX_GRID = 2**31 - 1


class PortableQsaDesign:
    """One kernel, no scratch. Its keys are shared out to the warps of a CTA, never to CTAs: a query has at most T
    of them, so where there are too few queries to fill the GPU there is too little work to be worth a merge."""

    workspace_bytes = 0

    def __init__(self, descriptor: SparseBlockDescriptor, device: DeviceFacts) -> None:
        indexed = descriptor.listing == "token_ids"
        warps = _warps(indexed, device.smem_per_block)
        source = gather_source(descriptor.group, indexed, warps)
        self.kernels: Mapping[str, KernelSource] = {"gather": source}
        self.config: dict[str, Any] = {"warps": warps, "keys_per_tile": 16, "queries_per_block": 1, "smem_bytes": source.smem_bytes}
        self._sm_count = device.sm_count

    def launch(self, kernels: Mapping[str, LoadedKernel], arguments: QuerySparseArguments, workspace: int, stream: int) -> None:
        total, heads_kv, _ = arguments.k.shape
        kernels["gather"].launch((min(total * heads_kv, _MAX_GRID), 1, 1), (pack_params(arguments, self._sm_count),), stream)


def _warps(indexed: bool, smem_per_block: int) -> int:
    """Four where two such CTAs share an SM (eight keep 128 KB under way); elsewhere as many as one CTA has room for."""
    if smem_per_block >= 2 * gather_smem_bytes(indexed, 4):
        return 4
    return max(w for w in range(1, 7) if w == 1 or gather_smem_bytes(indexed, w) <= smem_per_block)


def design_portable_qsa(descriptor: SparseBlockDescriptor, device: DeviceFacts) -> PortableQsaDesign:
    return PortableQsaDesign(descriptor, device)
