"""The argument of handlers, and the kinds of handlers."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ttp.mindio.protocol.messages import Act, RepairWay, RoundKind, TypeRanks


class HandlerKind(enum.Enum):
    """The handlers that a program can register."""

    SAVE = "save"
    RENAME = "rename"
    EXIT = "exit"
    STOP = "stop"
    CLEAN = "clean"
    REPAIR = "repair"
    ROLLBACK = "rollback"
    REBUILD = "rebuild"
    STREAM_SYNC = "stream_sync"


HANDLER_OF = {
    RoundKind.STOP: HandlerKind.STOP,
    RoundKind.CLEAN: HandlerKind.CLEAN,
    RoundKind.REPAIR: HandlerKind.REPAIR,
    RoundKind.ROLLBACK: HandlerKind.ROLLBACK,
    RoundKind.SAVE: HandlerKind.SAVE,
    RoundKind.RENAME: HandlerKind.RENAME,
    RoundKind.SYNC: HandlerKind.STREAM_SYNC,
    RoundKind.REBUILD: HandlerKind.REBUILD,
}


@dataclass(frozen=True, slots=True)
class Call:
    """The only argument of a handler.

    Args:
        kind: the kind of handler.
        step: the version to save, rename, repair to or roll back to.
        lists: for SAVE: for each type of state that this rank saves, the ranks that save it, in the pieces' order.
        memory_error: for CLEAN: whether this rank's device has lost memory.
        rebuild: for REPAIR: whether the state has to be created anew first.
        error_ranks: for REPAIR: the ranks that need the repair; for REBUILD: the ranks whose processes are new.
        way: for REPAIR: the part of this rank.
        types: for REPAIR: state of ``types[i]`` goes from rank ``src[i]`` to rank ``dst[i]``.
        src: see ``types``.
        dst: see ``types``.
        ranks: for REPAIR: all ranks that take part, ascending.
        repair_type: ``retry``, ``recover`` or ``dump``; empty if the call belongs to no repair or save.
    """

    kind: HandlerKind
    step: int = 0
    lists: tuple[TypeRanks, ...] = ()
    memory_error: bool = False
    rebuild: bool = False
    error_ranks: tuple[int, ...] = ()
    way: RepairWay = RepairWay.ROLLBACK
    types: tuple[int, ...] = ()
    src: tuple[int, ...] = ()
    dst: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    repair_type: str = ""

    @classmethod
    def of(cls, kind: HandlerKind, act: Act) -> Call:
        """Return the argument of a handler for an order."""
        return cls(
            kind=kind,
            step=act.version,
            lists=act.lists,
            memory_error=act.memory_error,
            rebuild=act.rebuild,
            error_ranks=act.error_ranks,
            way=act.way,
            types=tuple(t.type for t in act.transfers),
            src=tuple(t.src for t in act.transfers),
            dst=tuple(t.dst for t in act.transfers),
            ranks=act.ranks,
            repair_type=act.purpose,
        )

    def as_save_info(self) -> list[dict[str, Any]]:
        """Return the lists as plain values: ``[{"type": 0, "ranks": [0, 5, 2, 3]}]``."""
        return [{"type": entry.type, "ranks": list(entry.ranks)} for entry in self.lists]

    def as_repair_info(self) -> dict[str, Any]:
        """Return this rank's part of a repair as plain values."""
        return {
            "type": list(self.types),
            "repair_type": int(self.way),
            "src": list(self.src),
            "dst": list(self.dst),
            "rank_list": list(self.ranks),
        }


Handler = Callable[[Call], int | None]
"""A handler. Its result is used for CLEAN only. An exception is a failure."""
