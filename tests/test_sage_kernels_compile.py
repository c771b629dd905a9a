"""Every Sage kernel compiles for every architecture it may run on, with no register spilled and no stack, without a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from devices import DEVICES

from cudnn_graphs import SageBlockSparseSignature
from cudnn_graphs.engines.sage_quantizer import DTYPES, quantizer_source
from cudnn_graphs.planning.engines import engine_named
from cudnn_graphs.runtime.nvrtc import KernelSource, compile_cubin

ARCHITECTURES = ("sm_90", "sm_80", "sm_89", "sm_100", "sm_120")


def sources(name: str) -> list[KernelSource]:
    facts = DEVICES[name]
    found = []
    for layout in ("natural", "interleaved16"):
        for lse in (False, True):
            descriptor = SageBlockSparseSignature(1, 24, 32768, 32768, 52, v_layout=layout, return_lse=lse).lower()
            for engine in ("portable", "sm90") if facts.capability == (9, 0) else ("portable",):
                found += [k for k in engine_named(engine).design(descriptor, facts).kernels.values() if k not in found]  # type: ignore[attr-defined]
    types = DTYPES if name == "sm_90" else [torch.bfloat16]
    return found + [quantizer_source(dtype, vector) for dtype in types for vector in (True, False)]


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs cupy for NVRTC")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_zero_spills(name):
    for source in sources(name):
        resources = compile_cubin(source, DEVICES[name].arch).resources
        assert resources.registers and not resources.spill_bytes and not resources.stack_bytes, (source.entry, resources)
        assert source.smem_bytes <= DEVICES[name].smem_per_block
