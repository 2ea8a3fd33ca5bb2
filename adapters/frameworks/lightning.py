"""PyTorch Lightning: a callback that protects ``fit``, and ``ckpt_path="ttp://last"``.

A version ends with the optimizer's step, as in other jobs. What Lightning does after the step belongs to the version
too, up to the last callback's ``on_train_batch_end``: when that has returned, the rank-local state is captured again.
Validation and the end of an epoch follow; a job that is killed during them repeats them, from the captured state.
"""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import Any

from ttp import api, session
from ttp.adapters.torch.adapter import TorchAdapter
from ttp.adapters.torch.local_state.extra_state import by_name
from ttp.adapters.versions import begins_once, names_of, require
from ttp.errors import ConfigError, UsageError

TESTED = ("2.5", "2.6")
"""Oldest and newest version of lightning with which ttp was tested."""

require("lightning", "lightning", TESTED)
with names_of("lightning", TESTED):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch import __version__ as _version
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    from lightning.pytorch.plugins import TorchCheckpointIO
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from ttp.adapters.frameworks.lightning_loops import cluster_environment
    from ttp.adapters.frameworks.lightning_state import LightningState

log = logging.getLogger("ttp.adapters.frameworks")

LAST = "ttp://last"
"""The ``ckpt_path`` that resumes from the newest checkpoint of ttp, or begins anew if there is no checkpoint."""

_OWN_NAME = "lightning"  # of Lightning's state among the extra states

_STRATEGIES = (DDPStrategy, SingleDeviceStrategy, FSDPStrategy, ModelParallelStrategy)


class TtpCheckpointIO(TorchCheckpointIO):
    """Accepts ``fit(ckpt_path="ttp://last")``. Other paths are read and written as in Lightning.

    Args:
        save_dir: the ``save_dir`` of the ``TtpCallback``.
    """

    def __init__(self, save_dir: str | Path = "checkpoints") -> None:
        self.save_dir = str(save_dir)
        self.restored_by_callback = False

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file; for ``ttp://last`` load nothing, because the callback restores later, when optimizers exist.

        Raises:
            ConfigError: the path cannot be used here; the message says which can.
        """
        if self.restored_by_callback:
            _refuse_file(path)
        if not str(path).startswith("ttp:"):
            loaded: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
            return loaded
        if str(path) != LAST or not self.restored_by_callback:
            raise ConfigError(
                f"ckpt_path={str(path)!r}: {LAST} is for fit(), of a Trainer with TtpCallback. For validate, test and "
                f"predict convert the checkpoint to a file: ttp convert {self.save_dir} weights.pt --to torch; the "
                "entry 'model' of that file is the state_dict of the LightningModule"
            )
        return _Nothing({"pytorch-lightning_version": _version})


class _Nothing(dict[str, Any]):
    """An empty checkpoint: it is false, so Lightning loads nothing from it."""

    def __bool__(self) -> bool:
        return False


class TtpCallback(Callback):
    """Protects ``Trainer.fit``. ::

        trainer = Trainer(callbacks=[ttp.lightning.TtpCallback(dir)], plugins=[ttp.lightning.TtpCheckpointIO(dir)])
        trainer.fit(model, ckpt_path="ttp://last")

    Call ``fit`` in a function that is decorated with ``ttp.ttp_to_persist``. The Trainer's list of callbacks is
    reordered so that this callback is the first: it reports an error before other callbacks react to the error.

    Args:
        save_dir: see ``ttp.wrap_optimizer``.
        extra_state: objects in addition to those of Lightning; see ``ttp.wrap_optimizer``.
        settings: ``undo``, ``buddy`` (if a shard is on one rank only); see ``ttp.wrap_optimizer``.
    """

    def __init__(self, save_dir: str | Path = "checkpoints", *, extra_state: Any = None, **settings: Any) -> None:
        self._save_dir, self._extra, self._settings = save_dir, extra_state, settings
        self._ends_with_batch = False
        self._before = self._steps_before = 0  # finished versions, and steps, at the beginning of the batch
        self._handler: Any = None
        self._state: LightningState | None = None

    # ------------------------------------------------------------------------------------------------------ hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check whether this training can be protected.

        Raises:
            ConfigError: it cannot be protected; the message says why.
        """
        files = trainer.strategy.checkpoint_io
        files = getattr(files, "checkpoint_io", None) or files  # an AsyncCheckpointIO wraps another one
        if isinstance(files, TtpCheckpointIO):
            files.restored_by_callback = stage == "fit"
            _ask_first(files, trainer.strategy)
        if stage != "fit":
            return
        if isinstance(files, TtpCheckpointIO) and Path(files.save_dir) != Path(self._save_dir):
            raise ConfigError(
                f"TtpCallback({str(self._save_dir)!r}) and TtpCheckpointIO({files.save_dir!r}) must have one directory"
            )
        _refuse(trainer)
        environment = cluster_environment(trainer)
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            environment.auto_requeue = False
            log.warning("Lightning's own requeueing of SLURM jobs was switched off: requeue the job on exit code 75")
        trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self), _Last(self)]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the job and restore."""
        _refuse_file(trainer.ckpt_path)
        begins_once("Lightning")
        by_hand, copies = not pl_module.automatic_optimization, bool(self._settings.get("buddy"))
        self._ends_with_batch = copies or (by_hand and len(trainer.optimizers) > 1)  # buddies copy at its end
        self._state = state = LightningState(trainer)
        api.wrap_optimizer(
            list(trainer.optimizers),
            model=trainer.strategy.model,
            scheduler=[each.scheduler for each in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            save_dir=self._save_dir,
            extra_state={_OWN_NAME: state, **by_name(self._extra)},
            **self._settings,
        )
        self._handler = signal.getsignal(signal.SIGTERM) if session.current().processor is not None else None
        version = api.restore()
        state.agree(version)
        _adapter().settled()  # captures the agreed state, in case this rank is lost before its first update
        state.apply()
        if self._ends_with_batch:
            api.step_done()  # tells ttp that only calls of step_done() end versions

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reinstall ttp's SIGTERM handler: Lightning's own handler communicates with other ranks."""
        # Outside of the main thread, where Ray Train calls ``fit``, neither of them installs one.
        if self._handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the numbers of finished versions and steps at the beginning of the batch."""
        self._before, self._steps_before = session.current().version, trainer.global_step

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report the exception and wait for the rescue, before Lightning moves the model off its device."""
        if isinstance(exception, Exception):
            session.current().raised(exception)

    def over(self, trainer: Trainer) -> None:
        """End the version, or capture its state again, after all callbacks have seen the end of the batch.

        Raises:
            UsageError: the optimizer has made several versions in the batch.
        """
        if self._ends_with_batch and trainer.global_step > self._steps_before:
            self.state.whole = True
            api.step_done()
            self.state.whole = False
            return
        made = session.current().version - self._before
        if made > 1:
            raise UsageError(
                f"the optimizer stepped {made} times in one training_step(), and a job cannot resume in the middle of "
                "a batch: make one step per batch, with smaller batches if needed"
            )
        if made and self._state is not None:
            self._state.whole = True
            _adapter().settled()
            self._state.whole = False

    @property
    def state(self) -> LightningState:
        """The state of the running ``fit``."""
        assert self._state is not None
        return self._state


class _Last(Callback):
    """The last callback of the Trainer: it calls ``TtpCallback`` and its state after all other callbacks."""

    def __init__(self, first: TtpCallback) -> None:
        self._first = first

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first.state.reenter()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first.state.epoch_begins()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._first.state.begun()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._first.over(trainer)


def _ask_first(files: TtpCheckpointIO, strategy: Any) -> None:
    """Make the strategy load ``ttp://`` paths with ``files``: sharding strategies read checkpoints themselves."""
    theirs = strategy.load_checkpoint

    def load_checkpoint(path: Any, *args: Any, **kwargs: Any) -> Any:
        return (files.load_checkpoint if str(path).startswith("ttp:") else theirs)(path, *args, **kwargs)

    strategy.load_checkpoint = load_checkpoint


def _refuse(trainer: Trainer) -> None:
    if not isinstance(trainer, Trainer):
        raise ConfigError(
            f"ttp.lightning works with the classes of lightning.pytorch, and this Trainer is one of "
            f"{type(trainer).__module__.partition('.')[0]}: import lightning.pytorch in its place"
        )
    if not isinstance(trainer.strategy, _STRATEGIES):
        names = ", ".join(each.__name__ for each in _STRATEGIES)
        raise ConfigError(
            f"ttp.lightning supports the strategies {names}, and not {type(trainer.strategy).__name__}: use one of "
            "these, or ttp.wrap_optimizer() in your own loop"
        )
    for callback in trainer.callbacks:
        why = "saves its state in on_save_checkpoint(), which needs a whole checkpoint of Lightning each time"
        if isinstance(callback, StochasticWeightAveraging):
            why = "makes another LR scheduler in mid-run, which ttp does not save"
        elif not is_overridden("on_save_checkpoint", callback, Callback):
            continue
        raise ConfigError(
            f"{type(callback).__name__} {why}: implement state_dict() and load_state_dict() instead. Give an average "
            "of the weights as extra_state= of TtpCallback"
        )


def _refuse_file(path: Any) -> None:
    if path is not None and str(path) != LAST:
        raise ConfigError(
            f"fit(ckpt_path={str(path)!r}): each restart of the job would begin there again. Use ckpt_path={LAST!r}, "
            "and load initial weights before fit()"
        )


def _adapter() -> TorchAdapter:
    adapter = session.current().adapter
    assert isinstance(adapter, TorchAdapter)
    return adapter
