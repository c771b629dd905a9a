"""What every test gets: a plan cache of its own, and `gpu` tests only where there is a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# `python -m pytest` puts this checkout first on the path, where cudnn_graphs is without ops and planning: the install maps those in.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parents[1]]

torch.set_num_threads(1)        # the tests' tensors are small: with threads, the oracle was 14 times slower on a busy machine


@pytest.fixture(autouse=True, scope="session")
def private_cache(tmp_path_factory):
    """No test reads or writes the user's plans. Subprocesses inherit the variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDNN_GRAPHS_CACHE_DIR", str(tmp_path_factory.mktemp("cudnn_graphs")))
        yield


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; scripts/gpu_check.py runs it on one"))
