"""Finds state that a loop changes after its version has ended, so that a checkpoint of that version lacks the change.

Such a change is seen at the next backward pass, but so is one that the next iteration makes at its top (a loader, a
loss that is noted before the backward pass), which a resumed run makes again. The first version tells them apart: what
its iteration changes before its update has ended is no news. What stays as it was until then, and has changed at each
of the next backward passes, is changed behind the step. So no loop is told of what it changes now and then.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from ttp.adapters.torch.local_state.extra_state import ExtraState, path_of
from ttp.adapters.torch.local_state.generators import NumpyGenerator
from ttp.adapters.torch.local_state.head import Section
from ttp.adapters.torch.loop.turns import Turns
from ttp.adapters.torch.sharding.exchange import tells
from ttp.adapters.torch.sharding.names import first_of, parameters_of
from ttp.store.encoding import values_in

log = logging.getLogger("ttp.adapters.torch")

_VERSIONS_WATCHED = 3
_LISTED_MAX = 4
_LATE = (
    "%s changes after optimizer.step(): a checkpoint has it as it was when that step ended, so a run that resumes from "
    "it lacks what the last iteration has changed there, and with a counter of the loop makes that iteration twice. "
    "Change it before loss.backward(). Or call ttp.step_done() at the end of each iteration, and once before the loop, "
    "right after ttp.restore(). If it is the next iteration that sets it, from what ttp.restore() has returned, there "
    "is nothing to do"
)
_GIVEN_AS = (
    "%s changes after optimizer.step(): a checkpoint has it as it was when that step ended, so a run that resumes from "
    "it lacks the last change. Give it to wrap_optimizer() as {}=, which waits for that change, and not as extra_state="
)
_ARGUMENTS: dict[type, str] = {LRScheduler: "scheduler", GradScaler: "scaler"}
_AVERAGE = (
    "%s seems to be an average of the weights, and changes between the end of an update and the next backward pass: a "
    "checkpoint has it as it was when the update ended, and a resumed run lacks the last change. Call ttp.step_done() "
    "after that change, at the end of each iteration, and once before the loop, right after ttp.restore(); or give the "
    "average as an nn.Module. If a resumed run makes the change again (the best weights, kept by an evaluation at the "
    "top of the next iteration), there is nothing to do"
)
_LARGE = ""
"""Stands for the large arrays of a state among its keys, and for the whole of a state that is no dict."""


class LateChanges:
    """Warns, on rank 0, of extra states that the loop changes after ``optimizer.step()``. For the training thread.

    Args:
        extra: the user's objects of ``extra_state``.
        optimizers: the optimizers as the user gave them.
        turns: tells whether the loop declares the end of each version: then it has done what the warning asks for.
    """

    def __init__(self, extra: ExtraState, optimizers: Sequence[Optimizer], turns: Turns) -> None:
        self._extra, self._optimizers, self._turns = extra, optimizers, turns
        self.ended = 0
        """Number of versions that have ended in this launch."""
        self._in_time: set[tuple[str, str]] = set()  # name and key of what changes before its version has ended
        self._late = Counter[tuple[str, str]]()  # how often each has changed after it
        self._looked = set[str]()  # names of objects that were once seen to change after it
        self._told = {*extra.completed}  # names of objects of which nothing more is told

    def changed(self, name: str, late: bool, before: Section, after: Section) -> None:
        """Look at an extra state that has changed since its last capture. Never raises.

        Args:
            name: its name.
            late: whether it has changed since the end of a version.
            before: the state at the last capture.
            after: the state now.
        """
        over = self.ended > _VERSIONS_WATCHED
        if name in self._told or (over and (not late or name in self._looked)):
            return
        with suppress(Exception):  # raised by the object
            keys = _changed_keys(before, after)
            if not keys:  # large arrays are copies, equal to those before
                return
            if isinstance(self._extra.object(name), NumpyGenerator):
                keys = {_LARGE}  # one stream, though it has a key of its own for the half of a draw that is left over
            if not (late and self.ended):
                self._in_time.update((name, key) for key in keys)
                return
            if name not in self._looked:
                self._looked.add(name)
                if self._is_average(name, keys, _changed_sizes(before, after)):
                    self._tell(_AVERAGE, name, ())
                    return
            self._late.update((name, key) for key in keys)
            always = [key for key in keys if self._late[name, key] == _VERSIONS_WATCHED]
            if news := [key for key in always if (name, key) not in self._in_time and not over]:
                thing = self._extra.object(name)
                own = next((argument for kind, argument in _ARGUMENTS.items() if isinstance(thing, kind)), "")
                self._tell(_GIVEN_AS.format(own) if own else _LATE, name, sorted(map(repr, filter(None, news))))

    def _tell(self, text: str, name: str, keys: Sequence[str]) -> None:
        if text is not _AVERAGE and self._turns.by_hand:
            return
        self._told.add(name)
        if tells():
            log.warning(text, path_of(name) + (f" ({first_of(keys, _LISTED_MAX)})" if keys else ""))

    def _is_average(self, name: str, keys: Collection[str], sizes: Collection[int]) -> bool:
        """Return whether what has changed has a tensor for each parameter of an optimizer, but for single numbers."""
        state = self._extra.object(name).state_dict()
        small = state if keys == {_LARGE} and not sizes else [state[key] for key in keys if key in state]
        large = (each for each in tree_leaves(state) if isinstance(each, Tensor) and each.nbytes in sizes)
        moved = {id(each): each for each in (*tree_leaves(small), *large) if isinstance(each, Tensor)}
        held = Counter(each.shape for each in moved.values())
        trained = [
            Counter(p.shape for p in parameters_of(each) if p.requires_grad and p.numel() > 1)
            for each in self._optimizers
        ]
        return any(each and each <= held for each in trained)


def _changed_keys(before: Section, after: Section) -> set[str]:
    """Return the keys of a state, if it is a dict, whose values have changed."""
    old, new = (values_in(memoryview(encoded), len(encoded)) for encoded, _ in (before, after))
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    no_dict = before[0] != after[0] and not changed
    return changed | ({_LARGE} if no_dict or _changed_sizes(before, after) else set())


def _changed_sizes(before: Section, after: Section) -> set[int]:
    """Return the sizes, in bytes, of the large arrays of a state that have changed."""
    known = {stamp for stamp, _ in before[1]}
    return {len(data) for stamp, data in after[1] if stamp not in known}
