"""Every kernel compiles for every architecture it may run on, with no register spilled and no stack, without a GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from compile_worker import pool, resources_of
from devices import DEVICES
from paged_surface import PACKED

from cudnn_graphs import PagedBlockSparseSignature
from cudnn_graphs.engines import cudnn_paged, paged_inspection
from cudnn_graphs.planning.engines import engine_named
from cudnn_graphs.runtime.devices import DeviceFacts
from cudnn_graphs.runtime.nvrtc import KernelSource, Resources

CUPY = importlib.util.find_spec("cupy") is not None
SM90 = importlib.util.find_spec("cudnn_graphs.engines.sm90_paged") is not None
MASKS: tuple[dict[str, Any], ...] = ({}, {"mask_type": "causal"}, {"use_kv_valid_bits": True}, {"mask_type": "causal", "use_kv_valid_bits": True})
GPUS = [name for name in DEVICES if name not in ("cpu", "sm_75")]
COMPILED_FOR = ("sm_90", "sm_80", "sm_89", "sm_100", "sm_120")


def signature(head_dim: int, dtype: str = "bfloat16", q_block_size: int = 64, group: int = 4, **changes: Any) -> PagedBlockSparseSignature:
    facts = dict(batch_size=4, seq_len_q=2048, max_seq_len_kv=32768, num_qo_heads=2 * group, num_kv_heads=2, head_dim=head_dim, q_block_size=q_block_size,
                 kv_block_size=64, page_size=64, dtype=dtype, return_lse=True, max_blocks_per_row=32)
    return PagedBlockSparseSignature(**{**facts, **changes})


def signatures(device: str) -> Iterator[PagedBlockSparseSignature]:
    """Chosen so that every file, tile, number type and mask is compiled somewhere and the largest tiles everywhere."""
    if device == "sm_90":       # the device that is tuned for
        for head_dim in (64, 128, 256):
            for mask in MASKS if head_dim == 128 else (MASKS[0], MASKS[3]):
                yield signature(head_dim, **mask)
            yield signature(head_dim, "float16", batch_size=1, seq_len_q=1, q_block_size=1, group=8, max_blocks_per_row=512)      # decode: small tile, split
        yield signature(128, "float16")
        yield signature(128, q_block_size=16, group=2)
        for mask in MASKS:      # many small rows: three at a time in one block
            yield signature(128, group=1, num_qo_heads=64, num_kv_heads=64, **mask)
        yield signature(128, "float16", group=1, num_qo_heads=64, num_kv_heads=64, kv_block_size=8, page_size=8, **MASKS[3])
        yield signature(256, q_block_size=16, group=4)
        return
    yield signature(128)
    yield signature(128, **MASKS[3])
    yield signature(256, "float16", **MASKS[3])
    yield signature(256, "float16", batch_size=1, seq_len_q=1, q_block_size=1, group=8, max_blocks_per_row=512)
    yield signature(64, "float16")


def kernels_of(descriptor: Any, facts: DeviceFacts) -> dict[str, KernelSource]:
    """Every kernel that the engines would compile, by engine and role."""
    found = {f"portable {role}": s for role, s in engine_named("portable").design(descriptor, facts).kernels.items()}  # type: ignore[attr-defined]
    if SM90 and facts.capability == (9, 0):
        found |= {f"sm90 {role}": s for role, s in engine_named("sm90").design(descriptor, facts).kernels.items()}  # type: ignore[attr-defined]
    if not descriptor.masks & {"causal", "valid_bits"}:
        found |= {f"cudnn {role}": s for role, s in cudnn_paged.kernel_sources(descriptor, facts).items()}
    return found


def jobs() -> dict[tuple[str, str], KernelSource]:
    """(device, kernel) -> source, each text once a device."""
    found: dict[tuple[str, str], KernelSource] = {}
    for device in COMPILED_FOR:
        texts = {paged_inspection.SOURCE.text: ("inspect", paged_inspection.SOURCE)}
        for s in signatures(device):
            for role, source in kernels_of(s.lower(), DEVICES[device]).items():
                texts.setdefault(source.text, (f"{role}: {source.entry}", source))
        for i, (name, source) in enumerate(texts.values()):
            found[device, f"{i} {name}"] = source
    return found


JOBS = jobs()


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[tuple[str, str], Future[Resources]]]:
    if not CUPY:
        assert not os.environ.get("CI"), "CI must install an extra that brings cupy and NVRTC"
        pytest.skip("cupy is not installed: pip install 'cudnn-graphs[cuda13,aot]' brings NVRTC")
    with pool() as workers:
        yield {job: workers.submit(resources_of, source, DEVICES[job[0]].arch) for job, source in JOBS.items()}
        workers.shutdown(cancel_futures=True)


@pytest.mark.parametrize("job", JOBS, ids=" ".join)
def test_compiles_with_no_spills_and_no_stack(compiled, job):
    resources = compiled[job].result(timeout=300)
    assert resources.spill_bytes == 0 and resources.stack_bytes == 0, f"{JOBS[job].entry}: {resources}"
    assert 0 < resources.registers * resources.threads <= 65536


def test_the_jobs_cover_what_they_should():
    entries = {device: " ".join(f"{name} {s.entry}" for (d, name), s in JOBS.items() if d == device) for device in COMPILED_FOR}
    for device, text in entries.items():
        for part in ("portable attention", "portable merge", "cudnn fold", "cudnn unfold", "cudnn tail", "inspect", "d64", "d128", "d256", "bf16", "fp16",
                     "causal_bits"):
            assert part in text, f"{part} is not compiled for {device}"
        assert ("sm90 " in text) == (SM90 and device == "sm_90")
    if SM90:
        assert "chains3" in entries["sm_90"] and "split" in entries["sm_90"]


@pytest.mark.parametrize("device", GPUS)
def test_shared_memory_and_threads_fit_the_device(device):
    """Every tile of the surface, compiled or not."""
    facts = DEVICES[device]
    for q_block_size, group in PACKED:
        for head_dim in (64, 128, 256):
            for mask in MASKS:
                for role, source in kernels_of(signature(head_dim, q_block_size=q_block_size, group=group, **mask).lower(), facts).items():
                    assert source.smem_bytes <= facts.smem_per_block, f"{role} of D {head_dim}, {q_block_size} x {group} on {device}"
                    assert source.threads <= 1024 and source.threads % 32 == 0


def test_a_design_is_a_pure_function():
    """The digest that a cached plan is believed by is made anew from the design in every process."""
    for s in signatures("sm_90"):
        assert kernels_of(s.lower(), DEVICES["sm_90"]) == kernels_of(s.replace().lower(), DEVICES["sm_90"])
