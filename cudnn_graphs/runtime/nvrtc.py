"""CUDA C++ files to a cubin, by NVRTC, on a machine with or without a GPU.

Kernel bodies are files under `cudnn_graphs/kernels`; what is compiled is a short generated text that
includes one of them and names one instantiation of it. Kernels include nothing from the CUDA toolkit,
so no header directory has to be found.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--extra-device-vectorization", "-default-device")

_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
_USED = re.compile(r"Used (\d+) registers")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel to compile: the instantiation text, its extern "C" entry, and how it is launched."""

    entry: str
    text: str
    threads: int
    smem_bytes: int = 0                 # dynamic shared memory


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas said of a kernel."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    smem_bytes: int                     # dynamic, as it will be launched
    threads: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled kernel and the log it was compiled with."""

    image: bytes
    resources: Resources
    log: str


@functools.cache
def _read(name: str) -> str:
    return (KERNELS / name).read_text()


def included_files(text: str) -> list[str]:
    """Every kernel file that `text` includes, directly or not, sorted."""
    seen: set[str] = set()
    todo = _INCLUDE.findall(text)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += _INCLUDE.findall(_read(name))
    return sorted(seen)


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    from cupy.cuda import nvrtc
    return tuple(nvrtc.getVersion())


def _no_cache() -> tuple[str, ...]:
    """NVRTC's own cache answers without ptxas' log, where registers and spills are read: our cubin cache replaces it."""
    return ("-no-cache",) if nvrtc_version() >= (12, 8) else ()


def source_digest(source: KernelSource) -> str:
    """sha256 over the instantiation and every file it includes: what a cubin is keyed by, with arch and compiler."""
    digest = hashlib.sha256(source.text.encode())
    for name in included_files(source.text):
        digest.update(f"\0{name}\0{_read(name)}".encode())
    return digest.hexdigest()


def compile_cubin(source: KernelSource, arch: str) -> Cubin:
    """Compile for `arch` ("sm_90a"). Raises RuntimeError with the compiler's whole log."""
    from cupy.cuda import nvrtc
    names = included_files(source.text)
    program = nvrtc.createProgram(source.text, f"{source.entry}.cu", [_read(n).encode() for n in names], [n.encode() for n in names])
    try:
        try:
            nvrtc.compileProgram(program, [f"--gpu-architecture={arch}", *OPTIONS, *_no_cache()])
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"NVRTC could not compile {source.entry} for {arch}:\n{nvrtc.getProgramLog(program)}") from error
        log = nvrtc.getProgramLog(program)
        image = nvrtc.getCUBIN(program) + b"\0"        # cupy drops the last byte: the driver does not mind, cuobjdump does
    finally:
        nvrtc.destroyProgram(program)
    used, spills = _USED.findall(log), _SPILL.findall(log)
    resources = Resources(registers=max(map(int, used), default=0), stack_bytes=max((int(s[0]) for s in spills), default=0),
                          spill_bytes=sum(int(s[1]) + int(s[2]) for s in spills), smem_bytes=source.smem_bytes, threads=source.threads)
    return Cubin(image, resources, log)
