"""The adapter for one Megatron training: it holds the model chunks, optimizer and scheduler given to ``protect``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ttp.adapters.megatron.extra_states import ExtraStates
from ttp.adapters.megatron.geometry import describe
from ttp.adapters.megatron.optimizers import inner_optimizers, refuse_unknown, unchained
from ttp.adapters.megatron.param_sync import ParamSyncs
from ttp.adapters.megatron.rank_layout import rank_layout_text
from ttp.adapters.megatron.rank_state import PROGRESS, STREAMS, Progress, TrackedStreams
from ttp.adapters.megatron.replica_groups import announcement, layout_of
from ttp.adapters.megatron.restore import items_by_key, restore_groups, restore_into
from ttp.adapters.megatron.source import Held, MegatronSource, refuse_unsaved
from ttp.adapters.megatron.stock import JOB_KEY
from ttp.adapters.torch.adapter import TorchAdapter
from ttp.adapters.torch.around_update import with_marks
from ttp.adapters.torch.device.cuda import devices_of
from ttp.adapters.torch.local_state.capture import LocalCapture
from ttp.adapters.torch.local_state.extra_state import ExtraState, by_name, path_of
from ttp.adapters.torch.loop.barrier import UpdateBarrier
from ttp.adapters.torch.loop.hooks import Attachment, Calls
from ttp.adapters.torch.loop.late_changes import LateChanges
from ttp.adapters.torch.loop.post_step_state import PostStepState
from ttp.adapters.torch.loop.turns import Turns
from ttp.adapters.torch.loop.unwrap_optimizer import combined
from ttp.adapters.torch.restoring.compare import hand_to
from ttp.adapters.torch.restoring.rank_local import Restore
from ttp.adapters.torch.saving.job_state import JobState
from ttp.adapters.torch.saving.preimage import PreImage
from ttp.adapters.torch.sharding.exchange import connected, gather_or_refuse, tells
from ttp.adapters.torch.sharding.names import ModelNames, first_of
from ttp.core.layout import Layout, Version
from ttp.errors import ConfigError, UsageError
from ttp.store.manifest import Manifest

if TYPE_CHECKING:
    from ttp.processor.processor import Processor

log = logging.getLogger("ttp.adapters.megatron")

_LEARNT = 2
"""Number of versions after which a loop that calls ``ttp.step_done()`` has called it."""
_CLIPPED = (
    "qk_clip is set: a checkpoint lacks what Megatron's clip_qk() changes in the weights after optimizer.step(), so a "
    "resumed run has other bits. Call ttp.step_done() behind clip_qk(), at the end of each iteration, and once before "
    "the loop, right after ttp.restore()"
)


class MegatronAdapter(TorchAdapter):
    """The adapter for Megatron; see ``ttp.session.Adapter`` for the contract.

    Args:
        optimizer: the optimizer that ``get_megatron_optimizer`` returned.
        model: the model chunks of this rank, wrapped as in the training loop.
        scheduler: Megatron's ``OptimizerParamScheduler``, or None.
        args: Megatron-LM's namespace, or None.
        extra_state: see ``ttp.wrap_optimizer``.
        undo: see ``ttp.wrap_optimizer``.

    Raises:
        ConfigError: the model or the optimizer is of a kind that cannot be saved.
        UsageError: an extra state cannot be stored, or has a name that is taken.
    """

    source: MegatronSource

    def __init__(
        self,
        optimizer: Any,
        *,
        model: nn.Module | Sequence[nn.Module],
        scheduler: Any = None,
        args: Any = None,
        extra_state: Any = None,
        undo: str | None = None,
    ) -> None:
        from megatron.core.utils import unwrap_model

        self._chunks = [model] if isinstance(model, nn.Module) else list(model)
        self._scheduler, self._undo = scheduler, undo
        modules = nn.ModuleList(self._chunks)
        devices = devices_of([*modules.parameters(), *modules.buffers()])
        self._device = devices[0] if devices else torch.device("cpu")
        everyone = gather_or_refuse(lambda: self._look(optimizer, args, extra_state))
        geometry, inners = self._geometry, self._inners
        layout, shards = layout_of(everyone, inners)
        rank_layout = rank_layout_text(geometry, unwrap_model(self._chunks), inners)
        extra_states = ExtraStates(geometry.owners, geometry.written, on_device=self._device.type != "cpu")
        self._held = Held(geometry, tuple(inners), tuple(shards), layout, extra_states, rank_layout)
        self.capture = LocalCapture(modules, self._extra)
        self._noted = getattr(scheduler, "num_steps", 0)
        self._combined: Any = combined(self._held.stepping)
        names = ModelNames(modules, None)
        self.source = MegatronSource(
            modules, names, self._combined, self.capture, self._extra, devices, held=self._held, args=args
        )
        self._attachment = None
        self._hooks = self.source.hooks
        self._processor: Processor | None = None
        self._barrier: UpdateBarrier | None = None
        self._post_step: PostStepState | None = None
        self._syncs = ParamSyncs(self._chunks)

    def _look(self, optimizer: Any, args: Any, extra_state: Any) -> bytes:
        """Find the state of this rank; what is refused here is refused on all ranks. Returns what others must know."""
        from megatron.core.utils import unwrap_model

        optimizers = list(unchained(optimizer))
        for each in optimizers:
            refuse_unknown(each)
        self._progress = Progress(args, optimizers)
        self._extra = ExtraState(_extra_state(extra_state, self._progress))
        self._geometry = describe(unwrap_model(self._chunks))
        self._inners = inner_optimizers(optimizer, self._geometry)
        return announcement(self._inners)

    def layout(self, world_size: int) -> Layout:
        """Return the replica groups that the ranks announced to each other in ``__init__``.

        A collective call: if a rank was refused since then (see ``refused``), all ranks raise the same error.
        """
        layout = self._held.layout
        if connected(world_size):
            gather_or_refuse(lambda: b"")
        if layout.world_size != world_size:
            raise ConfigError(
                f"WORLD_SIZE says {world_size} ranks, torch's process group has {layout.world_size}: "
                "every rank of the job must be in the process group"
            )
        if alone := layout.unreplicated():
            log.warning(
                "%d of %d shards (%s) are held by one rank only and die with it: use two or more instances of the "
                "distributed optimizer (num_distributed_optimizer_instances), or more data parallel ranks",
                len(alone), len(layout.groups), first_of(alone, 4),
            )  # fmt: skip
        return layout

    def sharding(self, world_size: int) -> Any:
        """Return the tensors and shards of this rank, found in ``__init__``."""
        return self._held

    def attach(self, processor: Processor) -> None:
        """Register hooks on the inner optimizers; updates are reported to ``processor`` from now on."""
        self._processor, source = processor, self.source
        if processor.env.world_size > 1:
            for note in self._extra.notes():
                log.warning("%s", note)
        self._note_increment()
        self._post_step = source.post_step = PostStepState(
            self._held.stepping, scheduler=self._scheduler, runtimes=source.runtimes
        )
        if self._undo is not None:
            source.preimage = PreImage(self._combined, (), source.runtimes)
        barrier = self._barrier = self._make_barrier(processor)
        begins, stepping = self._progress.iteration_begins, self._held.stepping
        turns = source.turns = Turns([type(each).__name__ for each in stepping], chained=True)
        late = LateChanges(self._extra, (), turns)  # an average may not be given as a module here
        self.capture.on_changed = late.changed
        calls = Calls(
            before_gate=lambda: self._at_gate(processor, barrier),
            after_update=self._updated,
            after_end=partial(self._after_end, late, turns),
            before_forward=begins,
            before_backward=partial(begins, forward=False),
        )
        if source.preimage is not None:
            calls = calls._replace(before_update=source.preimage.before_update)
        self._attachment = Attachment(
            [[optimizer] for optimizer in stepping],
            self._chunks[0],
            processor,
            self.capture,
            post_step=self._post_step,
            turns=turns,
            fence=source.finished,
            version=lambda: processor.gate.version,
            calls=with_marks(calls, source, processor.gate) if source.on_device else calls,
        )
        self._hooks.callback(self._attachment)
        self._syncs.attach(self._held.stepping)
        self._hooks.callback(self._syncs.detach)
        source.exchanges = True  # parameters are gathered before the scheduler is stepped
        source.connect(processor, self._attachment, self.sharding(processor.env.world_size))
        self._held.extra_states.take(processor.gate.version)
        self.capture.capture(processor.gate.version, final=True)

    def _at_gate(self, processor: Processor, barrier: UpdateBarrier | None) -> None:
        self._progress.update_begins()
        self._held.extra_states.take(processor.gate.version + 1)
        if barrier is not None:
            barrier.wait()

    def _updated(self) -> None:
        self._progress.updated()
        self._note_increment()
        if self._barrier is not None:
            self._barrier.updated()

    def _after_end(self, late: LateChanges, turns: Turns) -> None:
        """After the first update refuse an optimizer whose state cannot be saved; after the second look at the loop."""
        if not late.ended:
            refuse_unsaved(self._held.inners)
        late.ended += 1
        if late.ended == _LEARNT and not turns.by_hand and tells() and any(map(_clips, self._chunks)):
            log.warning(_CLIPPED)

    def _why_wait(self) -> str:
        return "Megatron's optimizer exchanges weights between ranks"

    def _note_increment(self) -> None:
        """Note the increment of the loop's last scheduler step: a restore may have to repeat that step."""
        now = getattr(self._scheduler, "num_steps", 0)
        if now > self._noted:
            self.source.increment = now - self._noted
        self._noted = now

    # --------------------------------------------------------------------------------------------------- restoring

    def load(self, checkpoint: Path, rank: int, world_size: int, *, protected: bool) -> Version:
        """Load a verified checkpoint into the registered objects.

        Raises:
            CheckpointError: the checkpoint belongs to another model (nothing has been changed then), or a piece cannot
                be read (the objects may hold a part of the checkpoint then).
        """
        manifest = Manifest.load(checkpoint)
        job = restore_into(checkpoint, manifest, self._held)
        notes = [*self._held.extra_states.restore(checkpoint, items_by_key(manifest)), *self._load_scheduler(job)]
        for note in notes:
            log.warning("restored version %s, but %s", job.version, note)
        self._held.extra_states.take(job.version)
        return self._loaded(Restore(checkpoint, manifest, rank, world_size, protected), job)

    def _load_scheduler(self, job: JobState) -> list[str]:
        """Restore scheduler and param groups, then make the scheduler's step if the save came before it.

        Returns notes for the log.
        """
        scheduler = self._scheduler
        if scheduler is None or job.scheduler is None:
            restore_groups(self._held, job)
            return [] if scheduler is None else ["it has no LR scheduler: that of this job was not restored"]
        scheduler.num_steps = 0  # load_state_dict() adds the saved steps to num_steps
        hand_to("load_state_dict() of the LR scheduler", scheduler.load_state_dict, job.scheduler)
        restore_groups(self._held, job)
        increment = job.extra[JOB_KEY]["increment"]
        if job.scheduler_pending and increment:
            scheduler.step(increment=increment)
        self.source.increment, self._noted = increment, scheduler.num_steps
        if job.scheduler_pending and not increment:
            return ["the LR scheduler is one step behind: the save came before its step, and no earlier step is known"]
        return []

    def _number(self, restore: Restore) -> int:
        """Return 0: Megatron seeds each rank itself, so ttp need not give ranks different random streams."""
        return 0

    def _same_places(self, restore: Restore) -> bool:
        manifest = restore.manifest
        return restore.world_size == manifest.world_size and dict(manifest.groups) == dict(self._held.layout.groups)


def _clips(chunk: nn.Module) -> bool:
    """Return whether Megatron may change weights of this chunk after the update."""
    return any(getattr(getattr(module, "config", None), "qk_clip", False) is True for module in chunk.modules())


def _extra_state(given: Any, progress: Progress) -> dict[str, Any]:
    named = by_name(given)
    ours = {PROGRESS: progress, STREAMS: TrackedStreams()}
    if taken := named.keys() & ours.keys():
        raise UsageError(f"extra_state may not be named {', '.join(sorted(taken))}")
    for name, thing in named.items():
        if isinstance(thing, nn.Module):
            raise UsageError(
                f"{path_of(name)} is an nn.Module ({type(thing).__name__}), which ttp cannot save with Megatron. Give "
                "an object that is no nn.Module, whose state_dict() and load_state_dict() call those of the module: "
                "its state is then copied in each step. If it changes after optimizer.step(), as an average of the "
                "weights does, call ttp.step_done() at the end of each iteration, and once before the loop"
            )
    return named | ours
