"""The processes that ttp starts for itself, where the user's files have names of Python's modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forking import imports
from tests.waiting import until
from ttp.config import Config
from ttp.launch import own_module as subject
from ttp.launch.warm.starter import WarmStarter

NAMES = ("queue", "random", "token", "platform", "grpc")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a current directory with such files."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is no part of Python')\n")
    monkeypatch.chdir(tmp_path)
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
    return tmp_path


def test_the_controller_starts(folder: Path) -> None:
    command = [*subject.own_module("ttp.controller"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and "--port" in done.stdout, done.stderr


def test_ttp_is_the_one_that_runs_even_if_it_was_found_in_the_current_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "ours.py").write_text("import sys, queue\nprint(sys.argv)\n")
    (folder / "ours.py").write_text("print('not this one')\n")
    monkeypatch.setattr(subject, "ROOT", str(root))
    done = subprocess.run([*subject.own_module("ours"), "x"], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == f"['{root}/ours.py', 'x']\n", done.stderr


def test_workers_are_forked(folder: Path) -> None:
    """The rank would not see these files: it searches the folder of its script, not the current directory."""
    script = folder / "scripts" / "train.py"
    script.parent.mkdir()
    script.touch()
    starter = WarmStarter(Config(), folder)
    try:
        assert starter.worker([sys.executable, "-u", "scripts/train.py"], os.environ, None, None) is None
        (folder / "imports.json").write_text(imports([]))

        def settled() -> str:
            starter.look()
            state: str = json.loads((folder / "warm.json").read_text())["state"]
            return state if state != "preparing" else ""

        assert until(settled) == "ready", (folder / "warm.log").read_text()
    finally:
        starter.close()
