"""Writes the state that one rank of a torch training adds to a checkpoint: shards, rank-local pages, job state."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ttp.adapters.torch.device.host_values import HostValues
from ttp.adapters.torch.device.to_host import HostCopier
from ttp.adapters.torch.local_state.capture import LocalCapture
from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.adapters.torch.local_state.hyperparameters import plain_settings
from ttp.adapters.torch.local_state.image import decode, object_digests, without_still
from ttp.adapters.torch.local_state.module_states import ModuleStates
from ttp.adapters.torch.loop.hooks import Attachment
from ttp.adapters.torch.loop.post_step_state import PostStepState
from ttp.adapters.torch.loop.swapped import Swapped
from ttp.adapters.torch.loop.untouched import Habits
from ttp.adapters.torch.loop.unwrap_optimizer import members_of, unwrap_optimizer
from ttp.adapters.torch.restoring.kept import Kept, UnlikeError, keep
from ttp.adapters.torch.saving.checkpoint import Select, write_shard
from ttp.adapters.torch.saving.inspection import ComparedTensor, Findings, Inspector, agreed_on, of_shard, replicated
from ttp.adapters.torch.saving.job_state import JOB_KIND, SETTINGS, JobState
from ttp.adapters.torch.saving.metadata import NO_GAPS, finalise
from ttp.adapters.torch.saving.piece_index import StatePath
from ttp.adapters.torch.saving.preimage import Image
from ttp.adapters.torch.saving.standing import Standing
from ttp.adapters.torch.saving.state import checkpoint_state, groups_with, how_they_train, model_state, optimizer_state
from ttp.adapters.torch.saving.stripe_plan import Share
from ttp.adapters.torch.sharding.data_parallel import Layouts, LayoutWatch
from ttp.adapters.torch.sharding.dtensor_chunks import is_distributed
from ttp.adapters.torch.sharding.fsdp1 import flat_scopes
from ttp.adapters.torch.sharding.names import ModelNames, module_tensors
from ttp.adapters.torch.sharding.sharding import Sharding, state_of
from ttp.core import stripes
from ttp.core.decide import How
from ttp.core.layout import Rank, Shard, Version
from ttp.core.messages import Commit, Phase, Piece, SaverOrder, ShardDigest
from ttp.core.rank.kept_state import Look, Origin, why_not_kept
from ttp.errors import CheckpointError
from ttp.processor.local_state.local_piece import Pages, write_local_piece
from ttp.processor.source import MovedError
from ttp.store.durable import sync_directory
from ttp.store.piece_file import all_or_nothing, write_piece

if TYPE_CHECKING:
    from ttp.processor.processor import Processor

log = logging.getLogger("ttp.adapters.torch")

_POST_STEP_OPEN = (
    "version %s is saved while the training thread stands between optimizer.step() and the next forward pass: "
    "an average of the weights, or a schedule that is not stepped after each update, may lack that update. Let the "
    "program update averages and schedules directly after optimizer.step(), before anything that waits for other ranks"
)


class TorchSource(Standing):
    """The ``StateSource`` of a torch training, made by ``TorchAdapter``: writes pieces of checkpoints for its rank.

    Args:
        model: the registered model.
        names: the names of the model's tensors.
        optimizer: the registered optimizer.
        capture: captures the rank-local state.
        extra: the user's objects of ``extra_state``.
        devices: the devices on which the state is; empty: it is on the host.
    """

    framework = "torch"
    writes_parts = True
    gaps = NO_GAPS  # prefix of the names of tensors that are not complete in a checkpoint

    def __init__(
        self,
        model: nn.Module,
        names: ModelNames,
        optimizer: Optimizer,
        capture: LocalCapture,
        extra: ExtraState,
        devices: Sequence[torch.device],
    ) -> None:
        self._model, self._names, self._extra = model, names, extra
        super().__init__(optimizer, capture, devices)
        self.host_values = HostValues(
            lambda: [v for each in members_of(optimizer) for v in unwrap_optimizer(each).state.values()], self.on_host
        )
        self.module_states = ModuleStates(names.extra_states, on_device=bool(devices))
        self._copier: HostCopier | None = None
        self._copying = threading.Lock()
        self._inspector: Inspector | None = None
        self.sharding: Sharding | None = None
        self.stopped: Look | None = None  # digests and marks of the state at the last ``inspect``
        self.exchanges = False  # the optimizer's step() exchanges weights between ranks after the update is finished
        self.post_step: PostStepState | None = None
        self.buckets: LayoutWatch | None = None
        self.habits = Habits()
        self.hooks = contextlib.ExitStack()
        """Removes all hooks of the adapter when it is closed; hooks may be registered again after that."""

    def watch_swaps(self, sharding: Sharding) -> None:
        """Notice from now on when the program puts other weights into the model.

        FSDP1 moves its parameters in each forward pass itself: with it nothing is noticed.

        Args:
            sharding: how the state is sharded over the ranks.
        """
        if not list(flat_scopes(self._model)):
            reduced = self.buckets.reduced if self.buckets is not None else ()
            self.swapped = Swapped(sharding.stepping, self._names.parameters, self.runtimes, reduced)

    def connect(self, processor: Processor, attachment: Attachment, sharding: Sharding) -> None:
        """Take the processor and the attached hooks, and prepare for saves.

        All memory that a save needs is allocated here, and all kernels are loaded: after a failure both may block.

        Args:
            processor: the processor of this rank.
            attachment: the hooks.
            sharding: how the state is sharded over the ranks.
        """
        self._processor, self._attachment, self.sharding = processor, attachment, sharding
        self._copier = HostCopier(self.runtimes)
        if processor.config.digest != "off":
            self._inspector = Inspector(processor.config.digest, self.runtimes)

    # ------------------------------------------------------------------------------------------------ StateSource

    def post_step_done(self) -> bool:
        """Return whether scheduler, scaler and averages have followed the last update.

        If an exchange of weights, which may hang, comes before them, it is enough to know which calls will follow.
        """
        if (post_step := self.post_step) is None:
            return True
        done = post_step.done() or (self.exchanges and post_step.foreseen())
        return done and post_step.done_on_devices(self.finished.finished_version())

    def inspect(self, version: Version) -> tuple[tuple[ShardDigest, ...], tuple[str, ...]]:
        """See ``StateSource``."""
        if self._processor is None or self.sharding is None:
            return (), ()
        shards = self._processor.layout.shards_of(Rank(self._processor.env.rank))
        self.stopped = None
        try:
            listed = self._leaves(shards)
            sizes = [sum(leaf.tensor.nbytes for leaf in leaves) for leaves in listed]
            marks = _marks(listed)
            found = [self._look(leaves, version) for leaves in listed]
        except Exception as problem:
            log.warning("version %s was not compared with other replicas: %s", version, problem)
            return tuple(ShardDigest(shard, "") for shard in shards), ()
        self.stopped = Look(version, tuple(seen.digest for seen in found), marks)
        bad = dict.fromkeys(name for seen in found for name in seen.bad)
        looks = tuple(map(ShardDigest, shards, (seen.digest for seen in found), sizes))
        return looks, tuple(bad)

    def keep(self, incident: str) -> Kept:
        """Return references to the state, for the next launch in this process. For the training thread, not in a loop.

        Args:
            incident: id of the incident in which the state was saved.

        Raises:
            UnlikeError: the state may differ from the checkpoint of that incident, or cannot be kept; the text says
                why.
        """
        now, stopped = self.processor.gate.state(), self.stopped
        if self._extra.modules or self._capture.problem:
            raise UnlikeError("extra_state holds modules, or some of the state of this rank cannot be captured")
        self.inspect(now.version)
        if self.stopped is None:
            raise UnlikeError("the state cannot be read")
        if reason := why_not_kept(stopped, self.stopped, now.version, now.phase):
            raise UnlikeError(reason)
        return keep(Origin(now.version, incident), self._names, self._optimizer)

    def _look(self, leaves: list[ComparedTensor], version: Version) -> Findings:
        return Findings("", ()) if self._inspector is None else self._inspector.look(leaves, version)

    def write_pieces(
        self, *, order: SaverOrder, version: Version, draft: Path, generation: int, cancelled: Callable[[], bool]
    ) -> list[Piece]:
        """See ``StateSource``."""
        image = self._image(order.how, version)
        if image is None:
            self.wait_post_step(cancelled)
            if not self.post_step_done() and self.post_step is not None and not self.post_step.foreseen():
                log.warning(_POST_STEP_OPEN, version)
        evaluations = 0 if self.swapped is None else self.swapped.evaluations
        if order.shards:
            self._check_stands(version, image, evaluations)
        pages = self.read_pages(order.pages or (order.rank,), version, object_digests if order.pages else None)
        pages = replace(pages, changes=without_still(pages.changes))
        # A rank that stopped before its update to this version can add its pages, but has no schedule of this version.
        job = self._job_state(version) if order.shards or order.job_state else None
        state = self._state(pages, job, image, order.shards) if job is not None and order.shards else {}
        with all_or_nothing(draft) as pieces:
            for shard in order.shards:
                pieces.append(self._write_shard(draft, shard, state, order, generation, cancelled))
                self._check_stands(version, image, evaluations)
            if order.pages:
                file = f"rank_local_{order.rank}_{generation}.msgpack"
                pieces.append(write_local_piece(draft, file, pages, order.rank))
            if job is not None and order.job_state:
                data = job.encode(self._to_host)
                pieces.append(write_piece(draft, f"job_{generation}.msgpack", data, JOB_KIND, order.rank))
            sync_directory(draft)
            if order.shards:
                self._check_stands(version, image, evaluations)
        return pieces

    def finalise(self, directory: Path, order: Commit) -> list[Piece]:
        """See ``StateSource``: add the metadata that readers other than ttp need."""
        return finalise(directory, order.pieces, writer=order.rank, gaps=self.gaps)

    def forget(self) -> None:
        """See ``Standing``."""
        super().forget()
        self.module_states.forget()

    def close(self) -> None:
        """See ``StateSource``."""
        self.hooks.close()
        super().close()

    # ----------------------------------------------------------------------------------------------------- details

    def everything(self) -> dict[str, Any]:
        """Return references to all live state that this rank may have to write. Any thread may call it."""
        state = {"model": model_state(self._names, {}), "optim": optimizer_state(self._names, self._optimizer)}
        modules = self._extra.modules
        return state | {"extra": {name: _module_state(module, None) for name, module in modules.items()}}

    def _image(self, how: How, version: Version) -> Image | None:
        """Return the copy of ``version`` if the order is to undo an update; None: use the live state.

        Raises:
            CheckpointError: there is no copy of that version.
        """
        if how is not How.UNDO:
            return None
        preimage = self._preimage_now
        if preimage is None:
            raise CheckpointError('an update cannot be undone: wrap_optimizer() was not given undo="preimage"')
        return preimage.image(version)

    def _check_stands(self, version: Version, image: Image | None, evaluations: int) -> None:
        """Check that the state is that of ``version``; called before the first byte is read and after the last one.

        A device that hangs in a collective goes on when its communicator is aborted: queued kernels then write results
        that are computed from incomplete data. And an evaluation may put other weights into the model meanwhile.

        Args:
            version: the version to be saved.
            image: the copy that is saved instead of the live state; None: the live state is saved.
            evaluations: the value of ``Swapped.evaluations`` before the first byte was read.

        Raises:
            MovedError: the state is not, or no longer, that of ``version``.
        """
        if image is not None:
            preimage = self._preimage_now
            kept = None if preimage is None else preimage.version
            stands, found = kept == version, f"the copy is of {'no version' if kept is None else f'version {kept}'}"
        elif self.on_device:
            done, begun = self.finished.finished_version(), self.begun.finished_version()
            stands, found = done == version >= begun, f"the device has finished version {done} and begun {begun}"
        else:
            state = self.processor.gate.state()
            stands = state.version == version and state.phase in (Phase.IDLE, Phase.DONE)
            found = f"this rank holds version {state.version}, not {version} ({state.phase.value})"
        if image is None and stands and self.swapped is not None and self.swapped.held_others_since(evaluations):
            stands, found = False, "the program has put other weights into the model, such as averages to evaluate"
        if not stands:
            raise MovedError(f"the state is no longer that of version {version}: {found}")

    def _job_state(self, version: Version) -> JobState:
        assert self.post_step is not None
        job = self.post_step.job_state(version)
        job.extra["constant"] = self._extra.capture_constant()
        job.extra.update(how_they_train(self._names, self._optimizer, self.habits))
        if self.sharding is not None and not self.sharding.flat_groups:
            job.extra[SETTINGS] = plain_settings(self.post_step.param_groups(version, job))
        return replace(job, ddp_buckets=self._bucket_layout(version))

    def _bucket_layout(self, version: Version) -> Layouts | None:
        if self.buckets is None:
            return None
        return self.buckets.previous if version < self.processor.gate.version else self.buckets.layout

    def _write_shard(
        self,
        draft: Path,
        shard: Shard,
        state: dict[str, Any],
        order: SaverOrder,
        generation: int,
        cancelled: Callable[[], bool],
    ) -> Piece:
        assert self.sharding is not None
        part = stripes.parse(shard)
        name = f"__{list(self.processor.layout.groups).index(part.shard)}_{generation}"
        select: Select | None = None
        if part.count > 1:
            name += f"_{part.index}of{part.count}"
            select = Share(part.index, part.count, self._agreed()).select
        return write_shard(
            draft,
            f"{name}.distcp",
            self._state_of(part.shard, state),
            shard=shard,
            writer=order.rank,
            to_host=self._to_host,
            cancelled=cancelled,
            progress=self.wrote,
            select=select,
            lacking=self._names.lacking(),
        )

    def _agreed(self) -> Callable[[StatePath], bool]:
        """Return a function that tells whether all replicas are known to hold equal values of an entry of a shard."""
        return agreed_on(self._names)

    def _state_of(self, shard: Shard, state: dict[str, Any]) -> dict[str, Any]:
        """Return the part of ``state`` that belongs to ``shard``."""
        assert self.sharding is not None
        return state_of(self.sharding, shard, state, self._names)

    def _leaves(self, shards: Sequence[Shard]) -> list[list[ComparedTensor]]:
        """Return, for each of these shards, the tensors that have to be equal on all its replicas."""
        assert self.sharding is not None
        everything = replicated(self._names, self._optimizer)
        return [of_shard(self.sharding, shard, everything, self._names) for shard in shards]

    def _state(self, pages: Pages, job: JobState, image: Image | None, shards: Sequence[Shard]) -> dict[str, Any]:
        """Return references to the live tensors, or to those of ``image``, to be written for these shards.

        Buffers come from the page of the lowest rank in the replica group whose page was read, as they were when the
        version was finished: DistributedDataParallel broadcasts the buffers of rank 0. Only if all have died in the
        update they are those from before it.
        """
        groups = self.processor.layout.groups
        widest = max((groups[stripes.base_of(shard)] for shard in shards), key=len)
        alike = set(widest) & pages.data.keys()
        captured: dict[str, Any] = dict(self.module_states.values(job.version) or {})
        if alike:
            captured |= decode(pages.data[min(alike.difference(pages.provisional) or alike)]).buffers
        state = checkpoint_state(self._names, self._optimizer, captured, job, image)
        assert self.post_step is not None
        ahead = 0 if image is not None else self.processor.gate.version - job.version
        if ahead and not self.on_device:
            raise CheckpointError(f"this rank holds version {job.version + ahead}, not {job.version}")
        if ahead:
            kept = state["optim"]["state"]
            state["optim"]["state"] = {name: self.host_values.of(kept[name], job.version) for name in kept}
        settings = self.post_step.param_groups(job.version, job)
        state["optim"]["param_groups"] = groups_with(state["optim"]["param_groups"], self._optimizer, settings)
        modules: dict[str, nn.Module] = self._extra.modules
        if modules:
            state["extra"] = {name: _module_state(module, image) for name, module in modules.items()}
        return state

    def _to_host(self, tensor: Tensor) -> Tensor:
        assert self._copier is not None
        with self._copying:  # a save or second copy that was given up may still be copying on another thread
            return next(self._copier.copy_to_host([tensor]))


def _marks(listed: Sequence[Sequence[ComparedTensor]]) -> tuple[Hashable, ...]:
    """Return values that change when one of the tensors is replaced or written to, as far as torch counts writes."""
    found = ((leaf.name, leaf.tensor) for leaves in listed for leaf in leaves)
    return tuple((name, t.data_ptr(), t.shape, None if t.is_inference() else t._version) for name, t in found)


def _module_state(module: nn.Module, image: Image | None) -> dict[str, Any]:
    if any(map(is_distributed, module.parameters())):  # a hook of its state_dict() would change the live module
        found = module_tensors(module)
        return found if image is None else {key: image.of(value) for key, value in found.items()}
    state = module.state_dict()  # some classes of others have one that takes no keep_vars
    if image is None:
        return state
    live = {_place(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return dict(tree_map_only(Tensor, lambda value: image.of(live.get(_place(value), value)), dict(state)))


def _place(tensor: Tensor) -> tuple[Hashable, ...]:
    """Return what a tensor has in common with those that are detached from it."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
