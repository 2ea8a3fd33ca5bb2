"""Saves the state of one rank of a MindSpore job: a file as of ``mindspore.save_checkpoint``, pages, and job state."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ttp.adapters.mindspore.local_state import (
    BEGAN,
    STREAMS,
    LocalCapture,
    LocalState,
    Position,
    decode,
    digest_of,
    digests,
)
from ttp.adapters.mindspore.memory import Memory, ParameterMemory
from ttp.core.decide import How
from ttp.core.layout import Rank, Shard, Version
from ttp.core.messages import Phase, Piece, SaverOrder, ShardDigest
from ttp.errors import CheckpointError
from ttp.mindspore_files.ckpt_writer import TensorToWrite, number, write_entries
from ttp.mindspore_files.group_info import NAME, encode_group_info
from ttp.processor.local_state.local_piece import Change, Pages, write_local_piece
from ttp.processor.paged_source import PagedSource
from ttp.processor.sampling import BAD_MAX, blocks_of
from ttp.processor.source import Cancelled
from ttp.store.durable import sync_directory
from ttp.store.encoding import encode
from ttp.store.piece_file import piece_file, write_piece

if TYPE_CHECKING:
    from ttp.processor.processor import Processor

log = logging.getLogger("ttp.adapters.mindspore")

FIRST_CHANGE = (
    "%s had not changed since training began, and has changed after version %d: its value of that version is lost, and "
    "the checkpoint has the present one"
)
"""Log message for a parameter that is neither trained nor in the page."""

SHARD_KIND = "shard"
JOB_KIND = "job"
GROUP_KIND = "group_info"
"""Kinds of pieces in the manifest: a rank's parameters, the job state, and the ranks that may load a file."""
CALLBACKS_S = 10.0
"""Seconds that a save waits for the callbacks of a step. The grace period of a cluster has to suffice for it."""

SCALES = ("scale_sense", "loss_scale")
"""Names of the dynamic loss scale in MindSpore's step cells."""

SaveFunction = Callable[[Any, dict[str, Any]], Any]
"""``ckpt_save_fn(cb_params, append_dict)`` of ``TrainFaultTolerance``."""


class MindSporeSource(PagedSource):
    """The state source of a MindSpore training; see ``StateSource``. Made by ``MindSporeAdapter``.

    Args:
        memory: the parameters of the training network.
        capture: captures the rank-local state.
        replicated: names of the parameters, including the optimizer's state, that must be equal on replicas.
    """

    framework = "mindspore"

    def __init__(self, memory: Memory, capture: LocalCapture, replicated: Sequence[str]) -> None:
        super().__init__(capture)
        self._memory, self._capture, self._replicated = memory, capture, tuple(replicated)
        self.in_step = False
        """Whether the step that made the last update is still running."""
        self.preimage: Any = None
        self.save_fn: SaveFunction | None = None
        self.cb_params: Any = None
        """MindSpore's parameters of callbacks, for ``save_fn``."""
        self.earlier_steps = 0
        """Steps before the ``Model.train`` of ``cb_params``, which counts only its own."""
        self.epochs_ahead: int | None = None
        """With ``dataset_sink_mode``, in which MindSpore counts each step as an epoch: epochs less steps."""
        self.loss_scale = 1.0

    def connect(self, processor: Processor) -> None:
        """Set the processor of this rank, to which updates are reported from now on."""
        self._processor = processor

    # ------------------------------------------------------------------------------------------------ StateSource

    @property
    def has_preimage(self) -> bool:
        """See ``StateSource``."""
        if self._processor is None or self.preimage is None:
            return False
        state = self._processor.gate.state()
        if state.phase is Phase.UPDATING:
            return False
        return bool(self.preimage.version == state.version - (state.phase is not Phase.TORN))

    def gradient_ready(self) -> bool:
        """Return whether this rank stands at the gate, where it holds all reduced gradients for its update."""
        return self._processor is not None and self._processor.gate.state().parked

    def inspect(self, version: Version) -> tuple[tuple[ShardDigest, ...], tuple[str, ...]]:
        """See ``StateSource``."""
        if self._processor is None or self._processor.config.digest == "off" or not self._memory.on_host:
            return (), ()
        shards = self._processor.layout.shards_of(Rank(self._processor.env.rank))
        try:
            held = [self._memory.of(name) for name in self._replicated]
            digest, bad = inspected(held, version, self._processor.config.digest)
        except Exception as problem:
            log.warning("version %s was not compared with other replicas: %s", version, problem)
            return tuple(ShardDigest(shard, "") for shard in shards), ()
        size = sum(h.memory.nbytes for h in held)
        return tuple(ShardDigest(shard, digest, size) for shard in shards), bad

    @property
    def post_step_s(self) -> float:
        """Seconds that a save waits for the end of the step, whose callbacks may evaluate the network.

        A step does not end if it has raised, or waits at the gate again.
        """
        stays = self.processor.broken or self.processor.gate.state().parked
        return super().post_step_s if stays else CALLBACKS_S

    def wait_post_step(self, cancelled: Callable[[], bool]) -> None:
        """See ``PagedSource``. Warns if the step has not ended."""
        super().wait_post_step(cancelled)
        if self.in_step:
            log.warning(
                "the last step has not ended within %g s, so it is saved as it was before its callbacks: what they had "
                "changed after the update, such as an average of the weights, is not in the checkpoint",
                self.post_step_s,
            )

    def post_step_done(self) -> bool:
        """Return whether the step of the last update has ended."""
        return not self.in_step

    def write_pieces(
        self, *, order: SaverOrder, version: Version, draft: Path, generation: int, cancelled: Callable[[], bool]
    ) -> list[Piece]:
        """See ``StateSource``."""
        undo = order.how is How.UNDO
        if not undo:
            self.wait_post_step(cancelled)
        local = self._local(version)
        if self.save_fn is not None:
            return self._by_the_program(self.save_fn, order, version, local)
        pieces = []
        for shard in order.shards:
            pieces.append(self._write_rank(draft, shard, order.rank, version, local, undo, cancelled))
            replicas = encode_group_info(self.processor.layout.groups[shard])  # says to MindSpore who may load the file
            pieces.append(write_piece(draft, f"rank_{order.rank}/{NAME}", replicas, GROUP_KIND, order.rank))
        if order.pages:
            file = f"rank_local_{order.rank}_{generation}.msgpack"
            pieces.append(write_local_piece(draft, file, self._pages(order.pages, version), order.rank))
        if order.job_state:
            job = _job_state(version, local.position)
            pieces.append(write_piece(draft, f"job_{generation}.msgpack", job, JOB_KIND, order.rank))
        sync_directory(draft)
        return pieces

    @property
    def saved_elsewhere(self) -> str:
        """See ``StateSource``."""
        return "" if self.save_fn is None else "written by the program's ckpt_save_fn"

    # ----------------------------------------------------------------------------------------------------- details

    def _pages(self, ranks: Sequence[Rank], version: Version) -> Pages:
        """Return the pages of these ranks, and how each object has changed if a rank has changed it after the update.

        Of random streams it is always told. What only the forward pass has changed is told by another name, if it has
        changed equally on all ranks (counters, but not BatchNorm's averages), or if only dead ranks have it here: what
        it was there decides which replicas of other hosts may lend theirs.
        """
        pages, changes = self.read_pages(ranks, version, digests), dict[str, dict[Change, list[int]]]()
        for name, by in pages.changes.items():
            moved = {change for change in by if all(change) and change[0] != change[1]}
            other = name.removeprefix(BEGAN)
            early = len(moved) == 1 or not any(after for _, after in by)
            if name == STREAMS or (moved if other == name else early and other not in changes):
                changes[name] = {change: of_ranks for change, of_ranks in by.items() if change[0]}
        return replace(pages, changes=changes)

    def _local(self, version: Version) -> LocalState:
        """Return the rank-local state that this rank had when the version was finished.

        Raises:
            CheckpointError: this rank's page is missing, so the position of the version in the data is unknown.
        """
        rank = Rank(self.processor.env.rank)
        pages = self.read_pages((rank,), version)
        if rank not in pages.data:
            raise CheckpointError(
                f"rank {rank} has no page, so the position of version {version} in the data is unknown: "
                f"{pages.missing.get(rank, 'it has no page')}"
            )
        return decode(pages.data[rank])

    def _write_rank(
        self,
        draft: Path,
        shard: Shard,
        rank: Rank,
        version: Version,
        local: LocalState,
        undo: bool,
        cancelled: Callable[[], bool],
    ) -> Piece:
        position = local.position
        file = f"rank_{rank}/ttp_rank_{rank}-{position.epoch}_{position.step_in_epoch}.ckpt"
        if cancelled():
            raise Cancelled
        directory = (draft / file).parent
        directory.mkdir(exist_ok=True)
        numbers = self._append_dict(rank, version, local)
        entries = [*self._entries(version, local, undo), *(number(name, value) for name, value in numbers.items())]
        with piece_file(draft / file, self.wrote) as target:
            write_entries(target, entries, cancelled)
            size, digest = target.sync_and_close()
        sync_directory(directory)
        return Piece(file, size, digest, SHARD_KIND, shard, rank)

    def _entries(self, version: Version, local: LocalState, undo: bool) -> Iterator[TensorToWrite]:
        """Yield all parameters with their values of ``version``.

        Values that updates write come from the live memory, or for undo from the pre-image. The other values come from
        the page, or from the live memory if they have not changed since training began.

        Raises:
            CheckpointError: the live memory, or the pre-image, is of another version.
        """
        have = self.processor.gate.version
        if undo:
            kept = self.preimage.of(version)
        elif have != version:
            raise CheckpointError(f"this rank holds version {have}, not version {version}")
        for name, held in self._memory.held.items():
            if name in local.beside:
                memory = memoryview(local.beside[name][2])
            elif undo and name not in local.unchanged:
                memory = kept[name]
            else:
                memory = self._memory.of(name).memory
            if local.unchanged.get(name, "") not in ("", digest_of(memory)):
                log.warning(FIRST_CHANGE, name, version)
            yield TensorToWrite(name, held.dtype, held.shape, memory)

    def _append_dict(self, rank: int, version: int, local: LocalState) -> dict[str, Any]:
        """Return the numbers that MindSpore's TFTRegister adds to a file, except those that are parameters already.

        ``step_num`` counts from the beginning of the first epoch; ``global_step`` is the version.
        """
        found: dict[str, Any] = {
            "epoch_num": local.position.epoch,
            "step_num": local.position.step,
            "cur_rank": rank,
            "batch_num": local.position.batch_num,
            "global_step": version,
            "loss_scale": self._loss_scale(local),
        }
        return {name: value for name, value in found.items() if name not in self._memory.held}

    def _loss_scale(self, local: LocalState) -> float:
        for name in SCALES:
            dtype, _, data = local.beside.get(name, ("", (), b""))
            if dtype == "Float32" and data:  # a parameter of another type is the program's own
                return float(np.frombuffer(data, np.float32)[0])
        return self.loss_scale

    def _by_the_program(
        self, save: SaveFunction, order: SaverOrder, version: Version, local: LocalState
    ) -> list[Piece]:
        if order.shards:
            numbers = self._append_dict(order.rank, version, local)
            if not self._memory.on_host:  # then MindSpore copies on a stream of its own: the usual one may never go on
                numbers["__exception_save__"] = True
            save(self._parameters_at(local.position), numbers)
        return []

    def _parameters_at(self, position: Position) -> Any:
        """Return a copy of ``cb_params`` with the counts at ``position``: training may be further."""
        told = type(self.cb_params)(self.cb_params)
        told.cur_step_num = position.step - self.earlier_steps
        told.cur_epoch_num = position.epoch if self.epochs_ahead is None else told.cur_step_num + self.epochs_ahead
        return told


def _job_state(version: int, position: Position) -> bytes:
    return encode(
        {"version": int(version), "epoch": position.epoch, "step": position.step, "batch_num": position.batch_num},
        "job",
    )


# ----------------------------------------------------------------------------------------------------------- inspection
#
# Comparison of replicas: a digest of the parameters that must be equal on them, and the names of parameters that hold
# NaN or Inf.


def inspected(held: Iterable[ParameterMemory], version: int, mode: str) -> tuple[str, tuple[str, ...]]:
    """Return a digest of the parameters ``held``, of ``version``, and the names of those with NaN or Inf.

    The state must not change during the call. For ``mode`` see ``ttp.processor.sampling``.
    """
    known = sorted(held, key=lambda h: h.name)
    total = sum(h.array.nbytes for h in known)
    digest, bad = xxhash.xxh3_128(), list[str]()
    digest.update(json.dumps([(h.name, h.dtype, list(h.shape)) for h in known]).encode())
    for h in known:
        flat, finite = h.array.reshape(-1), True
        chosen = blocks_of(flat.size, flat.itemsize, total=total, mode=mode, version=version)
        size, count, pitch, start = chosen or (flat.size, 1, max(1, flat.size), 0)
        for at in range(start, start + count * pitch, pitch):
            block = flat[at : at + size]
            digest.update(memoryview(block.view(np.uint8)))
            finite = finite and _finite(block)
        if not finite:
            bad.append(h.name)
    return digest.hexdigest(), tuple(bad[:BAD_MAX])


def _finite(block: Any) -> bool:
    if block.size == 0 or block.dtype.kind in "iub":
        return True
    return bool(np.isfinite(block.astype(np.float32) if block.dtype.kind not in "fc" else block).all())
