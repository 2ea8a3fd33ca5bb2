"""The Trainer of Hugging Face: killed between its hooks, a job ends with the bits, the log and the callbacks'
states.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.forking import ForkedPython
from tests.frameworks.conftest import MAY_LOSE, quick, survives
from ttp.errors import CheckpointError, ConfigError, UsageError
from ttp.testing import kit

pytestmark = [
    pytest.mark.needs("transformers", "accelerate"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # of the Trainer, about everything
]
PROGRAM = "tests.frameworks.hf_program"
KILLS = [
    kit.Kill("backward", rank=1),
    kit.Kill("on_log", rank=1),
    kit.Kill("on_evaluate", rank=0),
    kit.Kill("on_epoch_end", rank=1),
    kit.Kill("in_step", rank=0),
]


COPIES = [kit.Kill("in_step", rank=0, after=5), kit.Kill("on_evaluate", rank=1, after=5)]


@pytest.mark.parametrize(("scaler", "kills"), [*quick(KILLS, 0, 2, 3, name="scaler"), *quick(KILLS)])
def test_it_is_killed_in_a_step_and_behind_it(scaler: str, kills: list[kit.Kill], tmp_path: Path) -> None:
    survives(kit.Job(PROGRAM, kills, steps=16, env={"HF_SCALER": scaler}), tmp_path)


def test_a_schedule_that_follows_evaluations(tmp_path: Path) -> None:
    """An evaluation comes after its version, so a job that is killed in the next step has to keep the rate it set.

    A sampler that groups by length draws the order of an epoch from torch's stream, where the epoch begins.
    """
    kills = [kit.Kill("backward", rank=1, after=4), kit.Kill("on_evaluate", rank=0, after=2), kit.Kill("forward")]
    survives(kit.Job(PROGRAM, kills, steps=14, env={"HF_PLATEAU": "1"}), tmp_path)


@pytest.mark.parametrize(
    ("shard", "kills"), [*quick(COPIES, 1, name="fsdp2"), *quick(COPIES, name="fsdp1"), *quick(COPIES, name="hsdp")]
)
def test_a_sharded_model(shard: str, kills: list[kit.Kill], tmp_path: Path) -> None:
    env = {"HF_SHARD": shard, "TTP_BUDDY_EVERY": "2"}
    ranks, lost = (4, 0) if shard == "hsdp" else (2, MAY_LOSE)
    survives(kit.Job(PROGRAM, kills, ranks, 16, env=env, may_lose=lost), tmp_path)


@pytest.mark.slow
def test_it_is_killed_in_other_hooks_and_in_an_evaluation_of_each_epoch(tmp_path: Path) -> None:
    kills = [
        kit.Kill("forward", rank=0),
        kit.Kill("stepped", rank=1),
        kit.Kill("on_optimizer_step", rank=0),
        kit.Kill("on_step_end", rank=1),
        kit.Kill("on_prediction_step", rank=0, after=2),
        kit.Kill("on_step_begin", rank=1),
    ]
    survives(kit.Job(PROGRAM, kills, steps=20, env={"HF_EVALUATE": "epoch"}), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ttp", "torchrun"])
def test_the_same_under_a_launcher(launcher: str, tmp_path: Path) -> None:
    survives(kit.Job(PROGRAM, KILLS, steps=16, launcher=launcher), tmp_path)


@pytest.mark.slow
def test_survivors_do_not_go_on_in_their_processes(tmp_path: Path) -> None:
    job = kit.Job(PROGRAM, KILLS[:1], steps=16, launcher="ttp", env={"TTP_CONTINUITY": "keep"})
    found = survives(job, tmp_path)
    assert "will not go on after a failure of another: Accelerate can begin only one training" in found.story


@pytest.mark.slow
def test_the_trainer_alone_resumes_from_the_directory_that_was_made(tmp_path: Path) -> None:
    """On all ranks, without ttp: the weights are those of an unbroken job."""
    env = {"HF_SCALER": "1"}
    survives(kit.Job(PROGRAM, KILLS[:2], steps=16, env=env), tmp_path / "protected")
    (directory,) = (tmp_path / "protected" / "hurt" / "checkpoints" / "trainer").glob("checkpoint-*")
    assert {path.name for path in directory.iterdir()} >= {
        "config.json",
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "scaler.pt",
        "rng_state_0.pth",
        "rng_state_1.pth",
        "trainer_state.json",
    }
    env["HF_ALONE"] = str(directory)
    kit.run(kit.Job(PROGRAM, [], steps=16, env=env), tmp_path / "alone", start=ForkedPython)
    for rank in range(2):
        ours, alone = (
            json.loads((tmp_path / run / f"result{rank}.json").read_text())
            for run in ("protected/unbroken", "alone/unbroken")
        )
        for name in ("model", "optimizer", "schedule", "scaler", "torch's random stream"):
            assert ours[name] == alone[name], name


def test_a_line_of_the_log_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is read several times in a step, and the log of a long training has tens of thousands of lines."""
    from ttp.adapters.frameworks import hf
    from ttp.store.encoding import decode, encode

    encoded: list[Any] = []

    def noted(line: Any) -> bytes:
        encoded.append(line)
        return encode(line)

    monkeypatch.setattr(hf, "encode", noted)
    callback, history = hf.TtpCallback(), list[Any]()
    callback._trainer = SimpleNamespace(state=SimpleNamespace(log_history=history))
    for step in range(3):
        history.append({"step": step})
        for _ in range(2):
            assert [*map(decode, callback.state_dict()["log"])] == history
    assert encoded == history
    callback._trainer.state.log_history = [{"step": 0}]
    assert [*map(decode, callback.state_dict()["log"])] == [{"step": 0}]


def test_a_reference_model_that_follows_the_model_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's ``sync_ref_model``: a resumed job would begin with the first reference model again."""
    from ttp.adapters.frameworks import hf

    given: dict[str, Any] = {}
    monkeypatch.setattr(hf, "protect", lambda *args, extra_state, **settings: given.update(extra_state))
    monkeypatch.setattr("ttp.api.step_done", lambda: None)
    for own, saved in (({"own": 1}, {"own": 1, "ref_model": "followed"}), ({"mine": "followed"}, {"mine": "followed"})):
        callback = hf.TtpCallback(extra_state=own)
        callback._found = {"foreign": True}
        callback._trainer = SimpleNamespace(
            args=SimpleNamespace(sync_ref_model=True), ref_model="followed", accelerator=None, model_wrapped=None
        )
        given.clear()
        callback.on_train_begin(None, SimpleNamespace(global_step=0), None, optimizer=None, lr_scheduler=None)
        assert given == {**saved, "ttp.hf": callback}


def test_a_directory_that_cannot_be_completed_is_said_and_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from ttp.adapters.frameworks.hf_directory import complete

    (tmp_path / "optimizer.pt").mkdir()
    kept = SimpleNamespace(state_dict=dict)
    trainer = SimpleNamespace(args=SimpleNamespace(process_index=0, world_size=1), optimizer=kept, lr_scheduler=kept)
    trainer.accelerator = SimpleNamespace(state=None)
    complete(str(tmp_path), trainer)
    assert f"the Trainer alone cannot resume from {tmp_path}" in caplog.text
    assert (tmp_path / "scheduler.pt").exists() and (tmp_path / "rng_state.pth").exists()


def test_a_model_that_writes_only_its_own_weights_gets_those_of_the_checkpoint_first(tmp_path: Path) -> None:
    """sentence-transformers: its ``save_pretrained`` takes no ``state_dict``."""
    import torch

    from ttp.adapters.frameworks.hf_directory import _write_model

    class Own(torch.nn.Linear):
        def save_pretrained(self, path: Path) -> None:
            torch.save(self.state_dict(), path / "own.pt")

    saved = {"weight": torch.full((1, 2), 3.0), "bias": torch.full((1,), 4.0)}
    _write_model(SimpleNamespace(model=Own(2, 1)), tmp_path, saved)
    written = torch.load(tmp_path / "own.pt")
    assert all(torch.equal(written[name], saved[name]) for name in saved)


@pytest.fixture
def choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that chooses the directory to resume from, without a ``save_dir``."""
    from ttp.adapters.frameworks import hf_directory

    current = SimpleNamespace(config=SimpleNamespace(save_dir=None), fallback_dir=tmp_path / "fallback")
    current.fallback_dir.mkdir()
    monkeypatch.setattr("ttp.session.current", lambda: current)

    def choose(**settings: Any) -> Any:
        args = SimpleNamespace(output_dir=str(tmp_path / "output"), **{"save_only_model": False, **settings})
        return hf_directory.choose(SimpleNamespace(args=args), tmp_path / "absent")

    return choose


def test_a_checkpoint_in_the_fallback_directory_is_found_without_a_save_dir(choose: Any, tmp_path: Path) -> None:
    """Else the Trainer would begin anew, and the restore, which finds the checkpoint, would end the job each time."""
    from tests.adapters.torch.checkpoints import Net, adamw, write_checkpoint
    from ttp.adapters.torch.saving.job_state import JobState

    model = Net()
    path = tmp_path / "fallback" / "tft_saved_checkpoints-step_3"
    write_checkpoint(path, model, adamw(model), JobState(version=3))
    with pytest.raises(CheckpointError, match="fallback/tft_saved_checkpoints-step_3 holds no state of a Trainer"):
        choose()


def test_the_trainers_own_checkpoints_of_the_model_alone_do_not_count(choose: Any, tmp_path: Path) -> None:
    """The Trainer would resume from one with the optimizer and the schedule of a first step, and say nothing."""
    own = tmp_path / "output" / "checkpoint-8"
    own.mkdir(parents=True)
    (own / "trainer_state.json").write_text("{}")
    assert choose() == {"version": 0, "directory": str(own), "foreign": True}
    assert choose(save_only_model=True) == {"version": 0}


@pytest.mark.parametrize(("step", "refused"), [(3, True), (5, False)])
def test_the_trainers_own_checkpoint_does_not_hide_a_newer_one_of_a_newer_ttp(
    step: int, refused: bool, choose: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.adapters.torch.checkpoints import Net, adamw, write_checkpoint
    from tests.store.test_catalog import edit
    from ttp.adapters.torch.saving.job_state import JobState

    own = tmp_path / "output" / f"checkpoint-{step}"
    own.mkdir(parents=True)
    (own / "trainer_state.json").write_text("{}")
    path, model = tmp_path / "fallback" / "tft_saved_checkpoints-step_4", Net()
    write_checkpoint(path, model, adamw(model), JobState(version=4))
    edit(path, format_version=2, ttp_version="9.1")
    if refused:
        with pytest.raises(CheckpointError, match=r"a newer ttp has saved step 4, .*: upgrade ttp"):
            choose()
    else:
        assert choose()["directory"] == str(own)
        assert f"upgrade ttp; the Trainer's own {own} is restored" in caplog.text


def trainer(*callbacks: Any, settings: Any = None, **more: Any) -> Any:
    args = SimpleNamespace(process_index=0, world_size=1, output_dir="none", save_only_model=False, **(settings or {}))
    return SimpleNamespace(args=args, callback_handler=SimpleNamespace(callbacks=callbacks), **more)


LOCAL = SimpleNamespace(fsdp_plugin=SimpleNamespace(state_dict_type="StateDictType.LOCAL_STATE_DICT"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"settings": {"enable_jit_checkpoint": True}},
            r"TrainingArguments\(enable_jit_checkpoint=True\).*switch it off",
        ),
        (
            {"settings": {"auto_find_batch_size": True}},
            r"TrainingArguments\(auto_find_batch_size=True\).*switch it off",
        ),
        ({"is_deepspeed_enabled": True}, r"is_deepspeed_enabled: write the loop with ttp\.deepspeed"),
        ({"accelerator": SimpleNamespace(state=LOCAL)}, "FULL_STATE_DICT or SHARDED_STATE_DICT"),
    ],
)
def test_what_cannot_be_protected_is_refused(given: dict[str, Any], said: str) -> None:
    """By all ranks, before the training begins."""
    from ttp import hf

    with pytest.raises(ConfigError, match=said):
        hf.resume_directory(trainer(hf.TtpCallback("nowhere"), **given))


def test_a_trainer_without_the_callback_is_refused() -> None:
    from ttp import hf

    with pytest.raises(UsageError, match=r"call trainer\.add_callback"):
        hf.resume_directory(trainer())
    with pytest.raises(UsageError, match="TtpCallback does not know its trainer"):
        hf.TtpCallback("nowhere").on_train_begin(None, None, None)
