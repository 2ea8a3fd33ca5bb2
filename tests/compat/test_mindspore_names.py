"""A program that imports MindSpore's names for the power-off checkpoint gets ttp's; its mistakes end with 64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ttp.compat.mindio.placing import ours_counts
from ttp.errors import ConfigError
from ttp.launch.mindspore.flags import with_names

PROGRAM = """
import sys

assert "mindspore" not in sys.modules, "settings of the program would come too late"
import importlib.util
assert importlib.util.find_spec("mindspore") and "mindspore" not in sys.modules  # as libraries look whether it is there
import beside
assert sys.argv[1:] == ["--lr", "1"] and __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
import mindspore
from mindspore import nn, train
from mindspore.train.callback import TFTRegister, TrainFaultTolerance

assert type(mindspore.__spec__.loader).__name__ == "SourceFileLoader" == type(mindspore.__loader__).__name__
assert TFTRegister is train.TFTRegister and TrainFaultTolerance is train.TrainFaultTolerance
print([kind.__module__ for kind in (nn.OptTFTWrapper, TFTRegister, TrainFaultTolerance)], flush=True)
net = nn.Dense(2, 2)
kind = train.TrainFaultTolerance.get_optimizer_wrapper(nn.SGD)
assert isinstance(kind, type) and issubclass(kind, nn.Optimizer)  # a registry of classes would not take a function
made = kind(net.trainable_params(), 0.5)
assert isinstance(made, nn.OptTFTWrapper) and isinstance(made.opt, nn.SGD) and not made.ttp_reports
sys.excepthook = lambda *found: sys.__excepthook__(*found)  # init() of a job puts its own there
train.TFTRegister(0, "127.0.0.1", 30051, "./ttp_checkpoints/")
"""


def test_names_are_put_into_place_and_a_mistake_ends_with_64(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "beside.py").touch()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MS_", "MINDIO", "TTP_"))}
    command = [sys.executable, "-m", "ttp.compat.mindspore", str(tmp_path / "train.py"), "--lr", "1"]
    done = subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 64, done.stderr
    ours = "ttp.adapters.mindspore"
    assert f"['{ours}.wrapper', '{ours}.callbacks', '{ours}.callbacks']" in done.stdout
    assert "set MS_ENABLE_TFT='{TTP:1}'" in done.stderr


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("python", "-u", "train.py", "--lr"), ("python", "-u", "-m", "ttp.compat.mindspore", "train.py", "--lr")),
        (("python", "-m", "my.train"), ("python", "-m", "ttp.compat.mindspore", "-m", "my.train")),
        (("python", "-X", "dev", "a.py", "-c"), ("python", "-X", "dev", "-m", "ttp.compat.mindspore", "a.py", "-c")),
        (("pytest", "-q"), (sys.executable, "-m", "ttp.compat.mindspore", "-m", "pytest", "-q")),
    ],
)
def test_a_job_with_mindio_is_run_with_them(command: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert with_names(command) == expected


@pytest.mark.parametrize("command", [("python", "-c", "pass"), ("python",), ("python", "-u", "-")])
def test_what_is_no_program_of_a_file_is_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="wants a script"):
        with_names(command)


def test_the_vendors_goes_first_unless_ours_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ours_counts("1") and ours_counts("force")
    monkeypatch.setattr("ttp.compat.mindio.placing.find_original", object)
    assert not ours_counts("1") and ours_counts("force")


def test_without_a_program_it_says_how_it_is_used() -> None:
    command = [sys.executable, "-m", "ttp.compat.mindspore"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1 and "SCRIPT | -m MODULE" in done.stderr
