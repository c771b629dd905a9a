"""The process's own store, and where it lies on disk."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from ..errors import problem
from .store import PlanStore

log = logging.getLogger("cudnn_graphs")


def store_or_default(store: PlanStore | None) -> PlanStore:
    """What an operation's `store=` stands for. TypeError for what is no store."""
    if store is None:
        return default_store()
    if not isinstance(store, PlanStore):
        raise TypeError(problem("store", type(store).__name__, "a PlanStore", "open one with PlanStore(directory)"))
    return store


def default_root() -> Path:
    """`$CUDNN_GRAPHS_CACHE_DIR`, else `$XDG_CACHE_HOME/cudnn_graphs`, else `~/.cache/cudnn_graphs`."""
    if chosen := os.environ.get("CUDNN_GRAPHS_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cudnn_graphs"


_opening = threading.Lock()
_default: PlanStore | None = None


def default_store() -> PlanStore:
    """The process's own store, on disk at the default root, opened at first use: one, however many threads are first.
    In memory only, with a warning, where the user has no home directory."""
    global _default
    if _default is None:
        with _opening:
            if _default is None:
                try:
                    root = default_root() / "plans"
                except RuntimeError as error:
                    log.warning("no directory for plans (%s): they stay in memory; set CUDNN_GRAPHS_CACHE_DIR", error)
                    root = None
                _default = PlanStore(root)
    return _default
