"""A Sage descriptor as the cuDNN graph it would be, and what cuDNN answers.

cuDNN has no INT8 attention, and its FP8 attention has one scale per tensor. The graph is described anyway, as the
tensors lie, so that a plan can quote cuDNN's own reason, and so that a cuDNN that learns this is noticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..descriptor import SparseBlockDescriptor
from ..runtime.cudnn_plans import handle_for
from ..runtime.devices import DeviceFacts


class Uid:
    """Tensor ids of the graph."""

    Q, K, V, Q_SCALE, K_SCALE, V_SCALE, BLOCK_MASK, OUT, STATS = range(1, 10)


def build_graph(cudnn: Any, d: SparseBlockDescriptor, **where: Any) -> Any:
    """The graph, described but not validated. `where`: handle=, or device_property= and sm_version= without a GPU."""
    assert d.seq_len_q is not None and d.max_seq_len_kv is not None
    types = cudnn.data_type
    graph = cudnn.pygraph(name="sage_block_sparse", io_data_type=types.BFLOAT16, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, **where)
    b, h, sq, sk, dim, blocks, rows = d.batch_size, d.num_qo_heads, d.seq_len_q, d.max_seq_len_kv, d.head_dim, -(-d.max_seq_len_kv // 64), d.rows_per_head
    padded = blocks * 64

    def tensor(name: str, uid: int, dtype: Any, *size: int, stride: list[int] | None = None) -> Any:
        compact = [size[1] * size[2] * size[3], size[2] * size[3], size[3], 1]
        return graph.tensor(dim=list(size), stride=stride or compact, data_type=dtype, name=name, uid=uid)

    q = tensor("q_int8", Uid.Q, types.INT8, b, h, sq, dim)
    k = tensor("k_int8", Uid.K, types.INT8, b, h, sk, dim)
    v = tensor("v_fp8", Uid.V, types.FP8_E4M3, b, h, sk, dim, stride=[h * dim * padded, dim * padded, 1, padded])
    scaled_q = graph.mul(a=q, b=tensor("q_scale", Uid.Q_SCALE, types.FLOAT, b, h, sq, 1), name="scale_q")
    scaled_k = graph.mul(a=k, b=tensor("k_scale", Uid.K_SCALE, types.FLOAT, b, h, sk, 1), name="scale_k")
    scaled_v = graph.mul(a=v, b=tensor("v_scale", Uid.V_SCALE, types.FLOAT, b, h, 1, dim), name="scale_v")
    mask = tensor("block_mask", Uid.BLOCK_MASK, types.UINT8, b, h, rows, -(-blocks // 8))
    out, stats = graph.sdpa(q=scaled_q, k=scaled_k, v=scaled_v, attn_scale=dim ** -0.5, generate_stats=True, block_mask=mask, name="sdpa")
    out.set_output(True).set_dim([b, h, sq, dim]).set_stride([h * sq * dim, sq * dim, dim, 1]).set_data_type(types.BFLOAT16).set_uid(Uid.OUT)
    stats.set_output(True).set_dim([b, h, sq, 1]).set_stride([h * sq, sq, 1, 1]).set_data_type(types.FLOAT).set_uid(Uid.STATS)
    return graph


def ask_cudnn(descriptor: SparseBlockDescriptor, device: DeviceFacts) -> dict[str, str]:
    """For `describe()`: the graph's key, where cuDNN gives it one, and cuDNN's refusal in its own words."""
    try:
        import cudnn
    except ImportError as error:
        return {"refusal": f"not asked: {error}"}
    answer = {"frontend": cudnn.__version__}
    try:
        with _place(cudnn, device) as where:
            graph = build_graph(cudnn, descriptor, **where)
            graph.validate()
            answer["key"] = str(graph.key())
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
    except Exception as error:  # noqa: BLE001 - whatever cuDNN raises is the answer
        return answer | {"refusal": str(error).strip()}
    return answer | {"refusal": "none: this cuDNN accepts the graph; the kernel named here still serves it"}


@contextlib.contextmanager
def _place(cudnn: Any, device: DeviceFacts) -> Iterator[dict[str, Any]]:
    """How a graph is told its device: by a handle where it is present, else by its properties."""
    if device.index is None:
        major, minor = device.capability
        yield {"device_property": cudnn.create_device_properties(device.properties), "sm_version": 10 * major + minor}
        return
    import torch
    with torch.cuda.device(device.index):
        yield {"handle": handle_for(device, 0)}
