"""PyTorch Lightning: killed between its hooks, a job ends with the bits, the loops and the callbacks' states."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.forking import ForkedPython
from tests.frameworks.conftest import quick, survives
from ttp.errors import ConfigError
from ttp.testing import kit

pytestmark = [
    pytest.mark.needs("lightning"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # of Lightning, about everything
]
PROGRAM = "tests.frameworks.lightning_program"

KILLS = {
    "automatic": [
        kit.Kill("forward", rank=0),
        kit.Kill("in_step", rank=0),
        kit.Kill("stepped", rank=1, after=0),
        kit.Kill("on_train_batch_end", rank=0),
        kit.Kill("validation", rank=1),
        kit.Kill("on_train_epoch_end", rank=0),
    ],
    "plateau": [
        kit.Kill("backward", rank=1, after=3),
        kit.Kill("validation", rank=0, after=1),
        kit.Kill("on_train_epoch_end", rank=1),
    ],
    "manual": [
        kit.Kill("backward", rank=0, after=4),  # of the judge: it has stepped once in this batch
        kit.Kill("in_step", rank=1, after=5),
        kit.Kill("on_train_batch_end", rank=0, after=1),
        kit.Kill("on_train_epoch_end", rank=1),
    ],
    "by_hand": [kit.Kill("forward", rank=1), kit.Kill("validation", rank=0), kit.Kill("on_train_epoch_end", rank=1)],
    "growing": [kit.Kill("validation", rank=0, after=5), kit.Kill("forward", rank=1)],
    "hsdp": [kit.Kill("backward", rank=1), kit.Kill("in_step", rank=2), kit.Kill("on_train_batch_end", rank=0)],
    "fsdp2": [kit.Kill("backward", rank=1, after=3), kit.Kill("in_step", rank=0, after=3)],
    "fsdp1": [kit.Kill("backward", rank=1, after=3), kit.Kill("on_train_batch_end", rank=0, after=3)],
    "hsdp1": [kit.Kill("backward", rank=1), kit.Kill("in_step", rank=2), kit.Kill("on_train_batch_end", rank=0)],
    "workers": [
        kit.Kill("forward", rank=1, after=2),
        kit.Kill("stepped", rank=0, after=1),
        kit.Kill("on_train_epoch_end", rank=1),
    ],
}


QUICK = {"automatic": (1, 3, 4), "manual": (1,), "by_hand": (0,), "growing": (0,), "fsdp2": (1,), "workers": (1,)}
"""Those of them that run without ``-m slow``."""


@pytest.mark.parametrize(
    ("kind", "kills"), [case for kind in KILLS for case in quick(KILLS[kind], *QUICK.get(kind, ()), name=kind)]
)
def test_it_is_killed_and_ends_with_its_bits(kind: str, kills: list[kit.Kill], tmp_path: Path) -> None:
    if kind == "workers":
        pytest.importorskip("torchdata")
    env, ranks = {"PROGRAM_KIND": kind, "TTP_BUDDY_EVERY": "1"}, 4 if kind in ("hsdp", "hsdp1") else 2
    survives(kit.Job(PROGRAM, kills, ranks, env=env, may_lose=2 if kind in ("fsdp1", "fsdp2") else 0), tmp_path)


def ended(directory: Path, ranks: int = 2, steps: int = 10, **env: str) -> tuple[Any, int]:
    """Run a job that ends its first life itself, and check that no step is lost. Returns what was found, and saved."""
    job = kit.Job(PROGRAM, [kit.Kill("never", after=99)], ranks, steps, env=env)
    found = kit.run(job, directory, start=ForkedPython)
    (row,) = found.rows
    assert set(row.codes) == {75} and row.version is not None and not row.lost, found.story
    return found, row.version


@pytest.mark.parametrize(("ranks", "step"), [pytest.param(2, 3, marks=pytest.mark.slow), (1, 10)])
def test_a_sigterm_saves_and_is_not_the_frameworks(ranks: int, step: int, tmp_path: Path) -> None:
    """One rank's sampler draws from the random stream; its tenth step is in the second epoch."""
    found, version = ended(tmp_path, ranks, 14, PROGRAM_KIND="plateau", PROGRAM_TERM=str(step))
    assert version >= step
    assert not found.differences, found
    assert "Received SIGTERM" not in found.story  # by Lightning's handler


def test_param_groups_that_a_callback_has_added_keep_their_rates(tmp_path: Path) -> None:
    """``BackboneFinetuning`` puts the groups as it made them in place of the restored ones, unless it is stopped."""
    found, _ = ended(tmp_path, 1, 30, PROGRAM_KIND="tuned", PROGRAM_TERM="27")  # in the fourth epoch
    late = "rank 0: watch differs"  # the save may come before the callback has seen the end of the batch
    assert not {*found.differences} - {late}, f"{found}\n{found.story}"


@pytest.mark.slow
def test_a_callback_that_raises_is_saved_and_the_framework_writes_no_file(tmp_path: Path) -> None:
    found, version = ended(tmp_path, PROGRAM_KIND="automatic", PROGRAM_RAISE="3")
    assert version == 3 and not found.differences, found.story
    assert "ValueError: a callback raises" in found.story
    assert not list((tmp_path / "hurt").glob("raised/*"))  # OnExceptionCheckpoint


@pytest.mark.slow
def test_survivors_do_not_go_on_in_their_processes(tmp_path: Path) -> None:
    env = {"PROGRAM_KIND": "automatic", "TTP_CONTINUITY": "keep"}
    found = survives(kit.Job(PROGRAM, KILLS["automatic"][1:2], launcher="ttp", env=env), tmp_path)
    assert "will not go on after a failure of another: Lightning can begin only one training" in found.story


@pytest.fixture
def make_trainer(tmp_path: Path) -> Any:
    from lightning.pytorch import Trainer

    import ttp.lightning

    def make(*callbacks: Any, plugins: Any = ()) -> Any:
        ours = ttp.lightning.TtpCallback(tmp_path / "ours")
        files = ttp.lightning.TtpCheckpointIO(tmp_path / "ours")
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        quiet["enable_checkpointing"] = False
        every = [*callbacks, ours]
        return Trainer(accelerator="cpu", devices=1, max_steps=1, callbacks=every, plugins=[files, *plugins], **quiet)

    return make


def model_and_data() -> tuple[Any, Any]:
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
    from torch.utils.data import DataLoader

    return BoringModel(), DataLoader(RandomDataset(32, 8))


def test_what_cannot_be_protected_is_refused(make_trainer: Any, tmp_path: Path) -> None:
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    import ttp.lightning

    class Saves(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            checkpoint["mine"] = 1

    model, data = model_and_data()
    with pytest.raises(ConfigError, match="each restart of the job would begin there again"):
        make_trainer().fit(model, data, ckpt_path=str(tmp_path / "last.ckpt"))
    with pytest.raises(ConfigError, match="is for fit"):
        make_trainer().validate(model, data, ckpt_path="ttp://last")
    with pytest.raises(ConfigError, match="Saves saves its state in on_save_checkpoint"):
        make_trainer(Saves()).fit(model, data)
    with pytest.raises(ConfigError, match="another LR scheduler in mid-run"):
        make_trainer(StochasticWeightAveraging(0.1)).fit(model, data)
    other: Any = SimpleNamespace(strategy=SimpleNamespace(checkpoint_io=None))
    with pytest.raises(ConfigError, match="this Trainer is one of types: import lightning"):
        ttp.lightning.TtpCallback(tmp_path).setup(other, model, "fit")


def test_slurm_jobs_are_not_requeued_by_the_framework(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    from ttp import session

    for name, value in {"NTASKS": "1", "JOB_ID": "7", "JOB_NAME": "job", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    environment = SLURMEnvironment(auto_requeue=True)
    try:
        make_trainer(plugins=[environment]).fit(*model_and_data(), ckpt_path="ttp://last")
    finally:
        session.reset()
    assert not environment.auto_requeue


def test_outside_of_the_main_thread_no_handler_is_installed() -> None:
    """Ray Train calls ``fit`` on a thread, where Python refuses to install one."""
    from ttp import lightning

    callback: Any = lightning.TtpCallback("nowhere")
    callback._handler = signal.SIG_DFL
    with ThreadPoolExecutor(1) as thread:
        thread.submit(callback.on_train_start, None, None).result()
