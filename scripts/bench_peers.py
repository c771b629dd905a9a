"""What a user of the paged operation would run instead, called as its own documentation says, on a workload's tensors.

Each peer returns a callable that runs once and returns its output laid out like q, or raises `Unavailable`
with the reason. Whatever is not part of the peer's own run (planning, regrouping q) happens outside the callable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bench_paged import PagedWorkload
from bench_workload import Run, Unavailable, imported


def _folded_pages(w: PagedWorkload) -> torch.Tensor:
    """[B * Hkv * R, pages]: each row's blocks as entries of the cache seen as [P * Hkv, 1, page, D]."""
    if w.kv_block_size != w.page_size or w.mask_type != "dense" or w.bits:
        raise Unavailable("folded rows need page = block, dense, no bits")
    page = w.t["pages"].view(w.batch, -1).long()
    blocks = w.t["blocks"].long()
    physical = torch.gather(page[:, None, None].expand(-1, w.num_kv_heads, w.rows, -1), 3, blocks)
    head = torch.arange(w.num_kv_heads, device=page.device).view(1, -1, 1, 1)
    return (physical * w.num_kv_heads + head).to(torch.int32).flatten(0, 2)


def _regrouped_q(w: PagedWorkload) -> torch.Tensor:
    """[B * Hkv * R, q_block, G, D]."""
    q = w.t["q"].view(w.batch, w.rows, -1, w.num_kv_heads, w.group, w.head_dim)
    return q.permute(0, 3, 1, 2, 4, 5).reshape(w.batch * w.num_kv_heads * w.rows, -1, w.group, w.head_dim)


def _like_q(w: PagedWorkload, out: torch.Tensor) -> torch.Tensor:
    out = out.view(w.batch, w.num_kv_heads, w.rows, -1, w.group, w.head_dim).permute(0, 2, 3, 1, 4, 5)
    return out.reshape(w.batch, w.seq_len_q, w.num_qo_heads, w.head_dim)


def _dense_kv(w: PagedWorkload) -> tuple[torch.Tensor, torch.Tensor]:
    """The same tokens contiguous, [B, Hkv, S, D]: peers without paging get them for free."""
    order = w.t["pages"].view(w.batch, -1).long()
    return tuple(w.t[n][order].permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous() for n in ("k", "v"))  # type: ignore[return-value]


def cudnn_graph_alone(w: PagedWorkload) -> Run:
    """cuDNN's paged SDPA graph over packed rows, tables and packing done outside: an upper bound for the cudnn engine."""
    from cudnn_graphs.planning import PlanStore
    if w.group == 1:
        raise Unavailable("MHA: its block-sparse kernel is twice as fast")
    try:
        plan = PlanStore(None).get(w.signature(), "cuda", "cudnn")
    except NotImplementedError as error:
        raise Unavailable(str(error)[:160]) from error
    args, keywords = w.arguments()
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    arguments = plan.signature.bind(plan.device, *args, **{k: v for k, v in keywords.items() if k != "out"})
    plan.launch(arguments, workspace)
    executable = plan._built.executable
    shape, at = executable.shape, executable.workspace.out
    packed = workspace[at:at + 2 * shape.rows * shape.packed_rows * shape.head_dim].view(torch.bfloat16)

    def run() -> torch.Tensor:
        executable._execute_graph(arguments, workspace.data_ptr(), torch.cuda.current_stream().cuda_stream)
        return packed
    return _Regrouped(run, w)


def flashinfer_paged(w: PagedWorkload) -> Run:
    """FlashInfer's paged wrappers, one request per (b, kv head, row); decode by its decode wrapper on tensor cores."""
    flashinfer = imported("flashinfer")
    if w.group == 1:
        raise Unavailable("MHA: its cake kernel is twice as fast")
    pages, q = _folded_pages(w), _regrouped_q(w)
    rows, n = pages.shape
    indptr = torch.arange(0, rows * n + 1, n, dtype=torch.int32, device="cuda")
    last = torch.full((rows,), w.page_size, dtype=torch.int32, device="cuda")
    cache = tuple(w.t[x].view(-1, 1, w.page_size, w.head_dim) for x in ("k", "v"))
    buffer = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
    if w.seq_len_q == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, "HND", use_tensor_cores=True)
        wrapper.plan(indptr, pages.flatten(), last, w.group, 1, w.head_dim, w.page_size, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
        flat = q.view(rows, w.group, w.head_dim)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, "HND", backend="fa2")
        tokens = min(w.q_block_size, w.seq_len_q)
        qo_indptr = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device="cuda")
        wrapper.plan(qo_indptr, indptr, pages.flatten(), last, w.group, 1, w.head_dim, w.page_size, causal=False, q_data_type=torch.bfloat16,
                     kv_data_type=torch.bfloat16)
        flat = q.reshape(-1, w.group, w.head_dim)
    out = torch.empty_like(flat)

    def run() -> torch.Tensor:
        wrapper.run(flat, cache, out=out)
        return out
    return _Regrouped(run, w)


class _Regrouped:
    """A run whose output is in folded rows: `like_q` is applied by the check, not inside the timed call."""

    def __init__(self, run: Run, w: PagedWorkload) -> None:
        self._run, self._w = run, w

    def __call__(self) -> torch.Tensor:
        return self._run()

    def like_q(self, out: torch.Tensor) -> torch.Tensor:
        return _like_q(self._w, out)


def flashinfer_cake(w: PagedWorkload) -> Run:
    """FlashInfer's generated Hopper kernel for MHA with 64 x 64 blocks; its plan takes seconds and is not timed."""
    cake = imported("flashinfer.cake_vsa_sm90")
    if w.group != 1 or w.q_block_size != 64 or w.kv_block_size != 64 or w.batch != 1 or w.blocks_per_row > 64 or w.mask_type != "dense":
        raise Unavailable("serves MHA, 64 x 64 blocks, up to 64 a row, one sequence")
    total = w.seq_len_kv // 64
    mask = torch.zeros(w.num_kv_heads, w.rows, total, dtype=torch.bool, device="cuda").scatter_(2, w.t["blocks"][0].long(), True)
    sizes_q = torch.full((w.num_kv_heads, w.rows), 64, dtype=torch.int32, device="cuda")
    sizes_kv = torch.full((w.num_kv_heads, total), 64, dtype=torch.int32, device="cuda")
    plan = cake.create_plan("cuda:0", mask, sizes_q, sizes_kv, w.num_qo_heads, w.num_kv_heads, w.head_dim)
    k, v = (x[0] for x in _dense_kv(w))
    q = w.t["q"][0].transpose(0, 1).contiguous()
    out = torch.empty(w.num_qo_heads * w.seq_len_q, 1, w.head_dim, dtype=q.dtype, device="cuda")

    class Cake(_Regrouped):
        def like_q(self, out: torch.Tensor) -> torch.Tensor:
            return out.view(1, w.num_qo_heads, w.seq_len_q, w.head_dim).transpose(1, 2)

    def run() -> torch.Tensor:
        plan.run(q, k, v, out=out)
        return out
    return Cake(run, w)


def cudnn_block_sparse(w: PagedWorkload) -> Run:
    """cuDNN Frontend's CuTe block-sparse attention: MHA, no paging, fixed counts."""
    api = imported("cudnn.block_sparse_attention.api")
    if w.group != 1 or w.q_block_size != w.kv_block_size or w.kv_block_size not in (64, 128) or w.mask_type != "dense" or w.bits:
        raise Unavailable("serves MHA with 64 x 64 or 128 x 128 blocks, dense")
    k, v = _dense_kv(w)
    q, index = w.t["q"].transpose(1, 2).contiguous(), w.t["blocks"].contiguous()

    class Bhsd(_Regrouped):
        def like_q(self, out: torch.Tensor) -> torch.Tensor:
            return out.transpose(1, 2)

    return Bhsd(lambda: api.block_sparse_attention_forward(q, k, v, index, w.blocks_per_row, sparse_block_size=w.kv_block_size)["o_tensor"], w)


def flash_attention_4(w: PagedWorkload) -> Run:
    """FlashAttention-4's CuTe kernels: folded rows over a page table, or block_sparse_tensors for MHA."""
    interface = imported("flash_attn.cute.interface")
    if w.group == 1 and w.q_block_size == w.kv_block_size:
        return _flash_attention_4_blocks(w, interface)
    pages, q = _folded_pages(w), _regrouped_q(w)
    cache = [w.t[x].view(-1, w.page_size, 1, w.head_dim) for x in ("k", "v")]
    used = torch.full((pages.shape[0],), w.blocks_per_row * w.kv_block_size, dtype=torch.int32, device="cuda")

    def run() -> torch.Tensor:
        result = interface.flash_attn_varlen_func(q, *cache, page_table=pages, seqused_k=used, pack_gqa=True, max_seqlen_q=q.shape[1],
                                                  max_seqlen_k=w.blocks_per_row * w.kv_block_size)
        return result[0] if isinstance(result, tuple) else result
    return _Regrouped(run, w)


def _flash_attention_4_blocks(w: PagedWorkload, interface: Any) -> Run:
    sparsity = imported("flash_attn.cute.block_sparsity")
    if w.kv_block_size not in (64, 128):
        raise Unavailable("serves 64 x 64 and 128 x 128 blocks")
    k, v = (x.transpose(1, 2).contiguous() for x in _dense_kv(w))
    none = torch.zeros(w.batch, w.num_kv_heads, w.rows, dtype=torch.int32, device="cuda")
    index = w.t["blocks"].contiguous()
    lists = sparsity.BlockSparseTensorsTorch(mask_block_cnt=none, mask_block_idx=torch.zeros_like(index), full_block_cnt=none + w.blocks_per_row,
                                             full_block_idx=index, block_size=(w.q_block_size, w.kv_block_size))

    class Bshd(_Regrouped):
        def like_q(self, out: torch.Tensor) -> torch.Tensor:
            return out

    def run() -> torch.Tensor:
        result = interface.flash_attn_func(w.t["q"], k, v, block_sparse_tensors=lists)
        return result[0] if isinstance(result, tuple) else result
    return Bshd(run, w)


PAGED_PEERS: dict[str, Callable[[PagedWorkload], Run]] = {
    "cuDNN graph alone": cudnn_graph_alone,
    "cuDNN block-sparse": cudnn_block_sparse,
    "FlashInfer": flashinfer_paged,
    "FlashInfer cake": flashinfer_cake,
    "FlashAttention-4": flash_attention_4,
}
