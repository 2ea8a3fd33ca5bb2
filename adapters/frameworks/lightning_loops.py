"""Captures the positions of Lightning's loops, and makes the loops continue from these positions.

When Lightning itself resumes in the middle of an epoch, a due validation, the end of the epoch and the order of the
data may be lost. This module sets the loops to their saved positions, and then makes the calls that follow in the order
in which the loops would have made them.

**All uses of Lightning's private parts are in this file**, as seen in 2.5 and 2.6: ``FitLoop._data_fetcher``
(and ``_combined_loader``); ``_Loop._restarting``; ``_EvaluationLoop._restart_stage``; ``_set_sampler_epoch``;
``_TrainingEpochLoop._should_check_val_fx``; ``Trainer._accelerator_connector``; the keys of ``FitLoop.state_dict()``;
``BaseFinetuning._restarting``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from torch.nn.parallel import DistributedDataParallel

from ttp.adapters.torch.local_state.rng import RngState
from ttp.errors import UsageError

_BATCHES = "epoch_loop.batch_progress"
_AUTOMATIC = "epoch_loop.automatic_optimization.optim_progress"
_MANUAL = "epoch_loop.manual_optimization.optim_step_progress"


@dataclass(frozen=True)
class EpochStart:
    """The random streams at the beginning of an epoch. Loaders draw the order of the data from them.

    Args:
        streams: the global random streams, for ``RngState``.
        generators: states of the loaders' own generators.
    """

    streams: bytes
    generators: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls, generators: Iterable[torch.Generator]) -> EpochStart:
        """Capture the present streams."""
        return cls(b"".join(RngState().capture()), tuple(each.get_state() for each in generators))

    def state_dict(self) -> dict[str, Any]:
        """Return the arguments of this class."""
        return {"streams": self.streams, "generators": self.generators}

    def back(self, generators: Iterable[torch.Generator] = ()) -> None:
        """Set the streams to the captured ones, so that the numbers drawn since then are drawn again."""
        for generator, state in zip(generators, self.generators, strict=False):
            generator.set_state(state)
        RngState().restore(self.streams)


class Loops:
    """Reads and sets the positions of the loops of one ``fit``.

    Args:
        trainer: the trainer in ``fit``.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._fit = trainer, trainer.fit_loop
        self._epoch, self._validation = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop
        self._streams = b""
        self._max_steps = -1

    def at_end_of_batch(self) -> dict[str, Any]:
        """Return the positions that the loops will have at the end of the running batch."""
        found: dict[str, Any] = self._fit.state_dict()
        batches = found[_BATCHES]
        for count in (batches["total"], batches["current"]):
            count.update(started=count["ready"], processed=count["ready"], completed=count["ready"])
        steps, by_hand = found[_AUTOMATIC]["optimizer"]["step"], found[_MANUAL]
        for count in (steps["total"], steps["current"], by_hand["total"], by_hand["current"]):
            count["completed"] = count["ready"]
        return found

    def generators(self) -> list[torch.Generator]:
        """Return the random generators that belong to the loaders of the training data or to their samplers."""
        found: dict[int, torch.Generator] = {}
        for loader in self._loaders():
            for owner in (loader, getattr(loader, "sampler", None)):
                if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                    found[id(generator)] = generator
        return list(found.values())

    def load(self, state: dict[str, Any]) -> None:
        """Load the positions. Lightning makes the loaders next, which draws random numbers; ``reenter`` undoes that."""
        self._streams = b"".join(RngState().capture())
        for callback in self._trainer.callbacks:
            if isinstance(callback, BaseFinetuning):  # else it puts older param groups in place of the restored ones
                callback._restarting = False
        self._fit.load_state_dict(state)
        self._max_steps, self._epoch.max_steps = self._epoch.max_steps, -1  # else fit() may return before it begins
        model = self._trainer.strategy.model
        if not self._trainer.lightning_module.automatic_optimization and isinstance(model, DistributedDataParallel):
            model.require_forward_param_sync = False  # then only the first forward pass of a run broadcasts buffers

    def reenter(self, should_stop: bool, start: EpochStart) -> None:
        """Make the loops continue after the last finished batch. Call it in ``on_train_start``.

        Args:
            should_stop: the saved ``Trainer.should_stop``.
            start: the random streams at the beginning of the epoch.
        """
        trainer, fetcher = self._trainer, self._fit._data_fetcher
        self._epoch.max_steps, trainer.should_stop = self._max_steps, should_stop
        for callback in trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):  # it does its work when an epoch begins
                callback.on_train_epoch_start(trainer)
        for loop in (self._fit, self._epoch, self._validation):
            loop._restarting = False
        batches = self._epoch.batch_progress
        limited = self._max_steps != -1 and self._epoch.global_step >= self._max_steps
        ended = batches.is_last_batch or batches.current.ready >= trainer.num_training_batches or limited
        if not ended:
            self._skip(fetcher, batches.current.ready, start)
        RngState().restore(self._streams)
        if ended:
            self._epoch.on_advance_end(fetcher)
            self._epoch.on_iteration_done()
            self._fit.on_advance_end()
            self._fit.on_iteration_done()
            return
        if self._epoch._should_check_val_fx(fetcher):
            from lightning.pytorch.loops.evaluation_loop import RestartStage

            self._validation._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
        else:
            self._epoch.on_advance_end(fetcher)
        self._epoch._restarting = True  # so that the loop keeps its counts

    def _skip(self, fetcher: Any, count: int, start: EpochStart) -> None:
        """Skip ``count`` batches of loaders without a ``state_dict()``; the others have restored their position."""
        loaders = self._loaders()
        stateful = [hasattr(each, "state_dict") and hasattr(each, "load_state_dict") for each in loaders]
        if all(stateful):
            return
        if any(stateful):
            raise UsageError("some loaders have state_dict() and others do not: use stateful loaders only, or none")
        epoch = self._fit.epoch_progress.current.processed
        for each in loaders:
            _set_sampler_epoch(each, epoch)
        if epoch == 0:  # the iterators of the first epoch are made before it begins, those of later epochs after that
            iter(fetcher)
            start.back(self.generators())
        else:
            start.back(self.generators())
            iter(fetcher)
        for _ in range(count):
            next(fetcher)
        fetcher.fetched -= count  # Lightning adds the count again

    def _loaders(self) -> list[Any]:
        combined = self._fit._combined_loader
        return [] if combined is None else list(combined.flattened)


def cluster_environment(trainer: Any) -> Any:
    """Return Lightning's object for the environment (SLURM, torchrun, ...) that started the ranks."""
    return trainer._accelerator_connector.cluster_environment
