"""Packed query-sparse attention on Hopper: neighbouring queries share one wgmma tile over the union of their blocks.

Three kernels: the first decides for every tile of queries whether packing pays, the second computes the tiles
where it does, the third computes query by query what is left, and what the second found to be tainted by
non-finite values. Token ids have no bitmap to unite and go to the third alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..arguments import QuerySparseArguments
from ..descriptor import SparseBlockDescriptor
from ..runtime.devices import DeviceFacts
from ..runtime.launch import LoadedKernel
from ..runtime.nvrtc import KernelSource
from .portable_qsa import PortableQsaDesign
from .qsa_launch import gather_source, pack_params

_GATHER_WARPS = 4
_GATHER_BLOCKS_PER_SM = 2
_SCHEDULE_BYTES = 256               # sizeof(QsaSchedule) in kernels/common/qsa_params.cuh


@dataclass(frozen=True, slots=True)
class UnionPlan:
    """The sizes of `QsaUnionPlan` in kernels/sm90/qsa_plan.cuh."""

    group: int

    @property
    def queries(self) -> int:
        return 2 * min(64 // self.group, 8)

    @property
    def smem_bytes(self) -> int:
        tiles = 6 * 64 * 512
        bitmap = 2 * self.queries * (512 + 16)
        pending = 2 * 4 * (512 + 16)
        steps = 8 * (8 * self.queries + 8 + 4 * 16 + 8)
        barriers = 8 * (2 * 8 + 4 * 2 + 2)
        return -(-(tiles + bitmap + pending + steps + barriers) // 1024) * 1024


class Sm90QsaDesign:
    """The scratch is a mode and a list entry per (tile, KV head): 8 bytes for 10 query tokens."""

    def __init__(self, descriptor: SparseBlockDescriptor, device: DeviceFacts) -> None:
        assert descriptor.max_seq_len_kv is not None
        plan = UnionPlan(descriptor.group)
        self._queries, self._sm_count = plan.queries, device.sm_count
        self.kernels: Mapping[str, KernelSource] = {
            "decide": _decide_source(plan), "union": _union_source(plan), "gather": gather_source(plan.group, False, _GATHER_WARPS, plan.queries)}
        self.workspace_bytes = _SCHEDULE_BYTES + 2 * 4 * self._items(descriptor.max_seq_len_kv, descriptor.num_kv_heads)
        self.config: dict[str, Any] = {"queries_per_tile": plan.queries, "rows_per_tile": 128, "keys_per_step": 64, "stages": 2,
                                       "gather_warps": _GATHER_WARPS, "smem_bytes": plan.smem_bytes}

    def _items(self, tokens: int, heads_kv: int) -> int:
        return -(-tokens // self._queries) * heads_kv

    def launch(self, kernels: Mapping[str, LoadedKernel], arguments: QuerySparseArguments, workspace: int, stream: int) -> None:
        total, heads_kv, _ = arguments.k.shape
        items = self._items(total, heads_kv)
        modes = workspace + _SCHEDULE_BYTES
        params = (pack_params(arguments, self._sm_count, workspace, modes, modes + 4 * items),)
        kernels["decide"].launch((items // heads_kv, 1, 1), params, stream)
        kernels["union"].launch((min(items, self._sm_count), 1, 1), params, stream)
        gather = min(items * self._queries, _GATHER_BLOCKS_PER_SM * self._sm_count)
        kernels["gather"].launch((gather, 1, 1), params, stream)


def _decide_source(plan: UnionPlan) -> KernelSource:
    entry = f"qsa_decide_g{plan.group}"
    text = f"""#include "sm90/qsa_decide.cuh"
extern "C" __global__ void __launch_bounds__(kDecideThreads) {entry}(const __grid_constant__ QsaParams p) {{ qsa_decide<QsaUnionPlan<{plan.group}>>(p); }}
"""
    return KernelSource(entry, text, threads=128)


def _union_source(plan: UnionPlan) -> KernelSource:
    entry = f"qsa_union_g{plan.group}"
    text = f"""#include "sm90/qsa_union.cuh"
using Plan = QsaUnionPlan<{plan.group}>;
static_assert(sizeof(QsaUnionMemory<Plan>) == {plan.smem_bytes} && Plan::kQueries == {plan.queries});
extern "C" __global__ void __launch_bounds__(Plan::kThreads, 1) {entry}(const __grid_constant__ QsaParams p) {{ qsa_union<Plan>(p); }}
"""
    return KernelSource(entry, text, threads=384, smem_bytes=plan.smem_bytes)


def design_sm90_qsa(descriptor: SparseBlockDescriptor, device: DeviceFacts) -> Sm90QsaDesign | PortableQsaDesign:
    if descriptor.listing == "token_ids":
        return PortableQsaDesign(descriptor, device)
    return Sm90QsaDesign(descriptor, device)
