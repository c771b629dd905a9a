"""A pytest plugin for scripts/gpu_check.py: runs one share of the gpu-marked test files, writes every test's outcome, seconds and properties.

Share and file come by the environment: CUDNN_GRAPHS_TESTS_SHARE as "2/4", CUDNN_GRAPHS_TESTS_OUT.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_tests: dict[str, dict[str, Any]] = {}


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Whole files, since the fixtures of one compile for all its tests; first what needs two GPUs, one of which is free after that."""
    share, shares = map(int, os.environ["CUDNN_GRAPHS_TESTS_SHARE"].split("/"))
    mine = set(sorted({item.path for item in items if "gpu" in item.keywords})[share::shares])
    config.hook.pytest_deselected(items=[item for item in items if item.path not in mine])
    items[:] = sorted((item for item in items if item.path in mine), key=lambda item: "two_gpus" not in item.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        row = {"outcome": report.outcome, "seconds": round(report.duration, 3)} | dict(report.user_properties)
        if report.failed:
            row["message"] = str(report.longrepr)[-600:]
        elif report.skipped and isinstance(report.longrepr, tuple):
            row["reason"] = report.longrepr[2]
        _tests[report.nodeid] = row


def pytest_sessionfinish() -> None:
    Path(os.environ["CUDNN_GRAPHS_TESTS_OUT"]).write_text(json.dumps(_tests))
