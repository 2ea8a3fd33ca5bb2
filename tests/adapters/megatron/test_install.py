"""``install()``: what it makes of the functions of Megatron-LM's training module."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import ttp
from ttp.adapters.megatron import training
from ttp.errors import ConfigError

WRONG = """
from types import SimpleNamespace
from ttp.adapters.megatron import training
from ttp.errors import ConfigError
def protect(*_, **__):
    raise ConfigError("Set it to False")
training.protect = protect
args = SimpleNamespace(save="kept")
module = SimpleNamespace(setup_model_and_optimizer=lambda: ([], 1, None), train=len, get_args=lambda: args)
training.install(training=module)
module.setup_model_and_optimizer()
"""


def test_what_is_refused_in_megatrons_own_program_ends_it_with_64() -> None:
    """It is raised outside of ``train()``. With 1 a launcher would start the job again, in vain."""
    ended = subprocess.run([sys.executable, "-c", WRONG], capture_output=True, text=True, check=False)
    assert (ended.returncode, "ConfigError: Set it to False" in ended.stderr) == (64, True), ended.stderr


@pytest.fixture
def megatron_lm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return something like Megatron-LM's training module, and take ttp's part away from ``install()``."""
    args = SimpleNamespace(iteration=0, save="kept", qk_clip=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(training, "protect", lambda *_, **__: None)
    monkeypatch.setattr(training, "streams_now", dict)
    monkeypatch.setattr(ttp, "restore", lambda: 0)
    return SimpleNamespace(setup_model_and_optimizer=lambda: ([], 1, None), train=len, args=args, get_args=lambda: args)


@pytest.mark.parametrize("loaded", [0, 5, 6])
def test_an_older_checkpoint_of_ttp_does_not_replace_what_megatron_has_loaded(
    loaded: int, megatron_lm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron_lm.args.iteration = loaded

    def restore() -> int:
        megatron_lm.args.iteration = 5
        return 5

    monkeypatch.setattr(ttp, "restore", restore)
    training.install(training=megatron_lm)
    if loaded <= 5:
        assert megatron_lm.setup_model_and_optimizer() == ([], 1, None)
        return
    with pytest.raises(ConfigError, match=r"loaded iteration 6 .* in kept, is of iteration 5"):
        megatron_lm.setup_model_and_optimizer()


@pytest.mark.parametrize("clips", [True, False])
def test_the_end_of_a_step_is_declared_if_megatron_clips_weights(
    clips: bool, megatron_lm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()
    megatron_lm.args.qk_clip, megatron_lm.train_step = clips, lambda: seen.append("step")
    monkeypatch.setattr(ttp, "step_done", lambda: seen.append("done"))
    training.install(training=megatron_lm)
    megatron_lm.setup_model_and_optimizer()
    megatron_lm.train_step()
    assert seen == (["done", "step", "done"] if clips else ["step"])


def test_an_evaluation_has_no_optimizer_and_is_left_alone(megatron_lm: SimpleNamespace) -> None:
    """Megatron's ``--skip-train``."""
    made = megatron_lm.setup_model_and_optimizer = Mock(return_value=([], None, None))
    training.install(training=megatron_lm)
    del megatron_lm.args
    assert megatron_lm.setup_model_and_optimizer() is made.return_value
