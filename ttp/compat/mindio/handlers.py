"""Call the program's handlers with the original's arguments, which differ between torch and MindSpore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ttp.compat.mindio.values import for_mindspore
from ttp.mindio.handlers import Call, HandlerKind

Handler = Callable[..., Any]


def check_callable(what: str, func: Handler) -> None:
    """Check the handler for ``what``.

    Raises:
        TypeError: ``func`` cannot be called.
    """
    if not callable(func):
        raise TypeError(f"the handler for {what} is not callable: {func!r}")


class Handlers:
    """The handlers of a program, and the arguments that the program sets for them."""

    def __init__(self) -> None:
        self.args: Any = None
        """The value given to ``tft_set_step_args``, or the arguments of the decorated function."""
        self.version = ""
        """The value given to ``set_mindio_export_version``."""
        self.decrypt: Callable[[str], str] | None = None
        self._known: dict[HandlerKind, tuple[Handler, Any]] = {}

    def add(self, kind: HandlerKind, func: Handler, ctx: Any) -> None:
        """Register ``func`` as the handler of a kind.

        Raises:
            TypeError: ``func`` cannot be called.
        """
        check_callable(kind.name.lower(), func)
        self._known[kind] = func, ctx

    def kinds(self) -> list[HandlerKind]:
        """Return the kinds that have a handler to call. The exit handler of a torch program is never called."""
        return [kind for kind in self._known if kind is not HandlerKind.EXIT or for_mindspore()]

    def call(self, call: Call) -> int | None:
        """Call the program's handler, and return the result of a CLEAN handler; None for other kinds."""
        func, ctx = self._known[call.kind]
        returned = func(*self._arguments(call, ctx))
        return int(returned) if call.kind is HandlerKind.CLEAN and returned is not None else None

    def _arguments(self, call: Call, ctx: Any) -> tuple[Any, ...]:
        args = self.args
        table: dict[HandlerKind, Callable[[], tuple[Any, ...]]] = {
            HandlerKind.SAVE: lambda: (call.step, call.as_save_info(), args, ctx),
            HandlerKind.RENAME: lambda: (call.step, ctx if for_mindspore() else args),
            HandlerKind.EXIT: lambda: (ctx,),
            HandlerKind.STOP: lambda: (args, ctx),
            HandlerKind.CLEAN: lambda: (call.memory_error, args, ctx),
            HandlerKind.REPAIR: lambda: (
                call.step, call.rebuild, list(call.error_ranks), call.as_repair_info(), args, ctx,
            ),
            HandlerKind.ROLLBACK: lambda: (call.step, args, ctx),
            HandlerKind.REBUILD: lambda: (list(call.error_ranks), args, ctx),
            HandlerKind.STREAM_SYNC: lambda: (),
        }  # fmt: skip
        return table[call.kind]()
