"""When forking is the same as starting."""

from __future__ import annotations

import importlib.machinery
import sys
import types
import zipfile
from pathlib import Path

import pytest

from ttp.launch.warm.rules import Program, digest, program, set_by_program, why_not
from ttp.processor.import_list import AFTER_UPDATES, FILE, ImportList, _file

PYTHON = "/usr/bin/python3"


def test_what_workers_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert program([PYTHON, "-u", str(script), "--lr", "1"], PYTHON) == Program(
        PYTHON, ("-u",), str(script), False, ("--lr", "1")
    )
    assert program([PYTHON, "-u", "-m", "train", "-m"], PYTHON) == Program(PYTHON, ("-u",), "train", True, ("-m",))


def test_an_archive_is_started(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    with zipfile.ZipFile(archive := tmp_path / "train.pyz", "w") as packed:
        packed.write(tmp_path / "train.py", "__main__.py")
    assert "is no script" in str(program([PYTHON, str(archive)], PYTHON))


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ([], "started by nothing"),
        (["numactl", PYTHON, "x.py"], "started by numactl"),
        ([PYTHON, "-X", "dev", "x.py"], "options of Python"),
        ([PYTHON, "-u"], "options of Python"),
        ([PYTHON, "-u", "/no/such/script.py"], "is no script"),
    ],
)
def test_what_is_not_understood_is_started(command: list[str], reason: str) -> None:
    said = program(command, PYTHON)
    assert isinstance(said, str) and reason in said


BASE = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "MODE": "a"}
WORKER = BASE | {"RANK": "1", "MASTER_PORT": "5"}


@pytest.mark.parametrize(
    ("worker", "read", "read_all", "reason"),
    [
        (WORKER, {"PATH", "MODE", "HOME"}, "", None),
        (WORKER, {"RANK"}, "", "RANK differs"),
        (WORKER, set(), "a.module", None),
        (WORKER | {"MODE": "b"}, set(), "", None),
        (WORKER | {"MODE": "b"}, {"MODE"}, "", "MODE differs"),
        (WORKER | {"MODE": "b"}, set(), "a.module", "a.module reads all"),
        (WORKER | {"OMP_NUM_THREADS": "2"}, set(), "", "OMP_NUM_THREADS differs"),
        (WORKER | {"CUDA_VISIBLE_DEVICES": "1"}, set(), "", "CUDA_VISIBLE_DEVICES differs"),
        ({name: value for name, value in WORKER.items() if name != "MODE"}, {"MODE"}, "", "MODE differs"),
    ],
)
def test_variables(worker: dict[str, str], read: set[str], read_all: str, reason: str | None) -> None:
    said = why_not(BASE, worker, read, read_all)
    assert said is None if reason is None else said is not None and reason in said


@pytest.mark.parametrize(
    ("rank", "reason"),
    [
        ({"PATH": "/bin", "SET_BY_IMPORT": "1"}, None),
        ({"PATH": "/bin", "SET_BY_IMPORT": "1", "RANK": "0", "CUDA_MODULE_LOADING": "LAZY"}, None),
        ({"PATH": "/my/bin", "SET_BY_IMPORT": "1"}, "sets PATH"),
        ({"PATH": "/bin", "SET_BY_IMPORT": "1", "OMP_NUM_THREADS": "8"}, "sets OMP_NUM_THREADS"),
        ({"PATH": "/bin"}, "sets SET_BY_IMPORT"),
    ],
)
def test_variables_that_the_program_sets(rank: dict[str, str], reason: str | None) -> None:
    here = {"PATH": "/bin", "SET_BY_IMPORT": "1"}
    said = set_by_program({name: digest(value) for name, value in rank.items()}, here, {"PATH", "SET_BY_IMPORT"})
    assert said is None if reason is None else said is not None and reason in said


def test_the_list_is_written_once_after_some_updates(tmp_path: Path) -> None:
    imports = ImportList(tmp_path, wanted=True)
    assert [imports.due(version) for version in (7, 8, 7 + AFTER_UPDATES, 50)] == [False, False, True, False]
    imports.write()
    assert f'["json", "{sys.modules["json"].__file__}"]' in (tmp_path / FILE).read_text()
    assert not ImportList(tmp_path, wanted=False).due(1000)
    ImportList(tmp_path / "gone", wanted=True).write()  # says nothing, hurts nobody


def test_only_what_is_installed_is_in_it(tmp_path: Path) -> None:
    assert _file("json", sys.modules["json"])
    assert _file("ttp.launch.warm.rules", sys.modules["ttp.launch.warm.rules"])
    assert not _file("sys", sys)
    assert not _file("another", sys.modules["json"]), "a module under another name"
    own = types.ModuleType("own")
    loader = importlib.machinery.SourceFileLoader("own", str(tmp_path / "own.py"))
    own.__spec__ = importlib.machinery.ModuleSpec("own", loader, origin=str(tmp_path / "own.py"))
    assert not _file("own", own)
