"""The wheel: what is in it, that it works outside the repository, and that its types and style hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def call(*command: object, cwd: Path, **environment: str) -> str:
    said = subprocess.run([str(c) for c in command], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=400)
    assert said.returncode == 0, f"{command}\n{said.stdout[-3000:]}\n{said.stderr[-3000:]}"
    return said.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that no build directory is left in the repository or taken from it."""
    work = tmp_path_factory.mktemp("wheel")
    for name in ("cudnn_graphs", "ops", "planning"):
        shutil.copytree(ROOT / name, work / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, work / "source")
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", work, work / "source", cwd=work)
    (path,) = work.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    """The site directory of the installed wheel alone."""
    target = wheel.parent / "site"
    call(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel, cwd=wheel.parent)
    return target


@pytest.fixture(scope="module")
def python(wheel) -> Path:
    """A new environment's interpreter: the wheel from there, everything it depends on from here, this repository's editable install from nowhere."""
    environment = wheel.parent / "venv"
    call(sys.executable, "-m", "venv", "--without-pip", environment, cwd=wheel.parent)
    interpreter = environment / "bin" / "python"
    site = Path(call(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=wheel.parent).strip())
    call(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel, cwd=wheel.parent)
    (site / "dependencies.pth").write_text("\n".join(dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))))
    return interpreter


def test_the_wheel_owns_one_import_name_and_carries_the_kernels(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {n.split("/")[0] for n in names} == {"cudnn_graphs", wheel.name.split("-py3")[0] + ".dist-info"}
    own = {n for n in names if n.startswith("cudnn_graphs/")}
    sources = {p for folder in ("cudnn_graphs", "ops", "planning") for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cuh")}
    want = {str(p.relative_to(ROOT)).replace("ops/", "cudnn_graphs/ops/").replace("planning/", "cudnn_graphs/planning/") for p in sources}
    assert own == want | {"cudnn_graphs/py.typed"}
    assert any(n.startswith("cudnn_graphs/kernels/portable/") for n in own) and any(n.startswith("cudnn_graphs/kernels/common/") for n in own)
    assert any(n.endswith("LICENSE") for n in names)


def test_it_runs_outside_the_repository(python, tmp_path):
    code = """
import json, sys, torch, cudnn_graphs
sys.path.insert(0, sys.argv[1])
from paged_cases import PagedCase
case = PagedCase().make()
out, lse = case.one_shot()
from oracle_paged import assert_close, paged_attention
from paged_cases import by_query
got, want = by_query(out, lse), paged_attention(case)
assert_close(got[0], want[0], got[1], want[1])
print(json.dumps(cudnn_graphs.__file__))
"""
    where = json.loads(call(python, "-c", code, Path(__file__).parent, cwd=tmp_path, CUDNN_GRAPHS_CACHE_DIR=str(tmp_path / "cache")))
    assert where.startswith(str(python.parents[1])), f"it ran {where}, not the wheel"
    assert list((tmp_path / "cache" / "plans").glob("*.plan.json"))


def test_importing_initializes_nothing(python, tmp_path):
    code = """
import sys, json, os
before = set(os.listdir("."))
import cudnn_graphs
light = [m for m in ("torch", "cudnn", "cupy", "cuda", "rich", "numpy") if m in sys.modules]
from cudnn_graphs import PagedBlockSparseSignature, PlanStore, block_sparse_attention_with_paged_kv_cache
from cudnn_graphs.planning import default_store
import torch
heavy = [m for m in ("cudnn", "cupy", "cupy_backends") if m in sys.modules]
print(json.dumps([light, heavy, torch.cuda.is_initialized(), sorted(set(os.listdir(".")) - before)]))
"""
    light, heavy, initialized, files = json.loads(call(python, "-c", code, cwd=tmp_path, CUDNN_GRAPHS_CACHE_DIR=str(tmp_path / "cache")))
    assert light == [] and heavy == [] and not initialized and files == []


def test_public_names_resolve_and_unknown_ones_do_not(python, tmp_path):
    code = ("import cudnn_graphs as c, cudnn_graphs.ops as o; print(all(getattr(c, n) is not None for n in dir(c)), hasattr(c, 'no_such_name'), "
            "set(c._OPS) == set(o.__all__))")
    assert call(python, "-c", code, cwd=tmp_path).split() == ["True", "False", "True"]


def test_no_generic_import_name(python, tmp_path):
    code = "import importlib.util as u; print(u.find_spec('cudnn_graphs') is not None, u.find_spec('ops'), u.find_spec('planning'))"
    assert call(python, "-S", "-c", f"import site; site.addsitedir({str(python.parents[1])!r}); " + code, cwd=tmp_path,
                PYTHONPATH=str(next(python.parents[1].glob("lib/*/site-packages")))).split() == ["True", "None", "None"]


def test_types(installed):
    call(sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / "build" / "mypy", "-p", "cudnn_graphs", cwd=installed)


def test_style():
    call(sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", ROOT, cwd=ROOT)
