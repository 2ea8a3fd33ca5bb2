"""The torch adapter: connects the model, the optimizers and all else given to ``wrap_optimizer`` with the processor."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttp.adapters.torch.around_update import AroundUpdate, with_marks
from ttp.adapters.torch.device.cuda import devices_of
from ttp.adapters.torch.local_state.capture import LocalCapture
from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.adapters.torch.loop.barrier import UpdateBarrier, needs_barrier
from ttp.adapters.torch.loop.between import BetweenSteps
from ttp.adapters.torch.loop.communication import told_of_waiting
from ttp.adapters.torch.loop.followers import Followers, untrained
from ttp.adapters.torch.loop.forward_hooks import ForwardHooks
from ttp.adapters.torch.loop.hooks import Attachment, gathering
from ttp.adapters.torch.loop.misuse import capturing, refuse_lazy, tell_not_restored
from ttp.adapters.torch.loop.post_step_state import PostStepState
from ttp.adapters.torch.loop.repeating import Repeating
from ttp.adapters.torch.loop.turns import Turns
from ttp.adapters.torch.loop.untouched import Untouched
from ttp.adapters.torch.loop.unwrap_optimizer import (
    combined,
    distinct,
    hides_its_step,
    is_sharded,
    members_of,
    names_of,
    owners_in,
    refuse_shared,
    schedulers_in,
    tell_forgotten,
    turn_takers,
    unwrap_optimizer,
)
from ttp.adapters.torch.restoring.kept import begin_in_first_mode
from ttp.adapters.torch.restoring.registered import Restoring
from ttp.adapters.torch.saving.preimage import PreImage
from ttp.adapters.torch.saving.trial import Trial, try_before_training
from ttp.adapters.torch.saving.unsaved import refuse_schedules, tell_strange_schedules
from ttp.adapters.torch.sharding.data_parallel import LayoutWatch, ddps_of, hook_refusal
from ttp.adapters.torch.sharding.exchange import connected, gather_or_refuse, refuse_everywhere
from ttp.adapters.torch.sharding.names import ModelNames, parameters_of
from ttp.adapters.torch.sharding.sharding import Sharding, TrainingObjects, sharding_of
from ttp.adapters.torch.source import TorchSource
from ttp.core.layout import Layout, Rank
from ttp.errors import ConfigError, UsageError
from ttp.processor.continuing import current
from ttp.store.catalog import newest_name
from ttp.store.room import Room

if TYPE_CHECKING:
    from ttp.processor.processor import Processor

log = logging.getLogger("ttp.adapters.torch")


class TorchAdapter(Restoring):
    """The adapter for torch; see ``ttp.session.Adapter`` for the contract.

    Args:
        optimizer: the optimizer that updates the parameters of ``model``, or a list of several.
        model: the model; it may be wrapped, for example in DistributedDataParallel.
        scheduler: the LR scheduler, or None, or a list of them.
        extra_state: see ``ttp.wrap_optimizer``.
        scaler: a GradScaler, or None.
        undo: ``"preimage"`` or None; see ``ttp.wrap_optimizer``.
        layout: the replica groups as the user gives them; None: find them from the model and the optimizer.
        shard_of: returns the shard of a parameter in ``layout``, given its name; None: every rank holds one shard.
        buddy: see ``ttp.wrap_optimizer``.

    Raises:
        ConfigError: the parameters of an optimizer are not in the model, are in two optimizers, or have no shape yet;
            or an optimizer that shards its state is given together with others.
        UsageError: there is no optimizer, or an extra state cannot be stored.
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        model: nn.Module,
        scheduler: Any,
        extra_state: Any,
        scaler: Any,
        undo: str | None = None,
        layout: Layout | None = None,
        shard_of: Callable[[str], str] | None = None,
        buddy: bool = False,
    ) -> None:
        refuse_lazy(model)
        survivor = current()
        begin_in_first_mode(model, again=survivor is not None and survivor.clock.runs)
        self._given = distinct(optimizer)
        self._optimizer = combined(owners_in(self._given))
        self._model, self._schedulers, self._scaler = model, schedulers_in(scheduler), scaler
        self._undo, self._layout, self._shard_of, self._buddy = undo, layout, shard_of, buddy
        self._sharding: Sharding | None = None
        self._extra = ExtraState(extra_state)
        self.capture = LocalCapture(model, self._extra)
        """Captures the state that only this rank has."""
        self._names = ModelNames(model, self._optimizer)
        refuse_shared(members_of(self._optimizer), self._names)
        tell_forgotten(self._optimizer, self._names)
        owned = [*parameters_of(self._optimizer)]
        averages = [t for module in self._extra.modules.values() for t in (*module.parameters(), *module.buffers())]
        devices = devices_of([*model.parameters(), *model.buffers(), *owned, *averages])
        self.source = TorchSource(model, self._names, self._optimizer, self.capture, self._extra, devices)
        self._attachment: Attachment | None = None
        self._hooks = self.source.hooks
        self._processor: Processor | None = None
        self._forwards = ForwardHooks(model)
        self._followers: Followers | None = None
        self._following: dict[str, Tensor] = {}  # parameters that no optimizer trains and pre-images copy
        self.source.may_follow = lambda: self._followers is not None and not self._followers.all_small
        self._barrier: UpdateBarrier | None = None
        self._post_step: PostStepState | None = None
        self._resumed = False
        self.repeating: Repeating | None = None
        """Tracks the calls of the function that ``ttp.one_step`` decorates; None before ``attach``."""

    def layout(self, world_size: int) -> Layout:
        """Find the replica groups from the model and the optimizer. Collective: all ranks call it at the same point.

        Args:
            world_size: number of ranks of the job.

        Raises:
            ConfigError, UsageError: the state of some rank could not be saved; all ranks raise the same error.
        """
        if connected(world_size):
            gather_or_refuse(self._try)
        else:
            self._try()
        return self.sharding(world_size).layout

    def _try(self) -> bytes:
        """Raise an error if the state of this rank could not be saved; see ``saving.trial``. Returns no bytes."""
        refuse_schedules(self._given, self._schedulers)
        tell_strange_schedules(self._given, self._schedulers)
        try_before_training(self.source.everything(), self._model, self._names, self.capture.skipped)
        if why := hook_refusal(ddps_of(self._model)):
            raise ConfigError(why)
        return b""

    def refused(self, problem: ConfigError | UsageError, world_size: int) -> None:
        """Tell the other ranks, which wait in ``layout``, that this rank cannot be protected.

        Args:
            problem: the reason; it is raised on all ranks.
            world_size: number of ranks of the job.
        """
        refuse_everywhere(problem, world_size)

    def sharding(self, world_size: int) -> Sharding:
        """Return how the state is sharded over the ranks. The first call is collective: all ranks make it together.

        Args:
            world_size: number of ranks of the job.

        Raises:
            ConfigError: the sharding is not recognised, or cannot be saved; the text says what to do.
        """
        if self._sharding is None:
            modules = self._extra.modules
            given = self._layout, self._shard_of, self._buddy
            parts = TrainingObjects(self._model, self._optimizer, self._names, world_size, modules, *given)
            self._sharding = sharding_of(parts)
        return self._sharding

    def attach(self, processor: Processor) -> None:
        """Register hooks on optimizer and model, and report updates to ``processor`` from now on."""
        self._processor, source, gate = processor, self.source, processor.gate
        sharding = self.sharding(processor.env.world_size)
        if processor.env.world_size > 1:
            for note in (*self._extra.notes(), *told_of_waiting(self._given, self._undo)):
                log.warning("%s", note)
        ddps = ddps_of(self._model)
        self._forwards = ForwardHooks(self._model, ddps)
        buckets = source.buckets = LayoutWatch(ddps, self._names)
        self._hooks.callback(buckets.close)
        post_step = self._post_step = source.post_step = PostStepState(
            members_of(self._optimizer),
            scheduler=self._schedulers,
            scaler=self._scaler,
            averages=bool(self._extra.modules),
            runtimes=source.runtimes,
        )
        self._trial = self._make_trial(processor, sharding, buckets)
        source.exchanges = is_sharded(self._optimizer)
        if self._undo is not None:
            source.preimage = self._make_preimage(unwrap_optimizer(self._optimizer))
        self._barrier = self._make_barrier(processor)
        source.watch_swaps(sharding)
        turns, takers = self._make_turns(sharding, post_step)
        self._follow(processor, turns)
        calls = self._make_around(processor, turns, takers, buckets).calls()
        attachment = self._attachment = Attachment(
            takers,
            self._model,
            processor,
            self.capture,
            post_step=post_step,
            turns=turns,
            untouched=self._make_untouched(),
            fence=source.finished,
            version=partial(attrgetter("version"), gate),  # without a call of Python, as it runs several times a step
            ddps=ddps,
            forwards=self._forwards,
            calls=with_marks(calls, source, gate) if source.on_device else calls,
        )
        self._hooks.callback(attachment)
        self._trial.regrouped = lambda: attachment.hook_gradients(self._model, buckets.ddps)
        if self._names.extra_states:
            self._hooks.callback(self._forwards.register(self._forward_begins))
        source.connect(processor, attachment, sharding)
        scaler, layout = self._scaler, processor.layout
        self.repeating = Repeating(self._model, self._given, scaler, self.capture, self._extra, layout, ddps)
        self.capture.capture(gate.version, final=True)

    def _make_turns(self, sharding: Sharding, post_step: PostStepState) -> tuple[Turns, list[list[Optimizer]]]:
        """Return what decides where versions end, and the optimizers of each turn."""
        takers = [taker for each in self._given for taker in turn_takers(each)]
        if is_sharded(self._optimizer):
            takers = [list(sharding.stepping)]
        hidden = next((name for each in self._given if (name := hides_its_step(each))), "")
        scaled = self._scaler is not None
        return Turns(names_of(takers), skipped=post_step.skipped, scaled=scaled, hidden=hidden), takers

    def _make_untouched(self) -> Untouched | None:
        if gathering(self._model):
            return None
        untouched = Untouched(self._given, self.source.on_host)
        self.source.habits = untouched.habits
        self._untouched = weakref.ref(untouched)  # it ends with the first updates, and has the parameters of then
        return untouched

    def _follow(self, processor: Processor, turns: Turns) -> None:
        """Compare, from now on, parameters that no optimizer trains."""
        self._followers = Followers(
            self._model,
            self._forwards,
            {} if gathering(self._model) else untrained(self._names.parameters, [self._optimizer, *self._given]),
            on_host=self.source.on_host,
            found=self._followed,
            beside=self._extra.tensors_in_place,
            tells=lambda: not (processor.env.rank or turns.by_hand),
        )
        self._hooks.callback(self._followers.close)
        self._followed(self._followers.small)

    def _forward_begins(self, module: nn.Module, _args: Any) -> None:
        """Capture the extra states of modules before the first forward pass after a version changes them."""
        if torch.compiler.is_compiling() or self._processor is None or capturing():
            return  # a CUDA graph that is being captured may not wait for the device
        version, states = self._processor.gate.version, self.source.module_states
        if module.training and torch.is_grad_enabled() and states.values(version) is None:
            states.take(version)

    def _make_preimage(self, optimizer: Optimizer, *, reserve: bool = True) -> PreImage:
        modules, runtimes = self._extra.modules.values(), self.source.runtimes
        return PreImage(optimizer, modules, runtimes, followers=self._following.values(), reserve=reserve)

    def _followed(self, names: Sequence[str], after: bool = False) -> None:
        """Let pre-images copy parameters that the program changes itself; ``after``: it does so after an update."""
        self._following.update({name: self._names.parameters[name] for name in names})
        if after and self._post_step is not None:
            self._post_step.followed()

    def _make_trial(self, processor: Processor, sharding: Sharding, buckets: LayoutWatch) -> Trial:
        trial = Trial(members_of(self._optimizer), self._model, self._names, self.source.everything)
        trial.problems = partial(self._look_again, buckets)
        trial.scheduled = bool(self._schedulers or self._extra.objects)
        trial.fresh = lambda: processor.gate.version == 0
        if not processor.env.rank:
            with contextlib.suppress(OSError):
                room, patience_s = Room.of(processor.save_dir), processor.config.rescue_patience_s
                trial.tell_size = partial(room.tell_needs, len(processor.layout.groups), patience_s)
                trial.begins_fresh = partial(tell_not_restored, processor.save_dir, newest_name(processor.save_dir))
        mine = processor.layout.shards_of(Rank(processor.env.rank))
        trial.shards = max(1, len(mine))
        if not is_sharded(self._optimizer):  # a sharding optimizer assigns new parameters to ranks itself
            trial.saved = lambda: {name for shard in mine for name in sharding.parameters_of(shard)}
        return trial

    def _look_again(self, buckets: LayoutWatch) -> list[str]:
        """Find what was wrapped around the model since ``attach``. Returns why saves are impossible, in sentences."""
        problems = buckets.look_again(self._model, resumed=self._resumed)
        self._forwards.wrapped(buckets.ddps)
        return problems

    def _make_around(
        self, processor: Processor, turns: Turns, takers: Sequence[Sequence[Optimizer]], buckets: LayoutWatch
    ) -> AroundUpdate:
        source = self.source
        owners = [[owner for owner in members_of(self._optimizer) if owner in owners_in(taker)] for taker in takers]
        if is_sharded(self._optimizer):
            owners, turns.communication = [[]], None  # copies would lack the weights that ranks exchange after the step
        if source.preimage is not None:
            turns.communication = None
        make = partial(self._make_preimage, self._optimizer, reserve=False)
        between = source.between = BetweenSteps(turns, owners, len(processor.layout.groups) > 1, make)
        around = self._around = AroundUpdate(
            source,
            model=self._model,
            optimizers=self._given,
            extra=self._extra,
            trial=self._trial,
            buckets=buckets,
            between=between,
            followers=self._followers,
            barrier=self._barrier,
            compared=(self._names, self._optimizer) if self._layout is None else None,
        )
        self.capture.on_changed = around.late.changed
        return around

    def _make_barrier(self, processor: Processor) -> UpdateBarrier | None:
        if not needs_barrier(processor.layout, self._undo):
            return None
        source = self.source
        barrier = UpdateBarrier(processor.env.world_size, source.runtimes, processor)
        if processor.config.stream_barrier and source.on_device:
            source.stream_barrier = barrier.let_device_wait(source.runtime_for_barrier, self._why_wait)
        return barrier

    def _why_wait(self) -> str:
        """Return why the host, not the device, has to wait in the barrier before an update; empty: the device may."""
        if self._processor is not None and self._processor.survivor is not None:
            return "ranks may outlive a failure of another (TTP_CONTINUITY=keep), so no update may wait on a collective"
        if len(self.source.runtimes) > 1 or self.source.has_state_on_host():
            return "the state is on several devices, or partly on the host"
        if len(self._given) > 1 or is_sharded(self._optimizer):
            return "an update is made by several optimizers, or by one that exchanges weights between ranks"
        return ""

    def detach(self) -> None:
        """Remove the hooks; ``attach`` registers them again."""
        self.forget()
        if self._barrier is not None:
            self._barrier.close()
            self._barrier = None

    def forget(self) -> None:
        """Remove the hooks in a forked child, which is not the rank. Takes no lock: its holder may be gone."""
        self._hooks.close()
        self._attachment = None

    def step_done(self) -> None:
        """See ``ttp.step_done``."""
        if self._attachment is not None:
            self._attachment.step_done()

    def settled(self) -> None:
        """Note that scheduler, scaler and averages have followed the last update; for frameworks that tell when."""
        if self._attachment is not None:
            self._attachment.settled()
        if self._followers is not None:
            self._followers.captured()
