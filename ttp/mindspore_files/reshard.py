"""``ttp reshard``: converts a checkpoint to another number of cards and another parallel strategy.

Before anything is written, everything is checked: the files (by manifest or CRC), the strategies, whether they fit the
files, whether copies that should be equal are equal, and the room on the disk. The ranks of the target are then made
one by one, or several at a time by worker processes, in a draft directory beside the target. Each is checked element by
element against the source. When all are whole, the draft gets the target's name. Neither the source nor anything that
already has the target's name is ever touched.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ttp.core.layout import Rank, Shard, Version
from ttp.core.messages import Piece
from ttp.errors import CheckpointError, UsageError
from ttp.launch.warm.memory import left
from ttp.mindspore_files.reshard_evidence import examine
from ttp.mindspore_files.reshard_evidence import size as evidence_size
from ttp.mindspore_files.reshard_fit import Plan, make_plan
from ttp.mindspore_files.reshard_rank import Made, make_rank
from ttp.mindspore_files.reshard_source import Source, open_newest
from ttp.mindspore_files.reshard_strategy import Strategy, read_strategy
from ttp.store import names
from ttp.store.digest import Progress, Watch
from ttp.store.durable import make_directory, sync_directory, write_durably
from ttp.store.manifest import MANIFEST, Manifest

JOB_BYTES = 200_000_000
"""Resident memory, in bytes and rounded up, of a process that has imported numpy and holds the rows it works on."""

_SHARE = 0.5
"""The share of the free memory that is used if the user does not say how much."""

_SLACK = 1 << 20
"""Bytes that are needed on disk in addition to the tensors."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asks for: what to convert, to which strategy, and with how much memory.

    Args:
        source: directory with ``rank_0``, ``rank_1``, ..., or a ``save_dir``.
        target: directory to make.
        src_strategy: a strategy file, or a directory with one per stage; None: every rank holds everything.
        dst_strategy: the same for the target; None: one file that holds everything.
        ranks: make only these ranks of the target; empty: all.
        jobs: number of worker processes; 1: none, this process does the work.
        memory: how many bytes all jobs together may use; None: half of what is free.
        inference: True: leave out the optimizer's state.
        trust_parts: True: different parts of a tensor may be equal.
    """

    source: Path
    target: Path
    src_strategy: Path | None = None
    dst_strategy: Path | None = None
    ranks: tuple[int, ...] = ()
    jobs: int = 1
    memory: int | None = None
    inference: bool = False
    trust_parts: bool = False


@dataclass(frozen=True, slots=True)
class Resharded:
    """The result of a conversion.

    Args:
        source: the checkpoint that was read.
        target: the directory that was made.
        version: number of finished updates; None: nothing in the source says so.
        ranks: the ranks of the target that were made.
        world_size: number of ranks of the whole target.
        tensors: number of entries of all files together.
        size: of all files, in bytes.
        notes: what was left out, skipped or could not be decided, in words.
    """

    source: Path
    target: Path
    version: int | None
    ranks: tuple[int, ...]
    world_size: int
    tensors: int
    size: int
    notes: tuple[str, ...]


def reshard(wish: Wish, watch: Watch) -> Resharded:
    """Convert a checkpoint to another strategy. Leaves nothing behind if it fails.

    Args:
        wish: what to convert.
        watch: called with what is done and how many bytes that takes; returns a function to call with bytes done.

    Raises:
        UsageError: the wish makes no sense, the target exists, or a strategy is unusable.
        CheckpointError: the files are damaged, are of different steps or do not fit the strategies; the disk is too
            small; writing failed; or the result was wrong.
    """
    _refuse_existing(wish)
    src = None if wish.src_strategy is None else read_strategy(wish.src_strategy)
    dst = None if wish.dst_strategy is None else read_strategy(wish.dst_strategy)
    ranks = _ranks(wish, dst)

    def fit(source: Source) -> tuple[Source, Plan]:
        return source, make_plan(source, src, dst, inference=wish.inference)

    source, plan = open_newest(wish.source, watch, fit)
    _check_name(wish.target, source)
    told = watch("comparing copies", evidence_size(plan))
    remarks = examine(plan, trust_parts=wish.trust_parts, told=told)
    jobs = _affordable_jobs(wish.memory, min(wish.jobs, len(ranks)))
    _check_space(wish.target, plan, ranks)
    files = {rank: file_name(source, rank) for rank in ranks}
    try:
        done = _publish(wish, source, plan, files, jobs, watch)
    except OSError as problem:
        raise CheckpointError(f"{wish.target} cannot be written: {problem}") from problem
    return Resharded(
        source.directory,
        wish.target,
        source.version,
        tuple(ranks),
        plan.world_size,
        sum(made.tensors for made in done),
        sum(made.size for made in done),
        (*source.notes, *plan.notes, *remarks),
    )


def file_name(source: Source, rank: int) -> str:
    """Return the path of a rank's file inside the target: ttp's name for it, with the source's epoch and step."""
    label = "" if source.label is None else f"-{source.label[0]}_{source.label[1]}"
    return f"rank_{rank}/ttp_rank_{rank}{label}.ckpt"


# ------------------------------------------------------------------------------------------------------- beforehand


def _refuse_existing(wish: Wish) -> None:
    taken = [wish.target / f"rank_{rank}" for rank in wish.ranks] if wish.ranks else [wish.target]
    for path in taken:
        if os.path.lexists(path):
            raise UsageError(f"{path} exists, and nothing is written over: name a new directory")
    if wish.jobs < 1:
        raise UsageError(f"--jobs {wish.jobs}: one at least")
    inside = wish.source.resolve() in (wish.target.resolve(), *wish.target.resolve().parents)
    if inside and (wish.source / MANIFEST).is_file():
        raise UsageError(f"{wish.target} is inside the checkpoint {wish.source}, which is not touched")


def _ranks(wish: Wish, dst: Strategy | None) -> list[int]:
    world_size = 1 if dst is None else dst.world_size
    beyond = [rank for rank in wish.ranks if not 0 <= rank < world_size]
    if beyond:
        raise UsageError(f"--rank {beyond[0]}: the target has {world_size} ranks, 0 to {world_size - 1}")
    return sorted(set(wish.ranks)) or list(range(world_size))


def _check_name(target: Path, source: Source) -> None:
    named = names.parse_checkpoint_name(target.name)
    if named is not None and named != source.version:
        raise UsageError(f"{target.name} is the name of step {named}, and the source is of step {source.version}")


def _affordable_jobs(memory: int | None, jobs: int) -> int:
    """Return for how many jobs there is memory, at most ``jobs``."""
    if memory is not None and memory < JOB_BYTES:
        raise UsageError(f"--memory {memory}: a job takes {JOB_BYTES} bytes")
    allowed = int((left() or 0) * _SHARE) if memory is None else memory
    return max(1, min(jobs, allowed // JOB_BYTES))


def _check_space(target: Path, plan: Plan, ranks: Sequence[int]) -> None:
    parent = next(place for place in target.absolute().parents if place.exists())
    passed = sum(next(iter(held.values())).nbytes for held in plan.passed.values())
    needed = sum(sum(entry.piece_bytes for entry in plan.of_rank(rank).values()) + passed for rank in ranks)
    free = shutil.disk_usage(parent).free
    if needed + _SLACK > free:
        raise CheckpointError(f"{parent} has {free} bytes free, and {needed + _SLACK} are needed: nothing was written")


# ------------------------------------------------------------------------------------------------------------- making


def _publish(wish: Wish, source: Source, plan: Plan, files: Mapping[int, str], jobs: int, watch: Watch) -> list[Made]:
    target = wish.target.absolute()
    home = target if wish.ranks else target.parent
    make_directory(home)
    with _draft(home / f".{target.name}.draft-{os.getpid()}") as draft:
        total = 3 * sum(sum(entry.piece_bytes for entry in plan.of_rank(rank).values()) for rank in files)
        done = _make(plan, files, draft, jobs, watch("converting and checking", total))
        for made in done:
            sync_directory((draft / made.file).parent)
        if wish.ranks:
            for made in done:
                _take_name(draft / f"rank_{made.rank}", target / f"rank_{made.rank}")
        else:
            write_durably(draft / MANIFEST, _manifest(wish, source, plan, done).to_json().encode())
            sync_directory(draft)
            _take_name(draft, target)
        sync_directory(home)
    return done


@contextmanager
def _draft(path: Path) -> Iterator[Path]:
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # after publishing there is none


def _take_name(draft: Path, final: Path) -> None:
    """Give a directory a name that nothing has yet. A plain rename would replace somebody's empty directory."""
    try:
        final.mkdir()
    except FileExistsError:
        raise UsageError(f"{final} has come into being meanwhile, and nothing is written over") from None
    try:
        draft.rename(final)
    except OSError:
        with suppress(OSError):
            final.rmdir()
        raise


def _make(plan: Plan, files: Mapping[int, str], draft: Path, jobs: int, told: Progress) -> list[Made]:
    if jobs == 1:
        return [make_rank(plan, rank, draft, file, told) for rank, file in files.items()]
    done: list[Made] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin, initargs=(plan, draft)) as pool:
        waiting = [pool.submit(_make_one, rank, file) for rank, file in files.items()]
        try:
            for future in as_completed(waiting):
                made, count = future.result()
                told(count)
                done.append(made)
        except BrokenProcessPool:
            raise CheckpointError(
                "a worker process died (killed for its memory?), nothing was written: fewer --jobs, less --memory"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
    return sorted(done, key=lambda made: made.rank)


_worker: dict[str, Any] = {}
"""What ``_begin`` stores for ``_make_one`` in a worker process."""


def _begin(plan: Plan, draft: Path) -> None:
    _worker.update(plan=plan, draft=draft)


def _make_one(rank: int, file: str) -> tuple[Made, int]:
    counted: list[int] = []
    made = make_rank(_worker["plan"], rank, _worker["draft"], file, counted.append)
    return made, sum(counted)


def _manifest(wish: Wish, source: Source, plan: Plan, done: Sequence[Made]) -> Manifest:
    """Return a manifest, so that ``ttp verify`` can tell whether the target is whole.

    Each rank is the only rank of its shard.
    """
    old = source.manifest
    shards = {made.rank: Shard(f"rank_{made.rank}") for made in done}
    return Manifest(
        version=Version(source.version or 0),
        run_id=old.run_id if old is not None else "",
        incarnation=old.incarnation if old is not None else 0,
        incident=f"reshard-{source.version or 0}",
        cause="ttp reshard",
        reason=f"made of {source.directory}",
        world_size=plan.world_size,
        groups={shard: (Rank(rank),) for rank, shard in shards.items()},
        framework="mindspore",
        created_unix_s=time.time(),
        pieces=tuple(
            Piece(made.file, made.size, made.digest, "shard", shards[made.rank], Rank(made.rank), "") for made in done
        ),
        extra={
            "resharded": {
                "source": str(source.directory),
                "src_strategy": None if wish.src_strategy is None else str(wish.src_strategy),
                "dst_strategy": None if wish.dst_strategy is None else str(wish.dst_strategy),
                "inference": wish.inference,
            }
        },
    )
