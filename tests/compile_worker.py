"""Compiling in other processes: NVRTC takes a second a kernel and threads do not help it. Imports no torch, so a worker starts quickly."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from cudnn_graphs.runtime.cubins import CubinCache
from cudnn_graphs.runtime.nvrtc import KernelSource, Resources, compile_cubin


def compile_into(directory: Path, source: KernelSource, arch: str) -> None:
    CubinCache(directory).get(source, arch)


def resources_of(source: KernelSource, arch: str) -> Resources:
    return compile_cubin(source, arch).resources


def pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn"))


def fill_cache(directory: Path, sources: Iterable[KernelSource], arch: str) -> None:
    """Compile all `sources` into a cubin directory, as many at a time as there are cores."""
    with pool() as workers:
        jobs: list[Future[None]] = [workers.submit(compile_into, directory, source, arch) for source in sources]
        for job in jobs:
            job.result(timeout=120)
