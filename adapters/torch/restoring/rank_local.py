"""Restores the state that only one rank has: random streams, buffers, ``extra_state``; see docs/concepts.md."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ttp.adapters.torch.local_state.capture import LocalCapture
from ttp.adapters.torch.local_state.extra_state import ExtraState, path_of
from ttp.adapters.torch.local_state.image import BUFFER, VALUES_MAX, LocalState, name_of, read_local_state
from ttp.adapters.torch.saving.job_state import JobState
from ttp.adapters.torch.sharding.names import first_of
from ttp.processor.local_state.local_piece import UpdateChanges, is_provisional, why_lost
from ttp.store.encoding import decode, encode, values_in
from ttp.store.manifest import Manifest
from ttp.store.names import checkpoint_name

log = logging.getLogger("ttp.adapters.torch")

_BEHIND = (
    "rank {} died in the update to version {}, so its extra_state ({}) was captured before that update: what the loop "
    "changes there once the last backward pass has begun is one update behind, so change it before loss.backward(). If "
    "it holds the place in the loop or the data, the rank is out of step with the others: keep what differs between "
    "ranks (a mean of its losses) in an object of its own"
)
_BUFFERS_BEHIND = (
    "rank {} died in the update to version {}, so its buffers ({}) were captured before that update, and what the "
    "program has written to them since is lost: no other replica had the same"
)
_HELD_BACK = (
    "{0} of rank {1} did not get the values of {2}, which are equal on its replicas, because no replica has those of "
    "{3} for it, and a part of the values may make a state that the object never had: give {3} as an object of its "
    "own. If the loop finds its place by {2}, the ranks now call different collectives and wait for each other, "
    "without an alarm in the first versions of a launch. In that case stop the job, move {4} out of its directory, and "
    "start the job again, from the checkpoint before it (`ttp list`)"
)
_OF_A_PEER = "restored version %d of %s of rank %d from rank %d: %s"

_LEVELLED = "the update has made it equal on all replicas"
_LISTED_MAX = 4


@dataclass(frozen=True, slots=True)
class Restore:
    """One restore: which checkpoint, and who restores it.

    Args:
        checkpoint: the directory of the checkpoint, whose digests have been verified.
        manifest: its manifest.
        rank: this rank.
        world_size: number of ranks of this job.
        protected: True if ttp is switched on, so that the restored rank-local state is captured.
    """

    checkpoint: Path
    manifest: Manifest
    rank: int
    world_size: int
    protected: bool = True


def load_rank_local(
    restore: Restore, job: JobState, *, same_places: bool, number: int, capture: LocalCapture
) -> list[str]:
    """Load the rank-local state, and return notes for the log. In another layout it is derived anew.

    Args:
        restore: the checkpoint, and who restores it.
        job: the job state of the checkpoint.
        same_places: whether each rank holds the shards that the rank of the same number held in the job that saved.
        number: see ``reseed``.
        capture: loads what the rank itself had captured, and knows the user's objects.

    Raises:
        CheckpointError: the state cannot be read.
        OtherModelError: an object does not accept its state.
    """
    checkpoint, manifest, rank, extra = restore.checkpoint, restore.manifest, restore.rank, capture.extra
    constant = job.extra.get("constant", {})
    owner = rank if same_places else 0
    local = read_local_state(checkpoint, manifest.pieces, owner)
    whole = local is not None and not is_provisional(manifest.pieces, owner)
    replicas = None if whole else Replicas(manifest, owner)
    peers = LocalState(b"", {}, {}) if replicas is None else replicas.lend(checkpoint, local)
    if local is None:
        reseed(job.version, number)
        notes = extra.restore({**constant, **peers.extra})
        why = why_lost(manifest.pieces, rank) if same_places else "this job has another layout or number of ranks"
        return [
            *notes,
            f"no rank-local state of rank {rank} was saved ({why}): its random streams are derived from its seed"
            + "".join(f", and extra_state[{name!r}] is that of the replicas that saved theirs" for name in peers.extra),
        ]
    notes = [] if replicas is None else replicas.behind(local, peers, extra)
    states = {**constant, **local.extra, **peers.extra}
    if same_places:
        return notes + capture.restore(replace(local, extra=states, buffers={**local.buffers, **peers.buffers}))
    reseed(job.version, number)
    return [
        *notes,
        *extra.restore(states),
        f"{manifest.world_size} ranks saved it and {restore.world_size} restore it"
        + (", in another layout" if restore.world_size == manifest.world_size else "")
        + ": extra_state is that of rank 0, random streams are derived from each rank's seed",
    ]


class Replicas:
    """What a checkpoint tells of the state of a rank that died, because other ranks hold the same shards.

    Args:
        manifest: the manifest of the checkpoint.
        rank: the rank.
    """

    def __init__(self, manifest: Manifest, rank: int) -> None:
        self._manifest, self._rank, self._changes = manifest, rank, UpdateChanges(manifest.pieces)
        held = [ranks for ranks in manifest.groups.values() if rank in ranks]
        self._ranks = set(range(manifest.world_size)).intersection(*held)
        names, lender = self._changes.names, self._changes.lender
        self._givers = {name: lender(name, rank, self._ranks) for name in names}  # of objects, values and buffers

    def lend(self, checkpoint: Path, local: LocalState | None) -> LocalState:
        """Return the objects and buffers that the rank gets from a replica, such as an average of the weights.

        ``local``: the state of the rank from before the update; None: none was saved.
        """
        pieces, extra, buffers = self._manifest.pieces, dict[str, bytes](), dict[str, Tensor]()
        alone = [name for name, giver in self._givers.items() if giver is None and name.startswith(BUFFER)]
        levelled = {name: self._changes.leveller(name, self._ranks) for name in alone}
        givers = self._givers | levelled
        why = "they were equal before the update" if local is not None else "it is equal on all replicas that saved it"
        found = {g: read_local_state(checkpoint, pieces, g) for g in {*givers.values()} if g is not None}
        states = {giver: state for giver, state in found.items() if state is not None}
        for giver, state in states.items():
            for name in (each for each in state.extra if givers.get(name_of(each)) == giver):
                extra[name] = state.extra[name]
                self._say_lent(f"extra_state[{name!r}]", giver, why)
            for name in (each for each in state.buffers if givers.get(BUFFER + each) == giver):
                buffers[name] = state.buffers[name]
                self._say_lent(f"the buffer {name}", giver, _LEVELLED if BUFFER + name in levelled else why)
        for name, own in (local.extra if local is not None else {}).items():
            lent = self._lenders(name, own)
            theirs = {key: states[giver].extra.get(name) for key, giver in lent.items() if giver in states}
            if name not in extra and lent and (whole := _with_values(own, lent.keys(), theirs)) is not None:
                extra[name] = whole
                for key, lends in lent.items():
                    self._say_lent(f"extra_state[{name!r}][{key!r}]", lends, why)
        return LocalState(b"", buffers, extra)

    def _say_lent(self, what: str, giver: int | None, why: str) -> None:
        log.info(_OF_A_PEER, self._manifest.version, what, self._rank, giver, why)

    def _lenders(self, name: str, state: bytes) -> dict[str, int | None]:
        """Return which rank lends each value in the encoded state of an object that the update has changed on any rank.

        None: nobody does, or what the update has made of this rank's value is not known. {}: the update has not changed
        the object on each rank, so that it may not have changed it on this one either.
        """
        changes = self._changes
        keys = values_in(memoryview(state), VALUES_MAX) if changes.moves(name_of(name)) == {True} else ()
        values = {key: name_of(name, key) for key in keys}
        lent = {key: self._givers.get(value) for key, value in values.items() if True in changes.moves(value)}
        return lent | {key: None for key, value in values.items() if changes.is_alone(value, self._rank)}

    def behind(self, local: LocalState, peers: LocalState, extra: ExtraState) -> list[str]:
        """Return notes on what in ``local`` lacks the update, unless ``lend`` has returned it as ``peers``."""
        version, notes = self._manifest.version, []
        own = sorted(local.extra.keys() - peers.extra - extra.completed)
        if behind := [repr(name) for name in own if self._changes.moves(name_of(name)) != {False}]:
            notes.append(_BEHIND.format(self._rank, version, ", ".join(behind)))
            notes += filter(None, (self._held_back(name, local.extra[name]) for name in own))
        own = sorted(local.buffers.keys() - peers.buffers)
        if behind := [repr(name) for name in own if self._changes.has_changed(BUFFER + name)]:
            notes.append(_BUFFERS_BEHIND.format(self._rank, version, first_of(behind, _LISTED_MAX)))
        return notes

    def _held_back(self, name: str, state: bytes) -> str:
        """Return which values of an object could have been lent, and which not; empty if all can be had, or none."""
        lent = self._lenders(name, state)
        equal, lacking = ([repr(k) for k, giver in lent.items() if (giver is None) == lacks] for lacks in (False, True))
        if not (equal and lacking):
            return ""
        lists = (first_of(each, _LISTED_MAX) for each in (equal, lacking))
        return _HELD_BACK.format(path_of(name), self._rank, *lists, checkpoint_name(self._manifest.version))


def _with_values(state: bytes, keys: Collection[str], theirs: Mapping[str, bytes | None]) -> bytes | None:
    """Return the encoded state of an object with values of other ranks.

    Args:
        state: its encoded state, a dict.
        keys: the keys of the values that the update has changed.
        theirs: the encoded state of the rank that lends the value, by key.

    Returns:
        None: a value is lent by nobody, or the update has given the state other keys. A part of the values only would
        make a state that the object never had, and perhaps does not accept.
    """
    own = decode(state)
    for key in keys:
        other = theirs.get(key)
        if other is None or (values := decode(other)).keys() != own.keys():
            return None
        own[key] = values[key]
    return encode(own)


def reseed(version: int, number: int) -> None:
    """Seed the random streams of torch, python and numpy from the job's seed, the version and ``number`` only.

    The number differs between ranks that have to draw different numbers, although they may have equal seeds.
    """
    seed = (torch.initial_seed() * 1_000_003 + version * 7919 + number) % (1 << 63)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))
