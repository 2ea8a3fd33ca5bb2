"""What ttp registers on modules and optimizers of the program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

_compiler: Any = torch.compiler


class Hook:
    """A hook that stays with the object it was registered on: in copies and pickles of that it does nothing.

    A copy of a model (an average of its weights, a checkpoint of the whole module) is not the model that is trained: it
    may not report into the job, nor carry the job with it.

    Args:
        call: what to do.
        traced: ``torch.compile`` may look into it. If not, it is called as it is also in what is compiled: a graph that
            has it in it is broken there. Takes half a microsecond.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any], *, traced: bool = True) -> None:
        self._call = call if traced else _compiler.disable(call)

    def __call__(self, *args: Any) -> Any:
        """Called by torch."""
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """As something that takes any arguments and returns None; a file with it in it is read without ttp."""
        return getattr, (contextlib.nullcontext(), "__exit__")
