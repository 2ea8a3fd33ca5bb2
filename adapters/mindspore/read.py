"""Loads a power-off checkpoint into a network: the replica that was saved for this rank, and its rank-local state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mindspore as ms

from ttp.adapters.mindspore.constraints import SLICING, parallel_mode
from ttp.adapters.mindspore.local_state import BEGAN, STREAMS, LocalCapture, LocalState, Position, decode, digest_of
from ttp.adapters.mindspore.memory import Memory
from ttp.adapters.mindspore.source import JOB_KIND, SHARD_KIND
from ttp.core.layout import Shard
from ttp.errors import CheckpointError, OtherModelError, ToldAs
from ttp.processor.local_state.local_piece import UpdateChanges, is_provisional, read_local_image, why_lost
from ttp.store import encoding
from ttp.store.manifest import Manifest
from ttp.store.plain_file import read_plain

_NO_RANK = -1
_BEHIND = "rank {} died before the end of its step to version {}, so this may not be its state of that version: {}"
_OTHER = "on rank {} it had another value than on the rank that saved, which is the one restored here: {}"
"""Notes on rank-local state."""


def file_for(manifest: Manifest, rank: int, world_size: int) -> str:
    """Return the path of the file with the shard of ``rank``, relative to the checkpoint.

    Raises:
        CheckpointError: no MindSpore job wrote the checkpoint, or it is cut for another number of ranks.
    """
    if manifest.framework != "mindspore":
        raise CheckpointError(f"version {manifest.version} was written by {manifest.framework}, not by MindSpore")
    shards = [shard for shard, ranks in manifest.groups.items() if rank in ranks]
    if len(manifest.groups) == 1:
        shards = list(manifest.groups)  # the whole state, which every rank can load, whatever their number
    elif world_size != manifest.world_size or len(shards) != 1:
        raise CheckpointError(
            f"version {manifest.version} was saved by {manifest.world_size} ranks in {len(manifest.groups)} slices, "
            f"and this job has {world_size} ranks: convert the checkpoint with `ttp reshard`, or start the same number "
            "of ranks"
        )
    files = [p.file for p in manifest.pieces if p.kind == SHARD_KIND and Shard(p.shard) == shards[0]]
    if len(files) != 1:
        raise CheckpointError(f"version {manifest.version} has {len(files)} files of {shards[0]} instead of 1")
    return files[0]


def load_into(
    memory: Memory, capture: LocalCapture, checkpoint: Path, manifest: Manifest, rank: int, world_size: int
) -> tuple[Position, list[str]]:
    """Set every parameter and the rank-local state from the checkpoint.

    Returns:
        The position in the data at which the checkpoint's version was finished, and notes for the log on state that
        was not restored.

    Raises:
        OtherModelError: the checkpoint does not fit the network. Unless it is the rank-local state that does not fit,
            nothing has been changed.
        CheckpointError: a part of it cannot be read or restored.
    """
    file = checkpoint / file_for(manifest, rank, world_size)
    with ToldAs(CheckpointError, f"{file} cannot be read by MindSpore", ValueError):
        values = ms.load_checkpoint(str(file), crc_check=True)
    _check_fits(memory, values, file)
    position = _position(checkpoint, manifest, values)
    same_world = world_size == manifest.world_size
    image = read_local_image(checkpoint, manifest.pieces, rank) if same_world else None
    local, notes = None if image is None else decode(image), list[str]()
    if local is not None and is_provisional(manifest.pieces, rank):
        saved = {**local.unchanged, **{name: digest_of(data) for name, (_, _, data) in local.beside.items()}}
        local, behind = _with_peers(checkpoint, manifest, rank, local)
        behind = [name for name in behind if name == STREAMS or saved[name] != digest_of(_bytes_of(values[name]))]
        more = f" and {len(behind) - 5} more" if len(behind) > 5 else ""
        notes = [_BEHIND.format(rank, manifest.version, ", ".join(behind[:5]) + more)] if behind else []
    other = []
    memory.again()
    for name, held in memory.held.items():
        as_began = "" if local is None else local.unchanged.get(name, "")
        if not as_began or digest_of(held.memory) != as_began:
            memory.parameter(name).set_data(values[name].value())
            other += [name] * (as_began not in ("", digest_of(_bytes_of(values[name]))))
    if local is not None:
        notes += [_OTHER.format(rank, ", ".join(other[:5]))] * bool(other)
        return position, notes + capture.restore(local)
    why = why_lost(manifest.pieces, rank) if same_world else f"{manifest.world_size} ranks saved, {world_size} restore"
    return position, [
        f"the rank-local state of rank {rank} was not saved ({why}): its random streams are not restored, and state "
        "that differs between ranks (BatchNorm's averages) is that of the rank that saved"
    ]


def _with_peers(checkpoint: Path, manifest: Manifest, rank: int, own: LocalState) -> tuple[LocalState, list[str]]:
    """Return the state of a rank that died in its step, with what the rest of the step has made of it on replicas.

    Such state is an average or a loss scale that a callback changes after the update, or gradients that are set to zero
    there. A replica whose state was equal before tells what it became; without one, replicas that agree do. If the rank
    had not finished its forward pass, a replica whose state was equal when the step began tells of what only forward
    passes change (counters).

    Returns:
        The state, and the names of what may not be that of the version.
    """
    pieces = manifest.pieces
    mine = {*own.beside, *own.unchanged, STREAMS}
    changes = UpdateChanges(pieces)
    asked, lender = [name for name in changes.names if name in mine], changes.lender  # not of other stages
    replicas = next(set(ranks) for ranks in manifest.groups.values() if rank in ranks)
    equal = {name: giver for name in asked if (giver := lender(name, rank, replicas)) is not None}
    agreed = {name: giver for name in asked if (giver := lender(name, _NO_RANK, replicas)) is not None}
    began = {name: lender(BEGAN + name, rank, replicas) for name in own.beside if not own.passed}
    early = {name: giver for name, giver in began.items() if giver is not None}
    givers = {name: giver for name, giver in (early | agreed | equal).items() if name != STREAMS or name in equal}
    images = {giver: read_local_image(checkpoint, pieces, giver) for giver in {*givers.values()}}
    states = {giver: decode(image) for giver, image in images.items() if image is not None}
    taken = {name: state for name, giver in givers.items() if (state := states[giver].beside.get(name)) is not None}
    unchanged = {name: digest for name, digest in own.unchanged.items() if name not in taken}
    streams = states[givers[STREAMS]] if STREAMS in givers else own
    known = asked if own.passed and STREAMS in asked else mine
    beside = {**own.beside, **taken}
    found = replace(own, host=streams.host, stream=streams.stream, beside=beside, unchanged=unchanged)
    return found, sorted(set(known) - equal.keys())


def _bytes_of(value: Any) -> bytes:
    return bytes(value.asnumpy().tobytes())


def _position(checkpoint: Path, manifest: Manifest, values: Mapping[str, Any]) -> Position:
    """Return the position from the job state; from the rank's file if ``ttp reshard`` made it, which copies it there.

    Raises:
        CheckpointError: it is missing, or cannot be read.
    """
    files = [p.file for p in manifest.pieces if p.kind == JOB_KIND]
    try:
        if files:
            found = encoding.decode(read_plain(checkpoint / files[0]))
            return Position(int(found["epoch"]), int(found["step"]), int(found["batch_num"]))
    except (OSError, encoding.EncodingError, LookupError, TypeError, ValueError) as problem:
        raise CheckpointError(
            f"the job state of {checkpoint}, with the position in the data, cannot be read: {problem}"
        ) from problem
    if "step_num" not in values:
        raise CheckpointError(f"{checkpoint} does not tell its position in the data: its files have no entry step_num")
    return position_in(values)


def position_in(values: Mapping[str, Any]) -> Position:
    """Return the position that the entries of a file tell, as ``load_checkpoint`` returns them; absent ones are 0."""
    found = [values.get(name) for name in ("epoch_num", "step_num", "batch_num")]
    return Position(*(0 if value is None else int(value.asnumpy().item()) for value in found))


def _check_fits(memory: Memory, values: dict[str, Any], file: Path) -> None:
    absent = [name for name in memory.held if name not in values]
    if absent:
        raise OtherModelError(f"{file} belongs to another network: it has no {', '.join(absent[:5])}")
    for name, held in memory.held.items():
        found = values[name]
        if (str(found.dtype), tuple(found.shape)) != (held.dtype, held.shape):
            if parallel_mode() in SLICING and _is_slice(tuple(found.shape), held.shape):
                raise OtherModelError(
                    f"{file} has a slice of {name}, {list(found.shape)}, and this network has the whole parameter, "
                    f"{list(held.shape)}: the network is not compiled yet. Call model.infer_train_layout(dataset), or "
                    "network.compile(*inputs), before restore()"
                )
            raise OtherModelError(
                f"{file} belongs to another network: {name} is {found.dtype}{list(found.shape)} there and "
                f"{held.dtype}{list(held.shape)} here"
            )


def _is_slice(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(part) == len(whole) and all(p and not w % p for p, w in zip(part, whole, strict=True))
