#!/usr/bin/env python
"""A stand-in for libcuda.so.1, so that cuDNN compiles plans on a machine that has no driver: it links a kernel, and launches none.

    LD_LIBRARY_PATH=$(python scripts/driver_stub.py DIRECTORY) python scripts/build_plans.py ...

Needs gcc. Only ever on the library path of the job that builds plans, never where a real driver lives.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# What cuDNN 9.19's runtime-compiled engines call while they build: load the cubin they compiled, take its kernel, ask for its resources.
HANDLES = ("cuLibraryLoadData", "cuLibraryGetKernel", "cuLibraryGetModule", "cuKernelGetFunction", "cuModuleLoadData", "cuModuleGetFunction")
SUCCEED = ("cuKernelSetAttribute", "cuFuncSetAttribute", "cuLibraryUnload", "cuModuleUnload")
NUMBERS = ("cuKernelGetAttribute", "cuFuncGetAttribute")
TEXTS = ("cuGetErrorString", "cuGetErrorName")
# What it looks up and refuses to start without, and never calls; called, they say that there is no device (CUDA_ERROR_NO_DEVICE).
FAIL = ("cuDeviceGet", "cuDeviceGetCount", "cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxGetLimit", "cuLibraryLoadFromFile", "cuLinkCreate",
        "cuLinkAddData", "cuLinkComplete", "cuLinkDestroy", "cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel",
        "cuOccupancyMaxPotentialClusterSize", "cuStreamGetCtx")
CUDA_VERSION = 13000


def source() -> str:
    """The stub as C."""
    lines = [f"int cuDriverGetVersion(int *version) {{ *version = {CUDA_VERSION}; return 0; }}"]
    lines += [f"int {name}(void **handle) {{ static int it; *handle = &it; return 0; }}" for name in HANDLES]
    lines += [f"int {name}(void) {{ return 0; }}" for name in SUCCEED]
    lines += [f"int {name}(int *value) {{ *value = 0; return 0; }}" for name in NUMBERS]
    lines += [f'int {name}(int error, const char **text) {{ *text = "there is no driver: this is a stub"; return 0; }}' for name in TEXTS]
    lines += [f"int {name}(void) {{ return 100; }}" for name in FAIL]
    return "\n".join(lines) + "\n"


def compile_stub(directory: Path) -> Path:
    """Write `directory`/libcuda.so.1. Returns the directory, for LD_LIBRARY_PATH. FileNotFoundError without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("driver_stub: got no C compiler; need gcc or cc; install one")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".c") as file:
        file.write(source())
        file.flush()
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(directory / "libcuda.so.1"), file.name], check=True)
    return directory


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    try:
        print(compile_stub(Path(sys.argv[1])))
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None
