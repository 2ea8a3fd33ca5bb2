"""What ttp registers on modules and optimizers of the program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_compiler: Any = torch.compiler
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_tracer: Callable[[], Any] | None = getattr(_eval_frame, "get_eval_frame_callback", None)
"""What looks at each function that is called on this thread, to compile it; None: torch does not say."""


class Hook(partial[Any]):
    """A hook that acts only for the object that it was registered on; in copies and pickles of it, it does nothing.

    A copy of a model (an average of its weights, a checkpoint of the whole module) is not the model that is trained: it
    may not report into the job, nor carry the job with it.

    It is a ``partial`` without arguments, because those cost no call of their own.

    Args:
        call: what to do.
        traced: ``torch.compile`` may look into it. If not, it is called as it is also in what is compiled: a graph that
            has it in it is broken there.
    """

    __slots__ = ()

    def __new__(cls, call: Callable[..., Any], *, traced: bool = True) -> Hook:
        """See the class."""
        return super().__new__(cls, call if traced else _untraced(call))

    def __reduce__(self) -> tuple[Any, ...]:
        """As something that takes any arguments and returns None; a file with it in it is read without ttp."""
        return getattr, (contextlib.nullcontext(), "__exit__")


def _untraced(call: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.disable``, whose wrapper is only gone through where something is compiled or may be."""
    disabled: Callable[..., Any] = _compiler.disable(call)
    is_traced, tracer = _compiler.is_dynamo_compiling, _tracer
    if tracer is None:
        return disabled

    def run(*args: Any) -> Any:
        if is_traced() or tracer() is not None:
            return disabled(*args)
        return call(*args)

    return run
