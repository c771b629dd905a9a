"""Devices described, none of them present: what a design or a build for them may use."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from cudnn_graphs.runtime.devices import CPU, DeviceFacts, facts_from_properties

H200_PROPERTIES = Path(__file__).parent / "data" / "h200-device-properties.json"
H200 = facts_from_properties(H200_PROPERTIES.read_text())


def gpu(major: int, minor: int, smem_kib: int, sm_count: int) -> DeviceFacts:
    return DeviceFacts(kind="cuda", index=0, name=f"fake {major}.{minor}", capability=(major, minor), sm_count=sm_count, smem_per_block=smem_kib << 10)


DEVICES: dict[str, DeviceFacts] = {
    "cpu": CPU, "sm_75": gpu(7, 5, 64, 40), "sm_80": gpu(8, 0, 163, 108), "sm_86": gpu(8, 6, 99, 84), "sm_89": gpu(8, 9, 99, 128), "sm_90": H200,
    "sm_100": gpu(10, 0, 227, 148), "sm_120": gpu(12, 0, 99, 170),
}


def need_deviceless_builds() -> None:
    """Skip where cuDNN plans for an absent GPU cannot be built; fail there on CI, which must build them."""
    missing = [name for name in ("cudnn", "cupy", "cuda.bindings", "nvidia.cudnn")
               if importlib.util.find_spec(name.split(".")[0]) is None or importlib.util.find_spec(name) is None]
    if missing or shutil.which("gcc") is None:
        assert not os.environ.get("CI"), f"CI must have gcc and the extras cuda13 and aot; missing: {missing}"
        pytest.skip(f"needs gcc and the extras cuda13 and aot; missing: {missing}")
