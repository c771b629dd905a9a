"""A sparse-block descriptor of paged rows as a cuDNN graph: folded rows over cuDNN's paged SDPA.

cuDNN's batch is (request, KV head, row) and its one head holds the row's packed query rows. The cache is one
container of sub-pages `[n, 1, sub_page, D]`, the page table each row's own sub-pages: the sparsity is in the
table. The container's first dimension is a bound, not a size, so one plan serves caches of any num_pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..descriptor import SparseBlockDescriptor

CONTAINER_SUB_PAGES = 1 << 28       # entries are int32; 2^28 sub-pages of 8 tokens and D 64 are 256 GiB
KEY_TILE = 128                      # cuDNN reads keys in tiles of 128, whatever the length


class Uid:
    """Tensor ids of the graph: the keys of its variant pack and part of its identity."""

    Q, K, V, K_TABLE, V_TABLE, SEQ_Q, SEQ_KV, SCALE, OUT, STATS = range(1, 11)


@dataclass(frozen=True, slots=True)
class FoldedShape:
    """The sizes of the folded graph."""

    rows: int                       # cuDNN's batch
    packed_rows: int                # query rows of each: tokens x heads
    head_dim: int
    sub_page: int                   # tokens
    columns: int                    # sub-pages a row's table holds, whole key tiles

    @classmethod
    def of(cls, d: SparseBlockDescriptor) -> FoldedShape:
        assert d.seq_len_q is not None and d.max_spans_per_row is not None and d.max_seq_len_kv is not None
        blocks = min(d.max_spans_per_row, -(-d.max_seq_len_kv // d.span_tokens))
        per_tile = max(1, KEY_TILE // d.sub_page)
        columns = -(-blocks * (d.span_tokens // d.sub_page) // per_tile) * per_tile
        return cls(d.batch_size * d.num_kv_heads * d.rows_per_head, min(d.q_block_size, d.seq_len_q) * d.group, d.head_dim, d.sub_page, columns)


def build_graph(cudnn: Any, shape: FoldedShape, dtype: str, **where: Any) -> Any:
    """The graph, described but not validated. `where`: handle=, or device_property= and sm_version= without a GPU."""
    io = {"bfloat16": cudnn.data_type.BFLOAT16, "float16": cudnn.data_type.HALF}[dtype]
    fp32, int32 = cudnn.data_type.FLOAT, cudnn.data_type.INT32
    graph = cudnn.pygraph(name="paged_block_sparse", io_data_type=io, intermediate_data_type=fp32, compute_data_type=fp32, **where)
    n, m, d = shape.rows, shape.packed_rows, shape.head_dim
    packed, packed_stride = [n, 1, m, d], [m * d, m * d, d, 1]
    container, container_stride = [CONTAINER_SUB_PAGES, 1, shape.sub_page, d], [shape.sub_page * d, shape.sub_page * d, d, 1]
    table, table_stride = [n, 1, shape.columns, 1], [shape.columns, shape.columns, 1, 1]
    q = graph.tensor(dim=packed, stride=packed_stride, data_type=io, name="q", uid=Uid.Q)
    k = graph.tensor(dim=container, stride=container_stride, data_type=io, name="k", uid=Uid.K)
    v = graph.tensor(dim=container, stride=container_stride, data_type=io, name="v", uid=Uid.V)
    k_table = graph.tensor(dim=table, stride=table_stride, data_type=int32, name="k_table", uid=Uid.K_TABLE)
    v_table = graph.tensor(dim=table, stride=table_stride, data_type=int32, name="v_table", uid=Uid.V_TABLE)
    seq_q = graph.tensor(dim=[n, 1, 1, 1], stride=[1, 1, 1, 1], data_type=int32, name="seq_q", uid=Uid.SEQ_Q)
    seq_kv = graph.tensor(dim=[n, 1, 1, 1], stride=[1, 1, 1, 1], data_type=int32, name="seq_kv", uid=Uid.SEQ_KV)
    scale = graph.tensor(dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=fp32, is_pass_by_value=True, name="sm_scale", uid=Uid.SCALE)
    out, stats = graph.sdpa(q=q, k=k, v=v, attn_scale=scale, generate_stats=True, use_padding_mask=True, seq_len_q=seq_q, seq_len_kv=seq_kv,
                            paged_attention_k_table=k_table, paged_attention_v_table=v_table,
                            paged_attention_max_seq_len_kv=shape.columns * shape.sub_page, name="sdpa")
    out.set_output(True).set_dim(packed).set_stride(packed_stride).set_data_type(io).set_uid(Uid.OUT)
    stats.set_output(True).set_dim([n, 1, m, 1]).set_stride([m, m, 1, 1]).set_data_type(fp32).set_uid(Uid.STATS)
    return graph
