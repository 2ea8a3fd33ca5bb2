"""Tells whether ``optimizer.step()`` still runs: if it raises, torch calls no post hook, so the stack is read."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import CodeType, FrameType

from torch.optim import Optimizer

from ttp.adapters.torch.sharding.names import parameters_of

_WRAPPER = Optimizer.profile_hook_step(lambda _self: None).__code__
"""The code object of torch's wrapper, which calls the hooks and ``step()``: the same for all classes of optimizers. Its
local variable ``self`` is the optimizer."""

_USUAL = 3
"""Number of frames from ``entered`` up to the wrapper when nothing is compiled."""

_NEAR = 8
"""Number of frames in which a function is looked for above a hook."""


class Stepping:
    """Counts the calls of ``step()`` that run; there are two when a subclass calls ``super().step()``.

    Args:
        optimizers: the optimizers whose calls are counted.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._thread = 0
        self._shows = True  # whether the stack shows the wrapper; a compiled step() has another function there
        self.depth = 0
        """Number of calls that have begun and not returned, as counted by the hooks."""
        self.aside = False
        """Whether the call that runs, or ran last, is no update: see ``creates_state`` and ``changes_nothing``."""
        self._torchs = frozenset(id(each) for each in optimizers if _is_torchs(each))
        self.alone = False
        """Whether the call that runs, or ran last, calls nothing but torch's own code: no hook, no closure."""

    def entered(self, optimizer: Optimizer | None = None, *, aside: bool = False) -> None:
        """Note that ``step()`` begins, without a closure if ``optimizer`` is given; ``aside``: it is no update."""
        if not self.depth:
            self.aside = aside
            self.alone = (
                optimizer is not None
                and id(optimizer) in self._torchs
                and len(optimizer._optimizer_step_pre_hooks) == 1 == len(optimizer._optimizer_step_post_hooks)  # ttp's
            )
            self._thread = threading.get_ident()
            self._shows = sys._getframe(_USUAL).f_code is _WRAPPER or _is_near(sys._getframe())
        self.depth += 1

    def returned(self) -> int:
        """Note that a call of ``step()`` has returned. Returns the number of calls that still run."""
        if self.depth:
            self.depth -= 1
        return self.depth

    def was_left(self, *, entering: bool = False) -> bool:
        """Return whether an exception has ended calls of ``step()``; if so, ``depth`` is corrected. Any thread.

        The stack does not show a compiled ``step()``. In that case a further call of ``step()`` (``entering``) counts
        as one inside of the compiled one, and any other event, which ``step()`` cannot cause, as proof that it has
        ended.

        Args:
            entering: the caller is the hook of a further call of ``step()``, which is on the stack already.
        """
        if not self.depth:
            return False
        running = self._running() - entering if self._shows else self.depth * entering
        if running >= self.depth:
            return False
        self.depth = max(0, running)
        return True

    def _running(self) -> int:
        """Return the number of calls of ``step()`` on the stack of the training thread."""
        frame: FrameType | None = sys._current_frames().get(self._thread)
        found = 0
        while frame is not None:
            if frame.f_code is _WRAPPER and any(frame.f_locals.get("self") is known for known in self._optimizers):
                found += 1
            frame = frame.f_back
        return found


def creates_state() -> bool:
    """Return whether torch's ``get_state_dict()`` or ``set_state_dict()`` makes the step that now begins.

    Both create the state of an optimizer that has none by a step with zeros for gradients and learning rates. It is no
    update. One that keeps no state (SGD without momentum) makes such a step whenever it is asked for its state.
    """
    library = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(library, "_init_optim_state", None), "__code__", None)
    return code is not None and _is_near(sys._getframe(), code)


def changes_nothing(optimizer: Optimizer) -> bool:
    """Return whether a step changes nothing: one of torch's own classes leaves parameters without a gradient alone.

    Loops make such a step before training, so that the first step of a scheduler does not warn. Not if all parameters
    are frozen: then each step of this rank is such a one, and belongs to the version that other ranks make.
    """
    own = type(optimizer).__module__.startswith("torch.optim.")
    parameters = [*parameters_of(optimizer)] if own else []
    return any(each.requires_grad for each in parameters) and all(each.grad is None for each in parameters)


def _is_torchs(optimizer: Optimizer) -> bool:
    """Return whether ``step()`` is torch's, and not one that a program or another library has written."""
    return all(each.__module__.startswith("torch.optim.") for each in (type(optimizer), type(optimizer).step))


def _is_near(frame: FrameType | None, code: CodeType = _WRAPPER) -> bool:
    """Return whether a function, by default the wrapper, is among the nearest callers of a hook."""
    for _ in range(_NEAR):
        if frame is None or frame.f_code is code:
            return frame is not None
        frame = frame.f_back
    return False
