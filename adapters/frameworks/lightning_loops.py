"""Lightning's loops: where they are, and how to go on from there.

Lightning itself resumes from a checkpoint in the middle of an epoch with what it has (the validation that was due, the
end of the epoch, the order of the data may be lost). Here the loops are put where they were, and what follows is called
in the order in which they would have.

**All that is used of Lightning's private parts stands in this file**, as seen in 2.5 and 2.6: ``FitLoop._data_fetcher``
(and ``_combined_loader``); ``_Loop._restarting``; ``_EvaluationLoop._restart_stage``; ``_set_sampler_epoch``;
``_TrainingEpochLoop._should_check_val_fx``; ``Trainer._accelerator_connector``; the keys of ``FitLoop.state_dict()``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch

from ttp.adapters.torch.local_state.rng import RngState
from ttp.errors import UsageError

_BATCHES = "epoch_loop.batch_progress"
_AUTOMATIC = "epoch_loop.automatic_optimization.optim_progress"
_MANUAL = "epoch_loop.manual_optimization.optim_step_progress"


@dataclass(frozen=True)
class EpochStart:
    """What the order of the data follows from: loaders draw from it when an epoch begins.

    Args:
        streams: the global random streams, for ``RngState``.
        generators: states of the generators that loaders have of their own.
    """

    streams: bytes
    generators: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls, generators: Iterable[torch.Generator]) -> EpochStart:
        """Of this moment."""
        return cls(b"".join(RngState().capture()), tuple(each.get_state() for each in generators))

    def state_dict(self) -> dict[str, Any]:
        """The arguments of this class."""
        return {"streams": self.streams, "generators": self.generators}

    def back(self, generators: Iterable[torch.Generator] = ()) -> None:
        """Draw again what was drawn from here on."""
        for generator, state in zip(generators, self.generators, strict=False):
            generator.set_state(state)
        RngState().restore(self.streams)


class Loops:
    """Those of one ``fit``.

    Args:
        trainer: whose.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._fit = trainer, trainer.fit_loop
        self._epoch, self._validation = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop
        self._streams = b""
        self._max_steps = -1

    def at_end_of_batch(self) -> dict[str, Any]:
        """Where they are when the batch that runs is over."""
        found: dict[str, Any] = self._fit.state_dict()
        batches = found[_BATCHES]
        for count in (batches["total"], batches["current"]):
            count.update(started=count["ready"], processed=count["ready"], completed=count["ready"])
        steps, by_hand = found[_AUTOMATIC]["optimizer"]["step"], found[_MANUAL]
        for count in (steps["total"], steps["current"], by_hand["total"], by_hand["current"]):
            count["completed"] = count["ready"]
        return found

    def generators(self) -> list[torch.Generator]:
        """Those that loaders of the training data have of their own."""
        found: dict[int, torch.Generator] = {}
        for loader in self._loaders():
            for owner in (loader, getattr(loader, "sampler", None)):
                if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                    found[id(generator)] = generator
        return list(found.values())

    def load(self, state: dict[str, Any]) -> None:
        """Put them there. The loaders are made next; what they draw is put back by ``reenter``."""
        self._streams = b"".join(RngState().capture())
        self._fit.load_state_dict(state)
        self._max_steps, self._epoch.max_steps = self._epoch.max_steps, -1  # else fit() may return before it is ended

    def reenter(self, should_stop: bool, start: EpochStart) -> None:
        """Go on behind the batch that was the last one. Called in ``on_train_start``."""
        trainer, fetcher = self._trainer, self._fit._data_fetcher
        self._epoch.max_steps, trainer.should_stop = self._max_steps, should_stop
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
        self._epoch._restarting = True  # it keeps its counts

    def _skip(self, fetcher: Any, count: int, start: EpochStart) -> None:
        """Let the loaders be where they were: those that do not know it by themselves are read up to there."""
        loaders = self._loaders()
        stateful = [hasattr(each, "state_dict") and hasattr(each, "load_state_dict") for each in loaders]
        if all(stateful):
            return
        if any(stateful):
            raise UsageError("some loaders have state_dict() and others have not: let all of them have it, or none")
        epoch = self._fit.epoch_progress.current.processed
        for each in loaders:
            _set_sampler_epoch(each, epoch)
        if (
            epoch == 0
        ):  # its iterators are made with the loaders, before the epoch begins; those of later ones after that
            iter(fetcher)
            start.back(self.generators())
        else:
            start.back(self.generators())
            iter(fetcher)
        for _ in range(count):
            next(fetcher)
        fetcher.fetched -= count  # Lightning adds it again

    def _loaders(self) -> list[Any]:
        combined = self._fit._combined_loader
        return [] if combined is None else list(combined.flattened)


def cluster_environment(trainer: Any) -> Any:
    """What has started the ranks, as Lightning sees it."""
    return trainer._accelerator_connector.cluster_environment
