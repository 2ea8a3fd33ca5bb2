"""``ttp reshard``: convert a checkpoint to another number of devices and another parallel strategy.

Before anything is written, these are checked: the files (by manifest or CRC), the strategies, whether they fit the
files, whether copies that should be equal are equal, and the free space on the disk. Then the files of the target ranks
are written to a draft directory beside the target, one by one or by several worker processes, and each is compared with
the source element by element. When all are whole, the draft is renamed to the target. The source is never changed, and
an existing target is never overwritten.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
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
from ttp.mindspore_files.target import draft_in, is_inside
from ttp.store import names
from ttp.store.digest import Progress, Watch
from ttp.store.disk import OCCUPIED
from ttp.store.durable import make_directory, sync_directory, write_durably
from ttp.store.manifest import MANIFEST, Manifest

JOB_BYTES = 200_000_000
"""Resident memory of a worker process in bytes, rounded up: Python with numpy, and the rows it works on."""

_SHARE = 0.5
"""Share of the free memory that is used without ``--memory``."""

_SLACK = 1 << 20
"""Number of bytes needed on disk in addition to the tensors."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The options of a conversion.

    Args:
        source: a directory with ``rank_0``, ``rank_1``, ..., or a ``save_dir``.
        target: the directory to create.
        src_strategy: a strategy file, or a directory with one per stage; None if every rank holds the whole model.
        dst_strategy: the same for the target; None for one file with the whole model.
        ranks: the ranks of the target to convert; empty for all.
        jobs: number of worker processes; with 1 this process does the work.
        memory: memory in bytes for all worker processes; None for half of the free memory.
        inference: whether to leave out the optimizer's state.
        trust_parts: whether different parts of a tensor may be equal.
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
        target: the directory that was created.
        version: number of finished updates; None if the source does not tell it.
        ranks: the ranks of the target that were converted.
        world_size: number of ranks of the whole target.
        tensors: number of entries in all files.
        size: size of all files in bytes.
        notes: what was left out or skipped, and what could not be decided, in words.
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
    """Convert a checkpoint to another strategy. If this fails, no file is left behind.

    Args:
        wish: the options.
        watch: is called at the beginning of each activity with its name and number of bytes; returns a function that
            is called with the number of bytes newly done.

    Raises:
        UsageError: the options contradict each other, the target exists, or a strategy cannot be used.
        CheckpointError: the files are damaged, are of different steps or do not fit the strategies; the disk is too
            small; writing failed; or the result was wrong.
    """
    try:
        source, plan, ranks, remarks = _prepare(wish, watch)
    except OSError as problem:
        raise CheckpointError(f"{problem.filename or wish.source} cannot be read: {problem.strerror}") from None
    jobs = _affordable_jobs(wish.memory, min(wish.jobs, len(ranks)))
    try:
        done = _publish(wish, source, plan, {rank: file_name(source, rank) for rank in ranks}, jobs, watch)
    except OSError as problem:
        source.check_unchanged()
        raise CheckpointError(f"{wish.target} cannot be written: {problem}") from problem
    return Resharded(
        source.directory,
        wish.target,
        source.version,
        ranks,
        plan.world_size,
        sum(made.tensors for made in done),
        sum(made.size for made in done),
        (*source.notes, *plan.notes, *remarks),
    )


def _prepare(wish: Wish, watch: Watch) -> tuple[Source, Plan, tuple[int, ...], list[str]]:
    """Check everything that can be checked before anything is written, and plan the conversion.

    Returns:
        The source, the plan, the ranks of the target to make, and remarks: what could not be decided.
    """
    _refuse_existing(wish)
    src = None if wish.src_strategy is None else read_strategy(wish.src_strategy)
    dst = None if wish.dst_strategy is None else read_strategy(wish.dst_strategy)
    ranks = _ranks(wish, dst)

    def fit(source: Source) -> tuple[Source, Plan]:
        return source, make_plan(source, src, dst, inference=wish.inference)

    source, plan = open_newest(wish.source, watch, fit)
    _check_target(wish.target, source)
    told = watch("comparing copies", evidence_size(plan))
    remarks = examine(plan, trust_parts=wish.trust_parts, told=told)
    _check_space(wish.target, plan, ranks)
    return source, plan, ranks, remarks


def file_name(source: Source, rank: int) -> str:
    """Return the path of a rank's file below the target. Its name is ttp's, with the source's epoch and step."""
    label = "" if source.label is None else f"-{source.label[0]}_{source.label[1]}"
    return f"rank_{rank}/ttp_rank_{rank}{label}.ckpt"


# ------------------------------------------------------------------------------------------------------- beforehand


def _refuse_existing(wish: Wish) -> None:
    taken = [wish.target / f"rank_{rank}" for rank in wish.ranks] if wish.ranks else [wish.target]
    for path in taken:
        if _is_taken(path):
            raise UsageError(f"{path} exists, and existing files are never overwritten: name a new directory")
    if wish.jobs < 1:
        raise UsageError(f"--jobs {wish.jobs}: it has to be at least 1")
    if wish.memory is not None and wish.memory < JOB_BYTES:
        raise UsageError(f"--memory {wish.memory}: a worker process needs {JOB_BYTES} bytes")


def _is_taken(path: Path) -> bool:
    """Return whether something other than an empty directory has this name."""
    try:
        return path.is_symlink() or any(path.iterdir())
    except OSError:  # it does not exist, is no directory, or cannot be looked at
        return os.path.lexists(path)


def _ranks(wish: Wish, dst: Strategy | None) -> tuple[int, ...]:
    world_size = 1 if dst is None else dst.world_size
    beyond = [rank for rank in wish.ranks if not 0 <= rank < world_size]
    if beyond:
        raise UsageError(f"--rank {beyond[0]}: the target has {world_size} ranks, 0 to {world_size - 1}")
    return tuple(sorted(set(wish.ranks))) or tuple(range(world_size))


def _check_target(target: Path, source: Source) -> None:
    if source.manifest is not None and is_inside(target, source.directory):
        raise UsageError(f"{target} is inside {source.directory}, a checkpoint, which is never changed: name another")
    named = names.parse_checkpoint_name(target.name)
    if named is not None and named != source.version:
        told = "does not tell its step" if source.version is None else f"is of step {source.version}"
        raise UsageError(f"{target.name} is the name of step {named}, but the source {told}: choose another name")


def _affordable_jobs(memory: int | None, jobs: int) -> int:
    """Return the number of worker processes for which there is memory, from 1 to ``jobs``."""
    allowed = int((left() or 0) * _SHARE) if memory is None else memory
    return max(1, min(jobs, allowed // JOB_BYTES))


def _check_space(target: Path, plan: Plan, ranks: Sequence[int]) -> None:
    parent = next(place for place in target.absolute().parents if place.exists())
    passed = sum(next(iter(held.values())).nbytes for held in plan.passed.values())
    needed = sum(sum(entry.piece_bytes for entry in plan.of_rank(rank).values()) + passed for rank in ranks)
    free = shutil.disk_usage(parent).free
    if needed + _SLACK > free:
        raise CheckpointError(f"{parent} has {free} bytes free, but {needed + _SLACK} are needed: nothing was written")


# ------------------------------------------------------------------------------------------------------------ writing


def _publish(wish: Wish, source: Source, plan: Plan, files: Mapping[int, str], jobs: int, watch: Watch) -> list[Made]:
    target = wish.target.absolute()
    home = target if wish.ranks else target.parent
    existed, taken = home.exists(), list[Path]()
    make_directory(home)
    try:
        with draft_in(home, target.name) as draft:
            total = 3 * sum(sum(entry.piece_bytes for entry in plan.of_rank(rank).values()) for rank in files)
            done = _make(plan, files, draft, jobs, watch("converting and checking", total))
            source.check_unchanged()
            for made in done:
                sync_directory((draft / made.file).parent)
            if not wish.ranks:
                write_durably(draft / MANIFEST, _manifest(wish, source, plan, done).to_json().encode())
                sync_directory(draft)
            parts = {draft / f"rank_{rank}": target / f"rank_{rank}" for rank in wish.ranks} or {draft: target}
            for part, final in parts.items():
                _take_name(part, final)
                taken.append(final)
            sync_directory(home)
    except BaseException:
        for final in taken:
            shutil.rmtree(final, ignore_errors=True)
        if not existed:
            with suppress(OSError):  # another host may be writing there
                home.rmdir()
        raise
    return done


def _take_name(draft: Path, final: Path) -> None:
    """Rename a directory. If ``final`` is an empty directory, it is replaced."""
    try:
        draft.rename(final)
    except OSError as problem:
        if problem.errno not in OCCUPIED:
            raise
        raise UsageError(f"{final} was created meanwhile by another process, and is not overwritten") from None


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
                "a worker process died, perhaps for lack of memory; nothing was written: use fewer --jobs"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
    return sorted(done, key=lambda made: made.rank)


_worker: dict[str, Any] = {}
"""The plan and the draft directory in a worker process: ``_begin`` stores them for ``_make_one``."""


def _begin(plan: Plan, draft: Path) -> None:
    _worker.update(plan=plan, draft=draft)


def _make_one(rank: int, file: str) -> tuple[Made, int]:
    counted: list[int] = []
    made = make_rank(_worker["plan"], rank, _worker["draft"], file, counted.append)
    return made, sum(counted)


def _manifest(wish: Wish, source: Source, plan: Plan, done: Sequence[Made]) -> Manifest:
    """Return a manifest for ``ttp verify``, in which each rank is the only holder of its shard."""
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
