"""The README is true: its code runs, its matrix is the support table's, and its two commands are there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
COMMANDS = [line for language, block in BLOCKS if language == "bash" for line in block.splitlines()]
INSTALLERS = ("scripts/demo", "scripts/test")


def test_every_block_is_python_or_bash():
    assert {language for language, _ in BLOCKS} == {"python", "bash"}


def test_python_blocks_run_in_order(tmp_path):
    program = "\n".join(block for language, block in BLOCKS if language == "python")
    done = run([sys.executable, "-c", program], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(2, 1, 32, 128) (2, 32, 1)" in done.stdout
    assert "paged B8 q1" in done.stdout, "a batch of 5 is served by the plan for 8"
    assert "which the frozen store does not hold" in done.stdout


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in INSTALLERS])
def test_bash_commands_run(command, tmp_path):
    done = run(["bash", "-c", command], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", INSTALLERS)
def test_the_two_commands(command):
    """`.ci/run` runs both whole; here, that they are in the README and could be run."""
    assert command in COMMANDS
    assert os.access(ROOT / command, os.X_OK)
    assert subprocess.run(["bash", "-n", ROOT / command], check=False).returncode == 0


def test_every_table_is_in_step(tmp_path):
    done = run([sys.executable, str(ROOT / "scripts" / "update_readme.py"), "--check"], tmp_path)
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("python, driver, present, want", [
    ((3, 11), None, None, ("", "torch==2.13.0", "")),
    ((3, 12), None, None, ("", "torch", "")),
    ((3, 11), 11, None, ("", "torch==2.13.0", "")),
    ((3, 12), 12, None, ("", "torch<2.11", "cuda12")),
    ((3, 12), 13, None, ("", "torch", "cuda13")),
    ((3, 12), 14, None, ("", "torch", "cuda13")),
    ((3, 12), 13, 13, ("--system-site-packages", "", "cuda13")),
    ((3, 12), 13, 12, ("--system-site-packages", "", "cuda12")),
])
def test_what_is_installed(python, driver, present, want):
    """By the driver; a torch that is there already and sees the GPU decides instead."""
    spec = importlib.util.spec_from_file_location("choose_install", ROOT / "scripts" / "choose_install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.choose(python, driver, present) == want


def run(command: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "CUDNN_GRAPHS_CACHE_DIR": str(cache)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
