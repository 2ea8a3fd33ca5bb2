"""One torch training: model, optimizer and what goes with them, registered by ``ttp.wrap_optimizer``."""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ttp.adapters.torch.barrier import UpdateBarrier, needs_barrier
from ttp.adapters.torch.between import BetweenSteps
from ttp.adapters.torch.capture import LocalCapture, read_local_state
from ttp.adapters.torch.combined import combined, members_of, refuse_shared, without_optimizer
from ttp.adapters.torch.cuts import is_distributed
from ttp.adapters.torch.data_parallel import LayoutWatch, ddps_of, hook_refusal
from ttp.adapters.torch.device import devices_of
from ttp.adapters.torch.exchange import connected, gather_bytes, gather_or_refuse, refuse_everywhere
from ttp.adapters.torch.extra import ExtraState
from ttp.adapters.torch.hooks import Attachment, attach, gathering
from ttp.adapters.torch.inner import hides_its_step, inner_of, is_sharded, owners_of, turn_takers
from ttp.adapters.torch.names import ModelNames, module_tensors
from ttp.adapters.torch.preimage import PreImage
from ttp.adapters.torch.reader import load, read_values
from ttp.adapters.torch.restore import Restored, restore_into
from ttp.adapters.torch.sharding import Parts, Sharding, sharding_of
from ttp.adapters.torch.source import TorchSource
from ttp.adapters.torch.table import items_of
from ttp.adapters.torch.tail import Tail, listed
from ttp.adapters.torch.trial import Trial, try_before_training
from ttp.adapters.torch.turns import Turns
from ttp.adapters.torch.unsaved import refuse_detached_schedule, refuse_unsaved
from ttp.adapters.torch.untouched import Untouched
from ttp.core.agreement import agree
from ttp.core.layout import Layout, Rank, Version
from ttp.core.messages import Candidate, RestoreView
from ttp.errors import ConfigError, UsageError
from ttp.processor.local_piece import why_lost
from ttp.store.encoding import decode, encode
from ttp.store.manifest import Manifest

if TYPE_CHECKING:
    from ttp.processor.processor import Processor

log = logging.getLogger("ttp.adapters.torch")

_LISTED_MAX = 4
_POLL_S = 5e-5
"""Between two looks of a training thread that stays where it is until the world is thawed."""


class TorchAdapter:
    """See ``ttp.session.Adapter``.

    Args:
        optimizer: updates the parameters of ``model``; or a list of several.
        model: wrapped or not.
        scheduler: its LR scheduler, or None, or a list of them.
        extra_state: see ``ttp.wrap_optimizer``.
        scaler: a GradScaler, or None.
        undo: ``"preimage"`` or None; see ``ttp.wrap_optimizer``.
        layout: the replica groups, where the user says them.
        shard_of: the shard of a parameter in ``layout``, by its name; None: every rank holds one shard.
        buddy: see ``ttp.wrap_optimizer``.

    Raises:
        ConfigError: an optimizer holds parameters that the model does not name, or that another one holds too.
        UsageError: an extra state cannot be stored, or there is no optimizer.
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
        self._given = _distinct(optimizer)
        self._optimizer = combined(_owners(self._given))
        self._model, self._schedulers, self._scaler = model, _schedulers(scheduler), scaler
        self._undo, self._layout, self._shard_of, self._buddy = undo, layout, shard_of, buddy
        self._sharding: Sharding | None = None
        self._extra = ExtraState(extra_state)
        self._capture = LocalCapture(model, self._extra)
        self._names = ModelNames(model, self._optimizer)
        refuse_detached_schedule(self._given, self._schedulers)
        refuse_shared(members_of(self._optimizer), self._names)
        _tell_forgotten(without_optimizer(self._optimizer, self._names))
        owned = [p for group in self._optimizer.param_groups for p in group["params"]]
        averages = [t for module in self._extra.modules.values() for t in (*module.parameters(), *module.buffers())]
        devices = devices_of([*model.parameters(), *model.buffers(), *owned, *averages])
        self._device = devices[0] if devices else torch.device("cpu")
        self._source = TorchSource(model, self._names, self._optimizer, self._capture, self._extra, devices)
        self._attachment: Attachment | None = None
        self._processor: Processor | None = None
        self._looked = False  # at what the optimizers keep
        self._barrier: UpdateBarrier | None = None
        self._tail: Tail | None = None
        self._resumed = False

    @property
    def source(self) -> TorchSource:
        """What the processor saves from."""
        return self._source

    def layout(self, world_size: int) -> Layout:
        """The replica groups, as the objects show them. All ranks ask at the same point of their programs.

        Raises:
            ConfigError: this state, or that of another rank, could not be saved; all ranks say the same.
        """
        if connected(world_size):
            gather_or_refuse(self._try)
        else:
            self._try()
        return self.sharding(world_size).layout

    def _try(self) -> bytes:
        """See ``trial``."""
        try_before_training(self._source.everything(), self._model, self._names, self._capture.skipped)
        if why := hook_refusal(ddps_of(self._model)):
            raise ConfigError(why)
        return b""

    def refused(self, problem: ConfigError | UsageError, world_size: int) -> None:
        """This rank did not get as far as ``layout``: the others, which wait there, hear why. Raises it as they do."""
        refuse_everywhere(problem, world_size)

    def sharding(self, world_size: int) -> Sharding:
        """How the state is spread over the ranks; found out once. All ranks ask at the same point of their programs.

        Raises:
            ConfigError: it cannot be told, or cannot be saved; the text says what to do.
        """
        if self._sharding is None:
            modules = self._extra.modules
            given = self._layout, self._shard_of, self._buddy
            parts = Parts(self._model, self._optimizer, self._names, world_size, modules, *given)
            self._sharding = sharding_of(parts)
        return self._sharding

    def attach(self, processor: Processor) -> None:
        """Hook into optimizer and model; report to ``processor``."""
        self._processor = processor
        sharding = self.sharding(processor.env.world_size)
        averages = bool(self._extra.modules)
        for note in self._extra.notes() if processor.env.world_size > 1 else ():
            log.warning("%s", note)
        members = members_of(self._optimizer)
        self._tail = Tail(
            members,
            scheduler=self._schedulers,
            scaler=self._scaler,
            averages=averages,
            runtimes=self._source.runtimes if self._scaler is not None else (),
        )
        ddps = ddps_of(self._model)
        buckets = LayoutWatch(ddps, self._names)
        self._trial = trial = Trial(members, self._model, self._names, self._source.everything)
        trial.problems = lambda: buckets.look_again(self._model, resumed=self._resumed)
        if not is_sharded(self._optimizer):  # else it deals out itself what is added
            mine = processor.layout.shards_of(Rank(processor.env.rank))
            trial.saved = lambda: {name for shard in mine for name in sharding.parameters_of(shard)}
        self._source.tail, self._source.buckets = self._tail, buckets
        self._source.exchanges = is_sharded(self._optimizer)
        if self._undo is not None:
            modules = self._extra.modules.values()
            self._source.preimage = PreImage(inner_of(self._optimizer), modules, self._source.runtimes)
        barrier = self._barrier = self._make_barrier(processor)

        def before_gate() -> None:
            trial.before_update()
            if barrier is not None:
                barrier.wait()

        def after_update() -> None:
            self._updated(buckets)
            trial.update_finished()

        reporter = DeviceReporter(processor, self._source) if self._source.on_device else processor
        takers = [taker for each in self._given for taker in turn_takers(each)]
        if is_sharded(self._optimizer):
            takers = [list(sharding.stepping)]
        hidden = next((name for each in self._given if (name := hides_its_step(each))), "")
        turns = Turns(_names(takers), skipped=self._tail.skipped, scaled=self._scaler is not None, hidden=hidden)
        between = self._between(turns, takers, len(processor.layout.groups) > 1)
        self._attachment = attach(
            takers,
            self._model,
            reporter,
            self._capture,
            tail=self._tail,
            turns=turns,
            untouched=None if gathering(self._model) else Untouched(self._given, self._source.on_host),
            fence=self._source.finished,
            version=lambda: processor.gate.version,
            before_gate=before_gate,
            before_update=self._source.preimage.take if self._source.preimage is not None else lambda _version: None,
            before_turn=between.before_turn if self._undo is None else lambda _version, _number: None,
            after_update=after_update,
            ddps=ddps,
            after_end=self._after_end,
        )
        self._source.connect(processor, self._attachment, sharding)
        self._capture.capture(processor.gate.version, final=True)

    def _between(self, turns: Turns, takers: Sequence[Sequence[Optimizer]], whole: bool) -> BetweenSteps:
        owners = [[owner for owner in members_of(self._optimizer) if owner in _owners(taker)] for taker in takers]
        modules, runtimes = self._extra.modules.values(), self._source.runtimes
        self._source.between = BetweenSteps(
            turns, owners, whole, lambda: PreImage(self._optimizer, modules, runtimes, reserve=False)
        )
        return self._source.between

    def _updated(self, buckets: LayoutWatch) -> None:
        assert self._source.between is not None
        self._source.between.after_update()
        buckets.update_finished()

    def _after_end(self) -> None:
        if self._source.exchanges:
            self._stay_redone()
        if not self._looked:
            self._looked = True
            refuse_unsaved(self._given, self._extra.objects)

    def _stay_redone(self) -> None:
        """After an update that was made by order, do not enter an exchange with ranks that may be dead."""
        assert self._processor is not None
        gate = self._processor.gate
        while gate.redone and gate.closed:
            time.sleep(_POLL_S)

    def _make_barrier(self, processor: Processor) -> UpdateBarrier | None:
        if not needs_barrier(processor.layout, self._undo):
            return None
        return UpdateBarrier(processor.env.world_size, self._device, processor, self._gradient_final)

    def _gradient_final(self) -> None:
        assert self._processor is not None
        self._source.reduced.record(self._processor.gate.version + 1)

    @property
    def capture(self) -> LocalCapture:
        """Of what only this rank has."""
        return self._capture

    def detach(self) -> None:
        """Take the hooks away again; ``attach`` puts them back."""
        if self._attachment is not None:
            self._attachment()
            self._attachment = None
        if self._barrier is not None:
            self._barrier.close()
            self._barrier = None

    def step_done(self) -> None:
        """See ``ttp.step_done``."""
        if self._attachment is not None:
            self._attachment.step_done()

    # --------------------------------------------------------------------------------------------------- restoring

    def agree_without_controller(self, found: tuple[Candidate, ...], skipped: tuple[str, ...]) -> Candidate | str:
        """Agree through the default process group where there is one; alone otherwise."""
        mine = RestoreView(Rank(0), found, skipped)
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return agree([mine])
        return agree(_gather_views(mine))

    def load(self, checkpoint: Path, rank: int, world_size: int, *, protected: bool) -> Version:
        """Put a checkpoint that was verified into the registered objects.

        Raises:
            CheckpointError: it belongs to another model, or cannot be read. Nothing has been changed then.
        """
        manifest = Manifest.load(checkpoint)
        elsewhere = self.sharding(world_size).elsewhere() if connected(world_size) else ()
        restored = restore_into(
            checkpoint,
            manifest,
            model=self._model,
            optimizer=self._optimizer,
            scheduler=self._schedulers,
            scaler=self._scaler,
            elsewhere=elsewhere,
        )
        self._resumed = True
        self._load_modules(checkpoint, manifest)
        if manifest.extra.get("disputed"):
            log.warning(
                "replicas of %s differed when version %s was saved; nobody could tell which was right: watch the loss",
                ", ".join(map(str, manifest.extra["disputed"])),
                manifest.version,
            )
        for note in self._load_local(checkpoint, manifest, restored, rank, world_size):
            log.warning("restored version %s, but %s", restored.version, note)
        if self._tail is not None:
            self._tail.restored(restored.version)
        for fence in (self._source.begun, self._source.finished):
            fence.record(restored.version)
        self._source.forget_images()
        if protected:
            self._capture.capture(restored.version, final=True)
        return Version(restored.version)

    def _load_modules(self, checkpoint: Path, manifest: Manifest) -> None:
        """Averages of the weights and other modules given as extra state."""
        items = [item for item in items_of(manifest.pieces) if item.path[0] == "extra"]
        values = read_values(checkpoint, items).get("extra", {})
        for name, module in self._extra.modules.items():
            if name in values and any(map(is_distributed, module.parameters())):
                load(
                    checkpoint, manifest, {"extra": {name: {k: t.detach() for k, t in module_tensors(module).items()}}}
                )
            elif name in values:
                module.load_state_dict(values[name])
            else:
                log.warning("extra_state[%r] was not saved: it begins anew", name)

    def _load_local(
        self, checkpoint: Path, manifest: Manifest, restored: Restored, rank: int, world_size: int
    ) -> list[str]:
        """What only one rank had. In a world of another size nobody is who they were: see docs/concepts.md."""
        constant = restored.job.extra.get("constant", {})
        same_world = self._same_places(manifest, world_size)
        local = read_local_state(checkpoint, manifest.pieces, rank if same_world else 0)
        if local is None:
            reseed(restored.version, self._number(rank, world_size))
            notes = self._extra.restore(constant)
            why = why_lost(manifest.pieces, rank) if same_world else "this job is another world"
            return [*notes, f"nothing was kept of rank {rank} ({why}): its random streams are derived from its seed"]
        if same_world:
            return self._capture.restore(
                type(local)(rng=local.rng, buffers=local.buffers, extra={**constant, **local.extra})
            )
        reseed(restored.version, self._number(rank, world_size))
        notes = self._extra.restore({**constant, **local.extra})
        return [
            *notes,
            f"{manifest.world_size} ranks saved it and {world_size} restore it"
            + (", in another layout" if world_size == manifest.world_size else "")
            + ": extra_state is that of rank 0, random streams are derived from each rank's seed",
        ]

    def _number(self, rank: int, world_size: int) -> int:
        """What tells the random streams of ranks apart beside their seeds.

        Nothing where there are several shards: ranks of one tensor-parallel group have to draw the same.
        """
        several = connected(world_size) and len(self.sharding(world_size).layout.groups) > 1
        return 0 if several else rank

    def _same_places(self, manifest: Manifest, world_size: int) -> bool:
        """Whether a rank of this job is the rank of that number in the job that saved: the same world, cut alike."""
        if world_size != manifest.world_size or not connected(world_size):
            return world_size == manifest.world_size
        here = self.sharding(world_size).layout.groups.values()
        return {tuple(ranks) for ranks in manifest.groups.values()} == set(here)


def _distinct(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """The optimizers that were given, each once."""
    given = list({id(each): each for each in listed(optimizer)}.values())
    if not given:
        raise UsageError("wrap_optimizer() was given no optimizer")
    owners = _owners(given)
    sharded = next((each for each in owners if is_sharded(each)), None)
    if sharded is not None and len(owners) > 1:
        raise ConfigError(
            f"{type(sharded).__name__} shards its state over the ranks and cannot be protected beside other "
            "optimizers: give all parameters to it, or use optimizers that do not shard their state"
        )
    return given


def _names(takers: Sequence[Sequence[Optimizer]]) -> list[str]:
    """How people tell the optimizers apart."""
    return [f"optimizer {number} ({type(taker[0]).__name__})" for number, taker in enumerate(takers, 1)]


def _owners(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    return [owner for each in optimizers for owner in owners_of(each)]


def _tell_forgotten(names: Sequence[str]) -> None:
    if names:
        listing = ", ".join(names[:_LISTED_MAX]) + (", ..." if len(names) > _LISTED_MAX else "")
        log.warning(
            "%d parameters want gradients and are in no optimizer that wrap_optimizer() was given (%s): their weights "
            "are saved; if another optimizer updates them, its state is not: give wrap_optimizer() a list of all",
            len(names),
            listing,
        )


def _schedulers(given: Any) -> list[Any]:
    """Each scheduler; of a container that is none itself (torchtitan's) those inside, so that each state is kept."""
    found: list[Any] = []
    for each in listed(given):
        inside = getattr(each, "schedulers", None)
        unpack = isinstance(inside, (list, tuple)) and inside and not isinstance(each, LRScheduler)
        found += _schedulers(list(inside)) if unpack and inside is not None else [each]
    return found


class DeviceReporter:
    """Marks on the device where a gradient is reduced and where an update begins, to tell what has happened there."""

    def __init__(self, processor: Processor, source: TorchSource) -> None:
        self._processor, self._reduced, self._begun = processor, source.reduced, source.begun
        self._host_values = source.host_values

    @property
    def mark(self) -> int:
        """See ``UpdateReporter``."""
        return self._processor.mark

    @mark.setter
    def mark(self, mark: int) -> None:
        self._processor.mark = mark

    @property
    def activity(self) -> str:
        """See ``UpdateReporter``."""
        return self._processor.activity

    @activity.setter
    def activity(self, activity: str) -> None:
        self._processor.activity = activity

    def begin_update(self, again: bool = False) -> None:
        """See ``UpdateReporter``."""
        self._reduced.record(self._processor.gate.version + 1)
        self._processor.begin_update(again)
        self._begun.record(self._processor.gate.version + 1)

    def stand_between(self) -> None:
        """See ``UpdateReporter``."""
        self._processor.stand_between()

    def leave_update(self) -> None:
        """See ``UpdateReporter``."""
        self._processor.leave_update()

    def end_update(self) -> None:
        """See ``UpdateReporter``."""
        try:
            self._host_values.note(self._processor.gate.version + 1)
        except Exception as problem:  # a save of this version will say so
            log.debug("what the optimizer keeps on the host is not noted: %s", problem)
        self._processor.end_update()


def reseed(version: int, rank: int) -> None:
    """New random streams that depend on the job's seed, the version and the rank, and on nothing else."""
    seed = (torch.initial_seed() * 1_000_003 + version * 7919 + rank) % (1 << 63)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


def _gather_views(mine: RestoreView) -> list[RestoreView]:
    """Every rank's view."""
    data = encode(
        {"candidates": [[c.version, c.manifest_digest, c.name] for c in mine.candidates], "skipped": list(mine.skipped)}
    )
    views = []
    for rank, blob in enumerate(gather_bytes(data)):
        seen = decode(blob)
        candidates = tuple(Candidate(Version(v), digest, name) for v, digest, name in seen["candidates"])
        views.append(RestoreView(Rank(rank), candidates, tuple(seen["skipped"])))
    return views
