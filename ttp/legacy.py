"""The function names of the original's first generations: ``ttp_init_controller`` and so on.

For programs that drive the protocol by hand, with save and rename callbacks of their own. They run on the same
controller, processor and machines as ``wrap_optimizer``. Signatures and order of calls follow the vendor's guide for
MindIO TTP; as there, functions return 0 when they worked and 1 when they did not, the registering ones return nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttp import session
from ttp.config import Config, RankEnv
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.messages import Commit, Piece, SaverOrder, ShardDigest
from ttp.errors import TtpError, UsageError
from ttp.launch.controller_process import ensure_controller

log = logging.getLogger("ttp.legacy")

RET_OK = 0
RET_ERROR = 1

SaveHandler = Callable[..., Any]
RenameHandler = Callable[..., Any]


class CallbackSource:
    """A ``StateSource`` whose checkpoints are written by the program's own callbacks.

    The callbacks own the files, so there is no manifest; a commit is the rename callback having returned.
    """

    framework = "callbacks"
    counts_bytes = False
    writes_parts = False
    on_device = False
    has_preimage = False

    def __init__(self) -> None:
        self.save: SaveHandler | None = None
        self.rename: RenameHandler | None = None
        self.args: Any = None
        self.group: tuple[Rank, ...] = ()

    def gradient_ready(self) -> bool:
        """Who stands in ``ttp_start_updating_os`` says that it would write next: it has all that the update needs."""
        return True

    def inspect(self, version: Version) -> tuple[tuple[ShardDigest, ...], tuple[str, ...]]:
        """Nothing is known of the program's state."""
        return (), ()

    def watch_pages(self, changed: Callable[[int, bool], None]) -> None:
        """There are no pages."""

    def settled(self) -> bool:
        """The program says itself when an update is finished."""
        return True

    def device_version(self, version: Version, patience_s: float) -> Version | None:
        """The program ends an update when it has ended."""
        return version

    def write_pieces(
        self, *, order: SaverOrder, version: Version, draft: Path, generation: int, cancelled: Callable[[], bool]
    ) -> list[Piece]:
        """Call the save handler, with ``(save_rank, rank_list, args)`` or ``(save_rank, step, rank_list, args)``."""
        if not order.shards:
            return []
        if self.save is None:
            raise UsageError("no save handler: call ttp_register_save_ckpt_handler() before training")
        four = _positional(self.save) >= 4
        given = (order.rank, version, [order.rank], self.args) if four else (order.rank, [order.rank], self.args)
        named = {} if four or "step" not in inspect.signature(self.save).parameters else {"step": int(version)}
        _check(self.save(*given, **named), "save")
        with contextlib.suppress(OSError):
            draft.rmdir()  # the handlers have places of their own
        return []

    def commit(self, order: Commit) -> tuple[str, int]:
        """Call the rename handler with the checkpoint arguments."""
        if self.rename is None:
            raise UsageError("no rename handler: call ttp_register_rename_handler() before training")
        _check(self.rename(self.args), "rename")
        return f"version {order.version}, written by the program's own handlers", 0

    def on_welcome(self, rank: Rank, incarnation: int, page_dir: Path) -> None:
        """Nothing to do: rank-local state is the callbacks' business."""

    def close(self) -> None:
        """Nothing to give up."""


_source = CallbackSource()
_layout: Layout | None = None
_rank: int | None = None


def ttp_init_controller(rank: int, world_size: int, replica: int = 0, enable_local_copy: bool = False) -> int:
    """This process will start the controller. ``replica`` and ``enable_local_copy`` are accepted and not needed."""
    return RET_OK if 0 <= rank < world_size else RET_ERROR


def ttp_start_controller(bind_ip: str | None, port: int) -> int:
    """Have a controller serve at ``bind_ip:port``, in a process of its own.

    Programs take the address from ``XDL_IP``; where nobody has set that, it is ``MASTER_ADDR``.
    """
    try:
        config = Config.from_env()
        address = bind_ip or os.environ.get("XDL_IP") or os.environ.get("MASTER_ADDR") or "127.0.0.1"
        ensure_controller(address, port, run_dir=config.resolved_run_dir(), token=config.token)
    except TtpError as problem:
        log.error("ttp_start_controller: %s", problem)
        return RET_ERROR
    return RET_OK


def ttp_init_processor(
    rank: int, dp_ranks: Sequence[int], dp_size: int, world_size: int, replica: int = 0, enable_local_copy: bool = False
) -> int:
    """Describe this rank: ``dp_ranks`` hold the same data-parallel state; ``replica`` is the number of shards in it.

    With ``replica`` = k > 1, rank i of the group holds shard i mod k, as the original's ReplicatedOptimizer does.
    """
    global _layout, _rank
    ranks = [int(r) for r in dp_ranks]
    if len(ranks) != dp_size or rank not in ranks:
        log.error("ttp_init_processor: rank %s, dp_ranks %s and dp_size %s do not fit", rank, ranks, dp_size)
        return RET_ERROR
    try:
        _layout, _rank = _layout_of(ranks, dp_size, world_size, max(1, replica)), rank
    except TtpError as problem:
        log.error("ttp_init_processor: %s", problem)
        return RET_ERROR
    return RET_OK


def ttp_start_processor(master_ip: str, port: int) -> int:
    """Join the job at the controller."""
    if _layout is None or _rank is None:
        log.error("ttp_start_processor: call ttp_init_processor() first")
        return RET_ERROR
    try:
        current = session.current()
        # The handlers know where they write: they could not be told of another place.
        current.config = replace(current.config, port=port, fallback_dir=None)
        env = RankEnv.from_env({**os.environ, "MASTER_ADDR": master_ip})
        if env.rank != _rank:
            log.error("ttp_start_processor: RANK=%s is not the rank given to ttp_init_processor (%s)", env.rank, _rank)
            return RET_ERROR
        save_dir = Path(current.config.save_dir or ".").absolute()
        current.start_processor(env, _layout, _source, save_dir)
    except TtpError as problem:
        log.error("ttp_start_processor: %s", problem)
        return RET_ERROR
    return RET_OK


def ttp_register_save_ckpt_handler(handler: SaveHandler) -> None:
    """``handler(save_rank, rank_list, args)`` writes this rank's part of the checkpoint under a temporary name.

    One that takes four arguments gets ``(save_rank, step, rank_list, args)``; one that has a method ``note_args`` is
    shown what ``ttp_set_ckpt_args`` is given.
    """
    _source.save = handler


def ttp_register_rename_handler(handler: RenameHandler) -> None:
    """``handler(args)`` gives the finished checkpoint its name."""
    _source.rename = handler


def ttp_set_ckpt_args(args: Any) -> None:
    """What the handlers get; to be called with the state of the last finished step, once per iteration."""
    note = getattr(_source.save, "note_args", None)
    if note is not None:
        note(args)
    _source.args = args


ttp_set_fm_dump_callback = ttp_register_save_ckpt_handler
ttp_set_fm_rename_callback = ttp_register_rename_handler


def ttp_start_updating_os(backup_step: int = -1) -> int:
    """The optimizer is about to write. Waits while the world is frozen."""
    processor = session.current().processor
    if processor is None:
        return RET_ERROR
    processor.begin_update()
    return RET_OK


def ttp_end_updating_os(step: int) -> int:
    """The optimizer has written: this rank's copy is of ``step``."""
    processor = session.current().processor
    if processor is None:
        return RET_ERROR
    processor.end_update_at(Version(int(step)))
    return RET_OK


def _layout_of(dp_ranks: list[int], dp_size: int, world_size: int, shards: int) -> Layout:
    """Every block of ``dp_size`` ranks like ours; the original describes one block and the others look the same."""
    stride = dp_ranks[1] - dp_ranks[0] if dp_size > 1 else 1
    groups: dict[Shard, tuple[Rank, ...]] = {}
    seen: set[int] = set()
    for first in range(world_size):
        if first in seen:
            continue
        block = [first + i * stride for i in range(dp_size)]
        seen.update(block)
        for shard in range(shards):
            groups[Shard(f"dp{first}.{shard}")] = tuple(Rank(r) for i, r in enumerate(block) if i % shards == shard)
    return Layout(world_size, groups)


def _positional(handler: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds for p in inspect.signature(handler).parameters.values())


def _check(returned: Any, what: str) -> None:
    if returned not in (None, RET_OK, True):
        raise RuntimeError(f"the {what} handler returned {returned!r}")
