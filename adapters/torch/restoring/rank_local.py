"""Restores the state that only one rank has: random streams, buffers, ``extra_state``; see docs/concepts.md."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ttp.adapters.torch.local_state.capture import LocalCapture
from ttp.adapters.torch.local_state.extra_state import ExtraState, path_of
from ttp.adapters.torch.local_state.image import BUFFER, VALUES_MAX, LocalState, name_of, read_local_state
from ttp.adapters.torch.saving.job_state import JobState
from ttp.adapters.torch.sharding.names import first_of
from ttp.core.messages import Piece
from ttp.processor.local_state.local_piece import (
    has_changed,
    is_alone,
    is_provisional,
    lender,
    leveller,
    may_be_behind,
    moves,
    objects_kept,
    why_lost,
)
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
    peers = from_peers(checkpoint, manifest, owner, local)
    if local is None:
        reseed(job.version, number)
        notes = extra.restore({**constant, **peers.extra})
        why = why_lost(manifest.pieces, rank) if same_places else "this job has another layout or number of ranks"
        return [
            *notes,
            f"no rank-local state of rank {rank} was saved ({why}): its random streams are derived from its seed"
            + "".join(f", and extra_state[{name!r}] is that of the replicas that saved theirs" for name in peers.extra),
        ]
    notes = _behind(manifest, owner, local, peers, extra) if is_provisional(manifest.pieces, owner) else []
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


def _behind(manifest: Manifest, rank: int, local: LocalState, peers: LocalState, extra: ExtraState) -> list[str]:
    """Return notes on the state of a rank which died in the update that lacks what the others have changed since."""
    pieces, version, notes = manifest.pieces, manifest.version, []
    own = sorted(local.extra.keys() - peers.extra - extra.completed)
    if behind := [repr(name) for name in own if may_be_behind(pieces, name_of(name))]:
        notes.append(_BEHIND.format(rank, version, ", ".join(behind)))
        givers = _givers(manifest, rank)
        notes += filter(None, (_held_back(manifest, rank, name, local.extra[name], givers) for name in own))
    own = sorted(local.buffers.keys() - peers.buffers)
    if behind := [repr(name) for name in own if has_changed(pieces, BUFFER + name)]:
        notes.append(_BUFFERS_BEHIND.format(rank, version, first_of(behind, _LISTED_MAX)))
    return notes


def _held_back(manifest: Manifest, rank: int, name: str, state: bytes, givers: Mapping[str, int | None]) -> str:
    """Return which values of an object replicas could have lent, and which not; empty if all can be had, or none."""
    lent = _lenders(manifest.pieces, rank, name, state, givers)
    equal, lacking = ([repr(key) for key, giver in lent.items() if (giver is None) == lacks] for lacks in (False, True))
    if not (equal and lacking):
        return ""
    there = checkpoint_name(manifest.version)
    return _HELD_BACK.format(path_of(name), rank, first_of(equal, _LISTED_MAX), first_of(lacking, _LISTED_MAX), there)


def from_peers(checkpoint: Path, manifest: Manifest, rank: int, local: LocalState | None) -> LocalState:
    """Return the objects of ``extra_state`` and the buffers that a rank which died gets from a replica; see ``lender``.

    An average of the weights, for example, is equal on all replicas.
    """
    pieces, extra, buffers = manifest.pieces, dict[str, bytes](), dict[str, Tensor]()
    if local is not None and not is_provisional(pieces, rank):
        return LocalState(b"", {}, {})
    givers, replicas = _givers(manifest, rank), _replicas(manifest, rank)
    alone = [name for name, giver in givers.items() if giver is None and name.startswith(BUFFER)]
    levelled = {name: leveller(pieces, name, replicas) for name in alone}
    givers |= levelled
    why = "they were equal before the update" if local is not None else "it is equal on all replicas that saved it"
    found = {giver: read_local_state(checkpoint, pieces, giver) for giver in {*givers.values()} if giver is not None}
    states = {giver: state for giver, state in found.items() if state is not None}
    for giver, state in states.items():
        for name in (each for each in state.extra if givers.get(name_of(each)) == giver):
            extra[name] = state.extra[name]
            log.info(_OF_A_PEER, manifest.version, f"extra_state[{name!r}]", rank, giver, why)
        for name in (each for each in state.buffers if givers.get(BUFFER + each) == giver):
            buffers[name] = state.buffers[name]
            reason = _LEVELLED if BUFFER + name in levelled else why
            log.info(_OF_A_PEER, manifest.version, f"the buffer {name}", rank, giver, reason)
    for name, own in (local.extra if local is not None else {}).items():
        lent = _lenders(pieces, rank, name, own, givers)
        theirs = {key: states[giver].extra.get(name) for key, giver in lent.items() if giver in states}
        if name not in extra and lent and (whole := _with_values(own, lent.keys(), theirs)) is not None:
            extra[name] = whole
            for key, lends in lent.items():
                log.info(_OF_A_PEER, manifest.version, f"extra_state[{name!r}][{key!r}]", rank, lends, why)
    return LocalState(b"", buffers, extra)


def _givers(manifest: Manifest, rank: int) -> dict[str, int | None]:
    """Return which replica lends its state of each object, value and buffer to a rank that died; None: none does."""
    pieces, replicas = manifest.pieces, _replicas(manifest, rank)
    return {name: lender(pieces, name, rank, replicas) for name in objects_kept(pieces)}


def _replicas(manifest: Manifest, rank: int) -> set[int]:
    """Return the ranks that hold the same shards as ``rank``."""
    held = [ranks for ranks in manifest.groups.values() if rank in ranks]
    return set(range(manifest.world_size)).intersection(*held)


def _lenders(
    pieces: Sequence[Piece], rank: int, name: str, state: bytes, givers: Mapping[str, int | None]
) -> dict[str, int | None]:
    """Return which rank lends each value in the encoded state of an object that the update has changed on any rank.

    None: nobody does, or what the update has made of this rank's value is not known. {}: the update has not changed the
    object on each rank, so that it may not have changed it on this one either.
    """
    keys = values_in(memoryview(state), VALUES_MAX) if moves(pieces, name_of(name)) == {True} else ()
    values = {key: name_of(name, key) for key in keys}
    lent = {key: givers.get(value) for key, value in values.items() if True in moves(pieces, value)}
    return lent | {key: None for key, value in values.items() if is_alone(pieces, value, rank)}


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
