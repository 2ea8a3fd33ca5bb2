"""Being told when somebody calls a method of one object.

The object gets a class of its own, derived from the one it had. An attribute on the object would end up in the
``state_dict()`` of a scheduler, which is its ``__dict__``; a patched class would concern objects that are not ours.
"""

from __future__ import annotations

import copyreg
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("ttp.adapters.torch")


def watch_method(obj: Any, name: str, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Call ``before`` and ``after`` around each ``obj.name(...)``; ``after`` only when it returned.

    Copies and pickles of the object have its own class.

    Args:
        obj: None is fine: nothing is watched.
        name: of the method.
        before: what it raises is logged once and goes no further.
        after: the same.

    Returns:
        A function that undoes it. Where an object does not allow this, nothing is watched.
    """
    if obj is None or name in getattr(obj, "__dict__", {}):
        return _nothing
    original = type(obj)
    watched: Any = type(original.__name__, (original,), _members(original, name, before, after))
    try:
        obj.__class__ = watched
    except TypeError:
        return _nothing

    def undo() -> None:
        if type(obj) is watched:
            obj.__class__ = original

    return undo


def _nothing() -> None:
    pass


def _members(original: type, name: str, before: Callable[[], None], after: Callable[[], None]) -> dict[str, Any]:
    inherited = getattr(original, name)
    reduce: Any = original.__reduce_ex__
    complained = False

    def quietly(call: Callable[[], None]) -> None:
        nonlocal complained
        try:
            call()
        except Exception:
            if not complained:
                complained = True
                log.warning("ttp could not follow %s.%s(); training goes on", original.__name__, name, exc_info=True)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        quietly(before)
        result = inherited(self, *args, **kwargs)
        quietly(after)
        return result

    def reduce_as_original(self: Any, protocol: Any) -> Any:
        reduced = reduce(self, protocol)
        if not isinstance(reduced, tuple):
            return reduced
        function, args, *rest = reduced
        if function is copyreg.__newobj__ and args == (type(self),):  # type: ignore[attr-defined]
            return (copyreg._reconstructor, (original, object, None), *rest)  # type: ignore[attr-defined]
        return reduced

    return {
        name: method,
        "__reduce_ex__": reduce_as_original,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
