"""What to install on this machine, by the driver it finds. Standard library only: it runs before anything is installed.

Prints three lines for scripts/_environment.sh: options of `python -m venv`, the requirement for torch, the extra.
A line may be empty.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys


def driver_cuda() -> int | None:
    """The CUDA major version that the driver serves, or None where there is no driver or no device."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _driver_cuda_by_nvidia_smi()
    count, version = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value or cuda.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000


def _driver_cuda_by_nvidia_smi() -> int | None:
    """Where libcuda is not on the loader's path."""
    if shutil.which("nvidia-smi") is None:
        return None
    said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"CUDA[^:|]*Version:\s*(\d+)", said)
    return int(found.group(1)) if found else None


def present_torch_cuda() -> int | None:
    """The CUDA major version of a torch that this Python already has and that sees a device."""
    probe = "import torch; print(torch.version.cuda if torch.cuda.is_available() else '')"
    said = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False).stdout.strip()
    return int(said.split(".")[0]) if said else None


def choose(python: tuple[int, int], driver: int | None, present: int | None) -> tuple[str, str, str]:
    """(venv options, torch requirement, extra) for a Python version, a driver's CUDA major and a present torch's."""
    if driver is None or driver < 12:
        # One release, not a range: where pip is pointed at a CPU build of it (see the README), a newer CUDA build must not win.
        return "", "torch==2.13.0" if python == (3, 11) else "torch", ""
    if present in (12, 13):
        return "--system-site-packages", "", f"cuda{present}"       # its NVRTC and cuDNN are what the extra's packages load
    return ("", "torch", "cuda13") if driver >= 13 else ("", "torch<2.11", "cuda12")      # PyPI's torch needs a CUDA 13 driver from 2.11 on


if __name__ == "__main__":
    driver = driver_cuda()
    print(*choose(sys.version_info[:2], driver, None if driver is None else present_torch_cuda()), sep="\n")
