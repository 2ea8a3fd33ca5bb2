"""Loads a checkpoint into the objects that were registered with an adapter."""

from __future__ import annotations

import abc
import logging
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ttp.adapters.torch.local_state.capture import LocalCapture
from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.adapters.torch.loop.post_step_state import PostStepState
from ttp.adapters.torch.loop.repeating import Repeating
from ttp.adapters.torch.loop.untouched import Untouched
from ttp.adapters.torch.restoring.compare import hand_to
from ttp.adapters.torch.restoring.kept import Kept, UnlikeError
from ttp.adapters.torch.restoring.rank_local import Restore, load_rank_local
from ttp.adapters.torch.restoring.reader import load_chunks, read_values
from ttp.adapters.torch.restoring.restore import restore_into
from ttp.adapters.torch.restoring.transfer import give, receive
from ttp.adapters.torch.saving.checkpoint import chunks_of
from ttp.adapters.torch.saving.job_state import ZEROED, JobState
from ttp.adapters.torch.saving.piece_index import SHARD_KIND, IndexEntry, items_of
from ttp.adapters.torch.sharding.dtensor_chunks import is_distributed, stored
from ttp.adapters.torch.sharding.exchange import connected, gather_bytes
from ttp.adapters.torch.sharding.names import module_tensors
from ttp.adapters.torch.sharding.sharding import Sharding
from ttp.adapters.torch.source import TorchSource
from ttp.core.layout import Rank, Shard, Version
from ttp.core.rank.kept_state import Origin, givers, why_not_adopted
from ttp.core.restore_choice import agree
from ttp.core.restore_messages import Candidate, RestoreView
from ttp.core.stripes import base_of
from ttp.errors import RestoreError, TtpError
from ttp.processor.local_state.local_piece import ranks_kept
from ttp.store.encoding import decode, encode
from ttp.store.manifest import Manifest

if TYPE_CHECKING:
    from ttp.processor.kept_state import KeptState

log = logging.getLogger("ttp.adapters.torch")

TRANSFER_BYTES = 100 << 20
"""Ranks on one host send states to each other only if the checkpoint has at least this many bytes. A smaller one, which
this host has just written, is read as fast as the state could be sent."""


class Restoring(abc.ABC):
    """The part of ``TorchAdapter`` that restores the registered objects. ``TorchAdapter`` describes the attributes."""

    _model: nn.Module
    _optimizer: Optimizer
    _schedulers: list[Any]
    _scaler: Any
    _extra: ExtraState
    capture: LocalCapture
    source: TorchSource
    _post_step: PostStepState | None
    _resumed: bool
    _untouched: weakref.ref[Untouched] | None = None
    start: Repeating | None = None
    """The interrupted call of the step function, if ranks stay in their loops (``ttp.one_step``); else None. A restore
    puts rank-local state back to the beginning of that call."""

    @abc.abstractmethod
    def sharding(self, world_size: int) -> Sharding:
        """Return how the state is spread over the ranks."""

    def agree_without_controller(self, found: tuple[Candidate, ...], skipped: tuple[str, ...]) -> Candidate | str:
        """Agree on a checkpoint through the default process group; without a group this rank decides alone.

        Args:
            found: the checkpoints that this rank found whole.
            skipped: the checkpoints that this rank skipped, with the reasons.

        Returns:
            The checkpoint to restore (see ``restore_choice.agree``), or why the ranks have none in common.
        """
        mine = RestoreView(Rank(0), found, skipped)
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return agree([mine])
        return agree(_gather_views(mine))

    def load(self, checkpoint: Path, rank: int, world_size: int, *, protected: bool) -> Version:
        """Load a verified checkpoint into the registered objects.

        Args:
            checkpoint: the directory of the checkpoint.
            rank: this rank.
            world_size: number of ranks of the job.
            protected: True if ttp is switched on, so that the restored rank-local state is captured.

        Returns:
            The restored version.

        Raises:
            CheckpointError: the checkpoint belongs to another model (nothing has been changed), or cannot be read.
        """
        return self._load(Restore(checkpoint, Manifest.load(checkpoint), rank, world_size, protected))

    def load_going_on(
        self, checkpoint: Path, rank: int, world_size: int, state: KeptState, verify: Callable[[], None]
    ) -> Version:
        """Load a checkpoint where survivors go on in their processes, with tensors from memory as far as possible.

        A collective call, with the same checkpoint on all ranks. Tensors that a rank has in memory, or receives from
        another rank, are not read. Every rank reads learning rates, schedules, random streams and buffers from the
        checkpoint, so the ranks first verify it together, each a share.

        Args:
            checkpoint: the checkpoint on which all ranks agreed by its digest.
            rank: this rank.
            world_size: number of ranks of the job.
            state: the state that this rank kept when all ranks stopped, or why it kept none; this call empties it.
            verify: raises an error if this rank's share of the checkpoint is not whole.

        Returns:
            The restored version.

        Raises:
            RestoreError: this rank or another one found that the checkpoint is not whole.
            CheckpointError: see ``load``.
            RuntimeError: another rank is lost.
        """
        began = time.monotonic()
        restore = Restore(checkpoint, Manifest.load(checkpoint), rank, world_size)
        _verify_together(verify, world_size)
        try:
            kept, way = self._brought(restore, *state.take())
            version = self._load(restore, kept)
        except UnlikeError as problem:
            way = f"read from the checkpoint ({problem})"
            kept = None
        if kept is None:  # not in the except block: there the error's traceback keeps the objects alive
            version = self._load(restore)
        state.say(f"its state was {way}, in {time.monotonic() - began:.3f} s")
        return version

    def _brought(self, restore: Restore, kept: Kept | None, why: str) -> tuple[Kept, str]:
        """Return the state that this rank kept or received, and a text that says which. A collective call.

        Ranks that kept their state send it to ranks that did not.

        Raises:
            UnlikeError: this rank has no state in memory, so it has to read the checkpoint; the text says why.
        """
        rank, world_size = Rank(restore.rank), restore.world_size
        if kept is not None and (why := self._why_not(restore, kept)):
            kept = None
        several = connected(world_size) and not self.source.on_device  # state on devices is not sent yet
        if several and (restore.manifest.size >= TRANSFER_BYTES or several_hosts(world_size)):
            flags = gather_bytes(b"1" if kept is not None else b"0")
            holders = [Rank(other) for other, flag in enumerate(flags) if flag == b"1"]
            plan = givers(self.sharding(world_size).layout, holders)
            if kept is not None:
                for other in [other for other, giver in plan.items() if giver == rank]:
                    give(kept, other)
            if rank in plan:
                received = receive(plan[rank])
                if why := self._why_not(restore, received):
                    raise UnlikeError(why)
                return received, f"received from rank {plan[rank]} ({received.size} bytes)"
        if kept is None:
            raise UnlikeError(why)
        return kept, f"kept ({kept.size} bytes)"

    def _why_not(self, restore: Restore, kept: Kept) -> str:
        """Return why a kept state may differ from the checkpoint's; an empty string if it is of the same commit."""
        manifest = restore.manifest
        if not self._same_places(restore):
            return "the checkpoint is of a job with another layout or number of ranks"
        if restore.rank not in ranks_kept(manifest.pieces):
            return "the checkpoint has no random streams and buffers of this rank"
        return why_not_adopted(kept.origin, Origin(manifest.version, manifest.incident))

    def _load(self, restore: Restore, kept: Kept | None = None) -> Version:
        world_size = restore.world_size
        job, _ = restore_into(
            restore.checkpoint,
            restore.manifest,
            model=self._model,
            optimizer=self._optimizer,
            scheduler=self._schedulers,
            scaler=self._scaler,
            elsewhere=self.sharding(world_size).elsewhere() if connected(world_size) else (),
            kept=kept,
        )
        self._resumed = True
        self._load_modules(restore)
        return self._loaded(restore, job)

    def _loaded(self, restore: Restore, job: JobState) -> Version:
        """Load the rank-local state too, and note that all objects hold the checkpoint's version."""
        version = Version(job.version)
        if disputed := restore.manifest.extra.get("disputed"):
            log.warning(
                "replicas of %s differed when version %s was saved, and which was right is unknown: watch the loss",
                ", ".join(map(str, disputed)),
                restore.manifest.version,
            )
        for note in self._load_local(restore, job):
            log.warning("restored version %s, but %s", version, note)
        if self._post_step is not None:
            self._post_step.restored(version)
        if self._untouched is not None and (untouched := self._untouched()) is not None:
            untouched.restored(bool(job.extra.get(ZEROED)))
        for fence in (self.source.begun, self.source.finished):
            fence.record(version)
        self.source.base = version
        self.source.forget()
        if restore.protected:
            self.capture.capture(version, final=True)
        return version

    def _load_modules(self, restore: Restore) -> None:
        """Load the modules that were given as ``extra_state``, such as averages of the weights."""
        saved: dict[str, list[IndexEntry]] = defaultdict(list)
        for item in items_of(restore.manifest.pieces):
            if item.path[0] == "extra":
                saved[str(item.path[1])].append(item)
        for name, module in self._extra.modules.items():
            if name not in saved:
                log.warning("extra_state[%r] is not in the checkpoint: it keeps its initial value", name)
            elif any(map(is_distributed, module.parameters())):
                tensors = module_tensors(module).items()
                wanted = [(("extra", name, key), chunks_of(stored(tensor)) or ()) for key, tensor in tensors]
                load_chunks(restore.checkpoint, saved[name], wanted)
            else:
                whole = read_values(restore.checkpoint, saved[name])["extra"][name]
                hand_to(f"extra_state[{name!r}].load_state_dict()", module.load_state_dict, whole)

    def _load_local(self, restore: Restore, job: JobState) -> list[str]:
        if self.start is not None:
            self.start.put_back(self.capture)
            return []
        same, number = self._same_places(restore), self._number(restore)
        return load_rank_local(restore, job, same_places=same, number=number, capture=self.capture)

    def _number(self, restore: Restore) -> int:
        """Return the number that ``reseed`` mixes into the seed of a rank, so that ranks with equal seeds differ.

        It is 0 if there are several shards: ranks of one tensor-parallel group have to draw the same numbers.
        """
        world_size = restore.world_size
        several = connected(world_size) and len(self.sharding(world_size).layout.groups) > 1
        return 0 if several else restore.rank

    def _same_places(self, restore: Restore) -> bool:
        """Return whether each rank holds the shards that the rank of the same number held in the job that saved.

        Layouts of other kinds may have the same replica groups: ranks that draw their own numbers (FSDP) become ranks
        that have to draw the same (tensor parallelism). They hold other parameters then.
        """
        manifest, world_size = restore.manifest, restore.world_size
        if world_size != manifest.world_size or not connected(world_size):
            return world_size == manifest.world_size
        sharding, held = self.sharding(world_size), defaultdict[tuple[Rank, ...], set[str]](set)
        if {tuple(ranks) for ranks in manifest.groups.values()} != set(sharding.layout.groups.values()):
            return False
        for shard in sharding.layout.shards_of(Rank(dist.get_rank())):
            held[sharding.layout.groups[shard]].update(sharding.parameters_of(shard))
        known = set().union(*held.values())
        for piece in (piece for piece in manifest.pieces if piece.kind == SHARD_KIND):
            mine = held.get(manifest.groups.get(base_of(Shard(piece.shard)), ()), known)
            names = {str(item.path[1]) for item in items_of([piece]) if item.path[0] == "model"}
            if not names & known <= mine:
                return False
        return True


def _verify_together(verify: Callable[[], None], world_size: int) -> None:
    """Let each rank verify its share of a checkpoint; if one rank finds an error, all ranks raise it."""
    if not connected(world_size):
        verify()
        return
    wrong = ""
    try:
        verify()
    except TtpError as problem:
        wrong = str(problem)
    found = [text for answer in gather_bytes(encode(wrong)) if (text := decode(answer))]
    if found:
        raise RestoreError(found[0])


def several_hosts(world_size: int) -> bool:
    """Return whether the job has ranks on other hosts, by ``LOCAL_WORLD_SIZE``. Their files are not cached here."""
    return os.environ.get("LOCAL_WORLD_SIZE", str(world_size)) != str(world_size)


def _gather_views(mine: RestoreView) -> list[RestoreView]:
    """Return the view of every rank. A collective call."""
    data = encode(
        {"candidates": [[c.version, c.manifest_digest, c.name] for c in mine.candidates], "skipped": list(mine.skipped)}
    )
    views = []
    for rank, answer in enumerate(gather_bytes(data)):
        seen = decode(answer)
        candidates = tuple(Candidate(Version(v), digest, name) for v, digest, name in seen["candidates"])
        views.append(RestoreView(Rank(rank), candidates, tuple(seen["skipped"])))
    return views
