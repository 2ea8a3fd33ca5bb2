"""What the torch adapter does before and after each update, on the training thread."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.adapters.torch.loop.barrier import UpdateBarrier
from ttp.adapters.torch.loop.between import BetweenSteps
from ttp.adapters.torch.loop.followers import Followers
from ttp.adapters.torch.loop.hooks import Calls
from ttp.adapters.torch.loop.late_changes import LateChanges
from ttp.adapters.torch.loop.swapped import Swapped
from ttp.adapters.torch.saving.trial import Trial
from ttp.adapters.torch.saving.unsaved import (
    Numbers,
    attributes_of,
    counts_of,
    numbers_of,
    refuse_unsaved,
    regular,
    tell_changed,
    tell_counts,
    tell_switched,
)
from ttp.adapters.torch.sharding.data_parallel import LayoutWatch
from ttp.adapters.torch.sharding.exchange import connected
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.adapters.torch.sharding.unconnected import different_weights, held_state
from ttp.adapters.torch.source import TorchSource
from ttp.core.layout import Version
from ttp.processor.continuing import current
from ttp.processor.gate.gate import Gate

log = logging.getLogger("ttp.adapters.torch")


@dataclass(slots=True)
class AroundUpdate:
    """Calls the parts that follow a loop: most of them compare only the first updates. Raises what they raise.

    Args:
        source: the source of the registered objects.
        model: the registered model.
        optimizers: the registered optimizers, as they were given.
        extra: the user's objects of ``extra_state``.
        trial: tries to save the state that the first update has made.
        buckets: watches the buckets of DistributedDataParallel.
        between: makes copies between the steps of one version.
        followers: compares parameters that no optimizer trains; None once the first updates are over.
        barrier: makes all ranks begin an update together; None: the layout needs no barrier.
        compared: the names of the model's tensors and the registered optimizers as one, if ranks count as copies only
            because nothing says otherwise: their weights are compared after an update. None: the user gave the layout.
    """

    source: TorchSource
    model: nn.Module
    optimizers: Sequence[Optimizer]
    extra: ExtraState
    trial: Trial
    buckets: LayoutWatch
    between: BetweenSteps
    followers: Followers | None
    barrier: UpdateBarrier | None
    compared: tuple[ModelNames, Optimizer] | None
    _numbers: tuple[Numbers, ...] | None = None  # of optimizers and modules, after the first update; later empty
    _attributes: list[Numbers] = field(init=False)  # of modules, before the first forward pass and after the update
    late: LateChanges = field(init=False)
    """Finds extra states that change after their version has ended."""

    def __post_init__(self) -> None:
        self.late = LateChanges(self.extra, self.optimizers, self.between.turns)
        self._attributes = [attributes_of(self.model, self.extra.objects)]

    def calls(self) -> Calls:
        """Return the functions to call around an update."""
        calls = Calls(self._before_gate, after_update=self._updated, after_end=self._after_end)
        if (s := self.source.swapped) is not None:
            calls = calls._replace(before_forward=s.entered, before_backward=s.used, evaluating=s.evaluates)
        if (preimage := self.source.preimage) is not None:
            return calls._replace(before_update=preimage.before_update, before_turn=lambda *_: not preimage.broken)
        return calls._replace(before_turn=self.between.before_turn)

    def _before_gate(self) -> None:
        self.trial.before_update()
        if (swapped := self.source.swapped) is not None:
            swapped.used()
        if self.followers is not None:
            self.followers.at_gate()
        survivor = self.source.processor.survivor
        if survivor is not None:
            survivor.update_begins()  # now, as peers may make this update while this rank waits, alone with its shards
        if self.barrier is not None:
            self.barrier.wait()
        elif survivor is not None:  # no update is queued behind a collective that may have to be aborted
            for runtime in self.source.runtimes:
                runtime.event(side=False).synchronize()

    def _updated(self) -> None:
        if (swapped := self.source.swapped) is not None and swapped.updated():
            self._compare(swapped)
        if not self.between.turns.simple:
            self.between.after_update()
        if self.buckets.unsettled:
            self.buckets.update_finished()
        if self.trial.due:
            self.trial.update_finished()
        if self.followers is not None:
            declared = self.between.turns.by_hand and not self.source.processor.env.rank
            if not self.followers.updated(declared):
                self.followers = None
        if self.barrier is not None:
            self.barrier.updated()

    def _compare(self, swapped: Swapped) -> None:
        """Compare the weights of the ranks, on another thread."""
        env, version = self.source.processor.env, Version(self.source.processor.gate.version + 1)
        if self.compared is not None and len(self.source.processor.layout.groups) == 1 and connected(env.world_size):
            names, optimizer = self.compared
            reduced = self.buckets.reduced
            state = held_state(optimizer, env.world_size, reduced, self.extra.objects)
            self.trial.start(
                lambda: different_weights(swapped.early(), names, state, reduced, env, version),
                waits=not self.source.on_device,  # an update may not wait for a device
            )

    def _after_end(self) -> None:
        self.late.ended += 1
        if self.source.exchanges:
            self.source.processor.gate.stay_redone()  # the optimizer's exchange could hang on a dead rank
        if self._numbers is None:
            self._numbers = self._numbers_now()
            self._attributes.append(attributes_of(self.model, self.extra.objects))
            if (survivor := current()) is not None:
                survivor.why_no_loop()  # the loop has begun: stop recording collectives (see ``regroup.Groups``)
            refuse_unsaved(self.optimizers, self.extra.objects)
        elif self._numbers:
            (numbers, counts), (later_numbers, later_counts) = self._numbers, self._numbers_now()
            tell_changed(numbers, later_numbers)
            start, first = self._attributes
            second = attributes_of(self.model, self.extra.objects)
            tell_counts(counts, later_counts, regular(start, first, second))
            tell_switched(start, second)
            self._numbers, self._attributes = (), []
            self.extra.refuse_late()

    def _numbers_now(self) -> tuple[Numbers, Numbers]:
        return numbers_of(self.optimizers, self.extra.objects), counts_of(self.model, self.extra.objects)


def with_marks(calls: Calls, source: TorchSource, gate: Gate) -> Calls:
    """Return ``calls`` that also mark in the queues of devices where the gradient is reduced, and the update begins.

    They also keep the numbers that the optimizer has on the host, because the host may be ahead of its devices.
    """

    def before_gate() -> None:
        source.reduced.record(gate.version + 1)
        calls.before_gate()

    def before_update(version: int, fresh: bool) -> None:
        source.begun.record(version + 1)
        calls.before_update(version, fresh)

    def after_update() -> None:
        try:
            source.host_values.note(gate.version + 1)
        except Exception as problem:  # a save of this version will raise and say so
            log.debug("the numbers that the optimizer has on the host were not copied: %s", problem)
        calls.after_update()

    return calls._replace(before_gate=before_gate, before_update=before_update, after_update=after_update)
