"""When forking a worker is equivalent to starting it."""

from __future__ import annotations

import importlib.machinery
import sys
import types
import zipfile
from pathlib import Path

import pytest

from ttp.launch.warm.memory import left
from ttp.launch.warm.rules import MARGIN_BYTES, MODULE_BYTES, Program, digest, no_room, program, set_by_program, why_not
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
        ({"PATH": "/bin", "SET_BY_IMPORT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, None),
        ({"PATH": "/my/bin", "SET_BY_IMPORT": "1"}, "sets PATH"),
        ({"PATH": "/bin", "SET_BY_IMPORT": "1", "OMP_NUM_THREADS": "8"}, "sets OMP_NUM_THREADS"),
        ({"PATH": "/bin"}, "sets SET_BY_IMPORT"),
    ],
)
def test_variables_that_the_program_sets(rank: dict[str, str], reason: str | None) -> None:
    here = {"PATH": "/bin", "SET_BY_IMPORT": "1"}
    said = set_by_program({name: digest(value) for name, value in rank.items()}, here, {"PATH", "SET_BY_IMPORT"})
    assert said is None if reason is None else said is not None and reason in said


@pytest.mark.parametrize(
    ("rank", "spare", "enough"),
    [(0, 0, True), (0, -1, False), (3 * MODULE_BYTES, 0, True), (3 * MODULE_BYTES, -MODULE_BYTES * 14, True)],
)
def test_memory_for_one_more(rank: int, spare: int, enough: bool) -> None:
    assert (no_room(10, rank, 20 * MODULE_BYTES + MARGIN_BYTES + spare) is None) is enough
    assert no_room(10, rank, None) is None
    assert "0 MiB are left" in str(no_room(10, rank, -5))


LIMITS = {
    "cgroup2 - cgroup2 rw": ("0::/job/rank", {"memory.max": "max", "memory.current": "900", "memory.stat": ""}, None),
    "cgroup2 - cgroup2 rw,x": (
        "0::/job/rank",
        {"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 5\ninactive_file 50"},
        150,
    ),
    "memory - cgroup cgroup rw,memory": (
        "4:memory:/job/rank",
        {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "990", "memory.stat": "total_inactive_file 7"},
        17,
    ),
}


@pytest.mark.parametrize("mounted", LIMITS)
def test_memory_that_is_left(mounted: str, tmp_path: Path) -> None:
    line, files, expected = LIMITS[mounted]
    proc, group = tmp_path / "proc", tmp_path / "fs" / "job"
    (proc / "self").mkdir(parents=True)
    (group / "rank").mkdir(parents=True)
    assert left(tmp_path) is None
    (proc / "meminfo").write_text("MemFree: 1 kB\nMemAvailable:    2 kB\n")
    (proc / "self" / "mountinfo").write_text(
        f"31 23 0:28 / {tmp_path / 'fs'} rw,relatime - {mounted.split(' - ')[1]}\n"
    )
    (proc / "self" / "cgroup").write_text(f"{line}\n")
    for name, text in files.items():
        (group / name).write_text(text)
    assert left(tmp_path) == (2048 if expected is None else expected)


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
