"""Loads a checkpoint into the objects that were registered with an adapter."""

from __future__ import annotations

import abc
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ttp.adapters.torch.local_state.capture import LocalCapture
from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.adapters.torch.local_state.image import read_local_state
from ttp.adapters.torch.loop.post_step_state import PostStepState
from ttp.adapters.torch.loop.repeating import Repeating
from ttp.adapters.torch.restoring.kept import Kept, UnlikeError
from ttp.adapters.torch.restoring.reader import load, read_values
from ttp.adapters.torch.restoring.restore import Restored, restore_into
from ttp.adapters.torch.restoring.transfer import give, receive
from ttp.adapters.torch.saving.piece_index import items_of
from ttp.adapters.torch.sharding.dtensor_chunks import is_distributed
from ttp.adapters.torch.sharding.exchange import connected, gather_bytes
from ttp.adapters.torch.sharding.names import module_tensors
from ttp.adapters.torch.sharding.sharding import Sharding
from ttp.adapters.torch.source import TorchSource
from ttp.core.layout import Rank, Version
from ttp.core.rank.kept_state import Origin, givers, why_not_adopted
from ttp.core.restore_choice import agree
from ttp.core.restore_messages import Candidate, RestoreView
from ttp.errors import RestoreError, TtpError
from ttp.processor.local_state.local_piece import ranks_kept, why_lost
from ttp.store.encoding import decode, encode
from ttp.store.manifest import Manifest

if TYPE_CHECKING:
    from ttp.processor.kept_state import KeptState

log = logging.getLogger("ttp.adapters.torch")

TRANSFER_BYTES = 100 << 20
"""Ranks send states to each other only if the checkpoint has at least so many bytes: a smaller one, which this host has
just written, is read as fast as it could be sent."""


class Restoring(abc.ABC):
    """The part of ``TorchAdapter`` that restores its objects. The attributes are described there."""

    _model: nn.Module
    _optimizer: Optimizer
    _schedulers: list[Any]
    _scaler: Any
    _extra: ExtraState
    _capture: LocalCapture
    _source: TorchSource
    _post_step: PostStepState | None
    _resumed: bool
    start: Repeating | None = None
    """The broken call, if ranks stay in their loops: rank-local state is put back to the beginning of that call."""

    @abc.abstractmethod
    def sharding(self, world_size: int) -> Sharding:
        """Return how the state is spread over the ranks."""

    def agree_without_controller(self, found: tuple[Candidate, ...], skipped: tuple[str, ...]) -> Candidate | str:
        """Agree on a checkpoint through the default process group; without one this rank decides alone."""
        mine = RestoreView(Rank(0), found, skipped)
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return agree([mine])
        return agree(_gather_views(mine))

    def load(self, checkpoint: Path, rank: int, world_size: int, *, protected: bool) -> Version:
        """Load a verified checkpoint into the registered objects.

        Raises:
            CheckpointError: the checkpoint belongs to another model, or cannot be read. Nothing has been changed then.
        """
        return self._load(checkpoint, Manifest.load(checkpoint), rank, world_size, protected=protected)

    def load_going_on(
        self,
        checkpoint: Path,
        rank: int,
        world_size: int,
        state: KeptState,
        verify: Callable[[], None],
    ) -> Version:
        """Load a checkpoint where survivors go on in their processes, with tensors from memory as far as possible.

        Tensors that a rank has in memory, or gets from another rank, are not read. All ranks call this with the same
        checkpoint, and meet in it. First they verify all of the checkpoint together, because every rank reads rates,
        schedules, random streams and buffers from it.

        Args:
            checkpoint: the checkpoint on which all ranks agreed, as its digest shows.
            rank: this rank.
            world_size: number of ranks of the job.
            state: the state of this rank from when all stopped, or why it has none; it is emptied.
            verify: raises if this rank's share of the checkpoint is not whole.

        Raises:
            RestoreError: the checkpoint is not whole, as this or another rank has found.
            CheckpointError: see ``load``.
            RuntimeError: another rank is lost.
        """
        began = time.monotonic()
        manifest = Manifest.load(checkpoint)
        _together(verify, world_size)
        try:
            kept, way = self._brought(*state.take(), manifest, rank, world_size)
            version = self._load(checkpoint, manifest, rank, world_size, protected=True, kept=kept)
        except UnlikeError as problem:
            way = f"read from the checkpoint ({problem})"
            kept = None
        if kept is None:  # outside of the except block, which keeps the objects in the error's traceback alive
            version = self._load(checkpoint, manifest, rank, world_size, protected=True)
        state.say(f"its state was {way}, in {time.monotonic() - began:.3f} s")
        return version

    def _brought(self, kept: Kept | None, why: str, manifest: Manifest, rank: int, world_size: int) -> tuple[Kept, str]:
        """Return the state that this rank kept or received, and a text about it. Ranks with a state send it to others.

        Raises:
            UnlikeError: there is none, so the checkpoint has to be read; the text says why.
        """
        committed = Origin(manifest.version, manifest.incident)
        if kept is not None and (why := self._why_not(kept, committed, manifest, rank, world_size)):
            kept = None
        several = connected(world_size) and not self._source.on_device  # no device's state is sent so far
        if several and (manifest.size >= TRANSFER_BYTES or several_hosts(world_size)):
            said = gather_bytes(b"1" if kept is not None else b"0")
            holders = [Rank(other) for other, word in enumerate(said) if word == b"1"]
            plan = givers(self.sharding(world_size).layout, holders)
            for other in [other for other, giver in plan.items() if giver == rank and kept is not None]:
                assert kept is not None
                give(kept, other)
            if Rank(rank) in plan:
                received = receive(plan[Rank(rank)])
                if why := self._why_not(received, committed, manifest, rank, world_size):
                    raise UnlikeError(why)
                return received, f"received from rank {plan[Rank(rank)]} ({received.size} bytes)"
        if kept is None:
            raise UnlikeError(why)
        return kept, f"kept ({kept.size} bytes)"

    def _why_not(self, kept: Kept, committed: Origin, manifest: Manifest, rank: int, world_size: int) -> str:
        """Return why a kept state may differ from the checkpoint's; empty: only the tables are left to compare."""
        if not self._same_places(manifest, world_size):
            return "the checkpoint is of another world"
        if rank not in ranks_kept(manifest.pieces):
            return "the checkpoint has no random streams and buffers of this rank"
        return why_not_adopted(kept.origin, committed)

    def _load(
        self,
        checkpoint: Path,
        manifest: Manifest,
        rank: int,
        world_size: int,
        *,
        protected: bool,
        kept: Kept | None = None,
    ) -> Version:
        elsewhere = self.sharding(world_size).elsewhere() if connected(world_size) else ()
        restored = restore_into(
            checkpoint,
            manifest,
            model=self._model,
            optimizer=self._optimizer,
            scheduler=self._schedulers,
            scaler=self._scaler,
            elsewhere=elsewhere,
            kept=kept,
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
        if self._post_step is not None:
            self._post_step.restored(restored.version)
        for fence in (self._source.begun, self._source.finished):
            fence.record(restored.version)
        self._source.base = Version(restored.version)
        self._source.forget_images()
        if protected:
            self._capture.capture(restored.version, final=True)
        return Version(restored.version)

    def _load_modules(self, checkpoint: Path, manifest: Manifest) -> None:
        """Load averages of the weights and other modules that were given as extra state."""
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
        """Load the rank-local state and return notes. In another layout it is made anew: see docs/concepts.md."""
        if self.start is not None:
            self.start.put_back(self._capture)
            return []
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
        """Return a number by which the random streams of ranks differ, in addition to their seeds.

        It is 0 if there are several shards, because ranks of one tensor-parallel group have to draw the same.
        """
        several = connected(world_size) and len(self.sharding(world_size).layout.groups) > 1
        return 0 if several else rank

    def _same_places(self, manifest: Manifest, world_size: int) -> bool:
        """Return whether each rank holds the shards that the rank of the same number held in the job that saved."""
        if world_size != manifest.world_size or not connected(world_size):
            return world_size == manifest.world_size
        here = self.sharding(world_size).layout.groups.values()
        return {tuple(ranks) for ranks in manifest.groups.values()} == set(here)


def _together(verify: Callable[[], None], world_size: int) -> None:
    """Verify a checkpoint on all ranks, each its share; raise on all what one of them finds wrong."""
    if not connected(world_size):
        verify()
        return
    wrong = ""
    try:
        verify()
    except TtpError as problem:
        wrong = str(problem)
    found = [text for said in gather_bytes(encode(wrong)) if (text := decode(said))]
    if found:
        raise RestoreError(found[0])


def several_hosts(world_size: int) -> bool:
    """Return whether some ranks are on other hosts, as far as the launcher says: their files are not in memory here."""
    return os.environ.get("LOCAL_WORLD_SIZE", str(world_size)) != str(world_size)


def reseed(version: int, rank: int) -> None:
    """Set new random streams that depend only on the job's seed, the version and the rank."""
    seed = (torch.initial_seed() * 1_000_003 + version * 7919 + rank) % (1 << 63)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


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
