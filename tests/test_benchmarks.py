"""Every group of the benchmarks runs at a small size. The measured values are not checked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import peers, resume, world
from tests.forking import ForkedPython
from ttp.store.held import Held

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.xdist_group("benchmarks")  # groups come first: they would be what a run waits for at its end

WITH_TORCH = ["steady", "keep", "buddy", "save", "gpu"]
"""Those that import it themselves; the others leave that to the ranks that they start."""


@pytest.mark.timeout(900)
def test_groups_that_import_torch_run(tmp_path: Path) -> None:
    """All run in one process, as users run them."""
    names = [name for name in WITH_TORCH if not (name == "gpu" and no_gpu())]
    arguments = [*names, "--quick", "--json", tmp_path / "results.json"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("TTP_")}
    process = ForkedPython("benchmarks", arguments, env, log := tmp_path / "log", cwd=ROOT)
    try:
        assert process.wait(800) == 0, log.read_text()[-4000:]
    finally:
        process.kill()
    check(tmp_path / "results.json", names)


@pytest.mark.timeout(900)
def test_groups_that_start_ranks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launchers and ranks are forked."""
    names = [name for name in benchmarks.GROUPS if name not in WITH_TORCH]
    monkeypatch.setenv(peers.PYTHON, sys.executable)  # plain torchrun is always there
    monkeypatch.setattr(peers, "MEGABYTES", 1.0)
    monkeypatch.setattr(peers, "STEPS", 12)  # the others save after ten

    def start(module: str, arguments: Sequence[str], env: dict[str, str], log: Path | None = None) -> ForkedPython:
        return ForkedPython(module, arguments, env, log or tmp_path / "log")

    def launch(command: list[str], *, env: dict[str, str], cwd: Path, stdout: IO[str], **_: Any) -> ForkedPython:
        return ForkedPython(command[2], command[3:], env, Path(stdout.name), cwd=cwd)  # of python -m MODULE

    monkeypatch.setattr(world, "start", start)
    monkeypatch.setattr(resume, "start", start)
    monkeypatch.setattr(peers, "Popen", launch)
    of, held = Held.of, list[Path]()

    def note(save_dir: Path) -> Held:
        held.append(of(save_dir).root)
        return of(save_dir)

    monkeypatch.setattr(Held, "of", note)
    monkeypatch.setattr(sys, "argv", ["benchmarks", *names, "--quick", "--json", str(tmp_path / "results.json")])
    assert benchmarks.main() == 0
    check(tmp_path / "results.json", names)
    assert held and not [root for root in held if root.exists()], "left in shared memory"


def check(results: Path, groups: list[str]) -> None:
    """Check that every one of these groups has results."""
    rows = json.loads(results.read_text())["results"]
    assert all(row["value"] == row["value"] and row["what"] for row in rows)
    assert {row["group"] for row in rows} == set(groups)


def no_gpu() -> bool:
    return bool(benchmarks.lacking("gpu"))


def test_a_group_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "nonsense", "--quick"])
    with pytest.raises(SystemExit) as ended:
        benchmarks.main()
    assert ended.value.code == 2 and "no benchmark is called nonsense" in capsys.readouterr().err
