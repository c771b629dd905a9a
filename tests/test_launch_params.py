"""What the host packs for a launch is the struct that the kernels read: same fields, same order, natural alignment. Without a GPU."""

from __future__ import annotations

import dataclasses
import re
import struct

import pytest
import torch
from cases_qsa import packed_batch, qkv, random_bitmap
from paged_cases import PagedCase
from sage_cases import SageCase

from cudnn_graphs.engines import paged_launch, qsa_launch, sage_launch
from cudnn_graphs.ops.query_sparse import QuerySparseSignature
from cudnn_graphs.runtime import launch
from cudnn_graphs.runtime.devices import CPU
from cudnn_graphs.runtime.nvrtc import KERNELS

CODES = {"i32": "i", "u32": "I", "float": "f", "i64": "q"}


def unpacked(header: str, name: str, packed: bytes) -> dict[str, float]:
    """The fields of `name` in a kernel header, read from the host's bytes as a C++ compiler lays them out."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", (KERNELS / header).read_text(), re.DOTALL)
    assert body is not None
    codes, fields = "", []
    for line in re.sub(r"//.*", "", body.group(1)).split(";"):
        if declared := re.match(r"\s*(?:const )?(\w+)(\*?) (.+)", line):
            kind, pointer, names = declared.groups()
            fields += names.split(", ")
            codes += ("Q" if pointer else CODES[kind]) * len(names.split(", "))
    assert len(packed) == -(-struct.calcsize("@" + codes) // 8) * 8
    return dict(zip(fields, struct.unpack_from("@" + codes, packed), strict=True))


def assert_fields(got: dict[str, float], want: dict[str, object]) -> None:
    """Tensors by their address, None as a null pointer, floats to fp32. Every field is named."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        expected = value.data_ptr() if isinstance(value, torch.Tensor) else 0 if value is None else value
        assert got[name] == (pytest.approx(expected) if isinstance(expected, float) else expected), name


@pytest.mark.parametrize("facts", [dict(), dict(page_table="block_tables", bits=True, mask_type="causal", strided_q=True, padded_pages=1, shared_pattern=True)])
def test_paged(facts):
    case = PagedCase(num_qo_heads=6, num_kv_heads=2, q_block_size=8, **facts).make()
    positional, keywords = case.arguments()
    a = case.signature().bind(CPU, *positional, **keywords)
    got = unpacked("common/paged_params.cuh", "PagedParams", paged_launch.pack_params(a, 11, 12, 13))
    (q_b, q_t, q_h, _), (out_b, out_t, out_h, _) = a.q.stride(), a.out.stride()
    table = a.page_indptr is None
    assert_fields(got, dict(
        q=a.q, k=a.k, v=a.v, out=a.out, lse=a.lse, page_indptr=a.page_indptr, pages=a.pages, block_indptr=a.block_indptr, block_indices=a.block_indices,
        seq_lens=a.seq_lens, valid_bits=a.valid_bits, partial_out=11, partial_lse=12, q_stride_b=q_b, q_stride_t=q_t, q_stride_h=q_h, out_stride_b=out_b,
        out_stride_t=out_t, out_stride_h=out_h, kv_page_stride=a.k.stride(0), num_pages=a.k.shape[0], page_list_len=a.pages.shape[-1],
        page_table_stride=a.pages.stride(0) if table else 0, num_block_indices=a.block_indices.numel(),
        valid_bits_stride=0 if a.valid_bits is None else a.valid_bits.stride(0), batch=case.batch, seq_len_q=case.seq_len_q, num_kv_heads=2, group=3,
        rows=case.rows, q_block_size=8, kv_block_size=case.kv_block_size, page_size=case.page_size, pattern_heads=1 if case.shared_pattern else 2,
        max_seq_len_kv=case.max_seq_len_kv, max_blocks_per_row=a.max_blocks_per_row, num_splits=13, scale_log2=a.sm_scale * paged_launch.LOG2_E,
        causal=int(case.mask_type == "causal")))


@pytest.mark.parametrize("rank, strides", [(None, (0, 0)), (1, (0, 0)), (2, (6, 0)), (3, (18, 6))])
def test_sage(rank, strides):
    case = SageCase(batch=2, heads=3, sizes_rank=rank, counts=rank is not None, contiguous=rank is None, uniform=rank is None).make()
    a = dataclasses.replace(case.arguments(), count=case.count)
    got = unpacked("common/sage_params.cuh", "SageParams", sage_launch.pack_params(a))
    assert_fields(got, dict(
        q=a.q, k=a.k, v=a.v, q_scale=a.q_scale, k_scale=a.k_scale, v_scale=a.v_scale, out=a.out, lse=a.lse, block_index=a.block_index, counts=a.counts,
        block_sizes=a.block_sizes, heads=3, batch_heads=6, seq_len_q=case.seq_q, seq_len_k=case.seq_k, rows=3, num_blocks=6, capacity=5, count=4,
        sizes_stride_b=strides[0], sizes_stride_h=strides[1], contiguous=int(case.contiguous), scale_log2=case.scale * sage_launch.LOG2_E))


@pytest.mark.parametrize("source", ["bitmap", "indices"])
def test_query_sparse(source):
    metadata = packed_batch(3, 16)
    total, blocks = metadata.lo.numel(), metadata.block_first.numel()
    selection = {"sel_blocks": random_bitmap(metadata, 0.5), **metadata._asdict()} if source == "bitmap" else {"indices": torch.zeros(total, 8).int()}
    a = QuerySparseSignature(24, 2, source).bind(CPU, *qkv(total, (24, 2)), **selection, scale=-0.125)
    got = unpacked("common/qsa_params.cuh", "QsaParams", qsa_launch.pack_params(a, 132, 11, 12, 13))
    names = ("sel_blocks", "lo", "hi", "blk_base", "tok_base", "block_first", "block_last", "indices")
    assert_fields(got, dict(
        q=a.q, k=a.k, v=a.v, out=a.out, out_fp32=a.out_fp32, lse=a.lse, **{name: getattr(a, name) for name in names}, schedule=11, item_mode=12,
        gather_items=13, num_tokens=total, num_blocks=blocks if source == "bitmap" else 0, width=0 if source == "bitmap" else 8, num_kv_heads=2, sm_count=132,
        q_factor=0xBF80BF80, scale_log2=0.125 * qsa_launch.LOG2_E))


def test_an_early_launch():
    driver = pytest.importorskip("cuda.bindings.driver")
    arguments = launch._Arguments((8,))
    launch._CONFIG.pack_into(arguments.config, 0, 5, 6, 7, 128, 2, 3, 4096, 77, arguments.attribute_at, 1)
    config, attribute = driver.CUlaunchConfig(_ptr=arguments.config_at), driver.CUlaunchAttribute(_ptr=arguments.attribute_at)
    assert [getattr(config, f"{what}Dim{axis}") for what in ("grid", "block") for axis in "XYZ"] == [5, 6, 7, 128, 2, 3]
    assert (config.sharedMemBytes, int(config.hStream), config.numAttrs) == (4096, 77, 1)
    assert attribute.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert attribute.value.programmaticStreamSerializationAllowed == 1
