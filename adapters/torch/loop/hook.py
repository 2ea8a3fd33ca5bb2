"""The hook object that ttp registers on modules and optimizers of the program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ttp.adapters.versions import numbers

COUNTED_MIN = (2, 8)
"""Oldest torch whose ``get_eval_frame_callback`` counts the reference that it returns: each call of 2.7 frees one."""

_compiler: Any = torch.compiler
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_tracer: Callable[[], Any] | None = getattr(_eval_frame, "get_eval_frame_callback", None)
"""Returns the callback by which torch compiles functions that this thread calls; None: this torch has no safe call."""
if numbers(torch.__version__) < COUNTED_MIN:
    _tracer = None


class Hook(partial[Any]):
    """A hook that acts only on the object it was registered on: in copies and pickles of that object it does nothing.

    A copy of a model (an average of its weights, a checkpoint of the whole module) is not the trained model: its hooks
    may not report to the processor, nor may a pickle contain the processor.

    It is a ``partial`` without arguments, because calling one costs no extra Python call.

    Args:
        call: the function to call.
        traced: whether ``torch.compile`` may trace ``call``. If not, compiled code calls it uncompiled: the compiled
            graph breaks there.
    """

    __slots__ = ()

    def __new__(cls, call: Callable[..., Any], *, traced: bool = True) -> Hook:
        """Make the hook; see the class for the arguments."""
        return super().__new__(cls, call if traced else _untraced(call))

    @property
    def __name__(self) -> str:
        """Raise a helpful error in ``torch.jit.script``, which asks each hook of a module for its name.

        Raises:
            AttributeError: always, because hooks of this kind have no name.
        """
        raise AttributeError(
            "torch.jit.script() cannot compile a module that has hooks of ttp. Make a new module, load the weights of "
            "this one into it (load_state_dict), and compile that; or use torch.jit.trace() or torch.export"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the hook as a function that takes any arguments and returns None, so that loading it needs no ttp."""
        return getattr, (contextlib.nullcontext(), "__exit__")


def _untraced(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.compiler.disable(call)``, but use its slow wrapper only where torch compiles or may compile."""
    disabled: Callable[..., Any] = _compiler.disable(call)
    is_traced, tracer = _compiler.is_dynamo_compiling, _tracer
    if tracer is None:
        return disabled

    def run(*args: Any) -> Any:
        if is_traced() or tracer() is not None:
            return disabled(*args)
        return call(*args)

    return run
