"""Warns of loops in which ranks wait for each other where they hold no whole version, so that nothing can be saved."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from ttp.adapters.torch.sharding.names import parameters_of

log = logging.getLogger("ttp.adapters.torch")

_STEPS_THAT_COMMUNICATE = 3
"""Number of first steps, all with communication, that show that it is the optimizer's, not that of another thread."""
_FIRST_VERSIONS = 5
"""Number of versions in which one collective behind the step is the loop's. Later another thread may save a file."""


def told_of_waiting(optimizers: Sequence[Optimizer], undo: str | None) -> list[str]:
    """Return a note if the ``step()`` of an optimizer waits for gradients of other ranks, as Horovod's does."""
    waits = [type(each).__name__ for each in optimizers if callable(getattr(each, "skip_synchronize", None))]
    if not waits or undo is not None:
        return []
    return [
        f"{waits[0]}.step() waits for the gradients of other ranks, unless the loop has called its synchronize(). A "
        "rank that waits there for a dead one is in mid-update, so nothing can be saved. Call optimizer.synchronize() "
        "after backward() and make the step within optimizer.skip_synchronize(), or give wrap_optimizer() "
        'undo="preimage"'
    ]


def _is_first_of_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 0


def warn_of_unheard(optimizer: Optimizer, given: Iterable[Any]) -> None:
    """Warn, on rank 0 of several, if there are gradients at a first step before which no backward pass was seen.

    A loop of torch.func may hand them to the step: what is ``given`` to it, and is no closure, is taken for gradients.
    """
    gradients = chain((parameter.grad for parameter in parameters_of(optimizer)), given)
    if _is_first_of_several() and any(each is not None for each in gradients):
        log.warning(
            "optimizer.step() is called with gradients that no backward pass of autograd has made, as far as ttp sees. "
            "If a rank dies after its gradients were exchanged and before it calls optimizer.step(), its extra_state "
            "and its random streams begin anew; see docs/support.md"
        )


class CommunicationCheck:
    """Warns, on rank 0 of several, of a loop that communicates in a step, or from its last step to ``step_done()``.

    torch counts the collectives of each process group. Those in a step are compared in the first steps only.
    """

    def __init__(self) -> None:
        self._versions = self._communicated = 0
        self._told = False
        self._counts: list[int] = []
        self._before_step: list[int] = []
        self._steps: dict[str, int] = {}

    def step_begins(self, kind: str) -> None:
        """Note that an optimizer of this class begins a step without a closure."""
        looks = 0 <= self._steps.get(kind, 0) < _STEPS_THAT_COMMUNICATE and _is_first_of_several()
        self._before_step = _collectives() if looks else []

    def step_ended(self, kind: str) -> None:
        """Warn once if the first steps of an optimizer have communicated."""
        counts, self._before_step = self._before_step, []
        if counts:
            self._steps[kind] = seen = -1 if counts == _collectives() else self._steps.get(kind, 0) + 1
            if seen == _STEPS_THAT_COMMUNICATE:
                log.warning(
                    "%s.step() communicates with other ranks: if a rank is lost, those that wait for it there are in "
                    "mid-update and cannot save the last version. Reduce the gradients before the step, or give "
                    'wrap_optimizer() undo="preimage"',
                    kind,
                )

    def stepped(self, can_go_back: bool) -> None:
        """Note that a step has ended, and whether training can go back from there to the last version."""
        looks = not (self._told or can_go_back) and _is_first_of_several()
        self._counts = _collectives() if looks else []

    def version_ended(self) -> None:
        """Warn once if ranks have communicated since the last step of the version."""
        counts, self._counts = self._counts, []
        if not counts:
            return
        self._versions += 1
        self._communicated += counts != _collectives()
        if self._communicated and (self._versions <= _FIRST_VERSIONS or self._communicated > 1):
            self._told = True
            log.warning(
                "the loop communicates with other ranks between optimizer.step() and ttp.step_done(): if a rank is "
                "lost there, those that wait for it hold no whole version, and nothing can be saved (exit code 70). "
                "Communicate (evaluate) at the beginning of the next iteration, or give wrap_optimizer() "
                'undo="preimage"'
            )


def _collectives() -> list[int]:
    """Return how many collectives each process group of this process has begun; empty if a backend cannot tell."""
    groups: Any = dist.distributed_c10d._world.pg_map
    try:
        return [group._get_sequence_number_for_group() for group in list(groups)]
    except RuntimeError:
        return []
