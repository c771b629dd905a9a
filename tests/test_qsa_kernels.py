"""The kernels of packed query-sparse attention compile for every architecture they may run on, spill nothing, and are sized as designed."""

import importlib.util
import struct

import pytest
import torch
from cases_qsa import HEAD_PAIRS
from devices import DEVICES

from cudnn_graphs.arguments import QuerySparseArguments
from cudnn_graphs.engines.portable_qsa import design_portable_qsa
from cudnn_graphs.engines.qsa_launch import pack_params
from cudnn_graphs.engines.sm90_qsa import design_sm90_qsa
from cudnn_graphs.ops.query_sparse import QuerySparseSignature
from cudnn_graphs.runtime.nvrtc import compile_cubin

needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="NVRTC comes with cupy")


def compiled(design, device):
    for role, source in design.kernels.items():
        resources = compile_cubin(source, device.arch).resources
        assert resources.spill_bytes == 0 and resources.stack_bytes == 0, (role, resources)
        assert source.smem_bytes <= device.smem_per_block and resources.registers * source.threads <= 65536


@needs_nvrtc
@pytest.mark.parametrize("name", ["sm_80", "sm_89", "sm_100", "sm_120"])
@pytest.mark.parametrize("source", ["bitmap", "indices"])
def test_portable(name, source):
    compiled(design_portable_qsa(QuerySparseSignature(12, 1, source).lower(), DEVICES[name]), DEVICES[name])


@needs_nvrtc
@pytest.mark.parametrize("heads", [pair for pair in HEAD_PAIRS if pair != (24, 2)], ids=str)
def test_sm90(heads):
    compiled(design_sm90_qsa(QuerySparseSignature(*heads).lower(), DEVICES["sm_90"]), DEVICES["sm_90"])
    compiled(design_sm90_qsa(QuerySparseSignature(*heads, "indices").lower(), DEVICES["sm_90"]), DEVICES["sm_90"])


def test_warps_by_shared_memory():
    descriptor = QuerySparseSignature(12, 1).lower()
    assert {name: design_portable_qsa(descriptor, device).config["warps"] for name, device in DEVICES.items() if device.capability >= (8, 0)} == {
        "sm_80": 5, "sm_86": 3, "sm_89": 3, "sm_90": 4, "sm_100": 4, "sm_120": 3}


@pytest.mark.parametrize("scale, factor, scale_log2", [
    (1.0, 0x3F803F80, 1.4426950), (-2.0, 0xBF80BF80, 2.885390), (0.0, 0, 1.0), (1e-300, 0, 1.0), (1e300, 0x3F803F80, 3.4028235e38)])
def test_the_kernels_scale_is_positive(scale, factor, scale_log2):
    """The sign goes into the queries: a masked score of -inf times a scale of 0 would be NaN."""
    x = torch.zeros(4, 12, 256, dtype=torch.bfloat16)
    packed = pack_params(QuerySparseArguments(x, x[:, :1].contiguous(), x, x, x, x, scale, indices=torch.zeros(4, 4, dtype=torch.int32)), 132)
    got_factor, got_scale = struct.unpack_from("<If", packed, 17 * 8 + 5 * 4)
    assert got_factor == factor and got_scale == pytest.approx(scale_log2)


def test_scratch_depends_on_the_class_of_t_only():
    device = DEVICES["sm_90"]
    assert design_sm90_qsa(QuerySparseSignature(24, 2, "bitmap", 131_072).lower(), device).workspace_bytes == 256 + 8 * 13_108 * 2
    assert design_sm90_qsa(QuerySparseSignature(12, 1, "indices", 131_072).lower(), device).workspace_bytes == 0
    assert design_portable_qsa(QuerySparseSignature(12, 1, "bitmap", 131_072).lower(), device).workspace_bytes == 0
