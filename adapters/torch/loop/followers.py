"""Finds parameters that no optimizer trains and that the program changes itself: a teacher, a target network.

A change right after ``optimizer.step()`` belongs to the version, as an average of the weights does. So does a change
inside of a version: after one of its steps, before another one or ``step_done()``. A change in the forward pass, as
some momentum encoders make it, does not: a checkpoint from the middle of an iteration would hold the change already,
and the resumed run would make it once more. No hook reports such changes, so these parameters are compared during the
first updates. Changes before the first update are ignored: layers may still initialise themselves. A large parameter,
or one on a device, may only be written to with the values that it has: then it counts as one that changes, but is not
refused.

Modules that the user gives as ``extra_state`` are compared in the same way: they are read in place when a checkpoint is
written, so their tensors must not change in the forward pass either (the running center of a loss).

Buffers are another matter: the next forward pass changes them too, so they are captured when an update ends, and what
the program writes to them after that belongs to the next version. The log says so if the first updates show it; which
iteration has written them it cannot know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttp.adapters.torch.loop.forward_hooks import ForwardHooks
from ttp.adapters.torch.loop.misuse import capturing
from ttp.adapters.torch.sharding.dtensor_chunks import is_distributed
from ttp.adapters.torch.sharding.names import first_of, parameters_of
from ttp.adapters.torch.tensor_memory import copied_bytes, is_plain, sample_of
from ttp.errors import UsageError

log = logging.getLogger("ttp.adapters.torch")

_UPDATES_WATCHED = 5
_COPIED_BYTES_MAX = 1 << 18
_LISTED_MAX = 3
_WRITTEN = (
    "the program writes to buffers of the model between an update and the next forward pass (%s). A checkpoint has "
    "them as they are when the update ends. If the next iteration writes them, before its forward pass, a resumed run "
    "writes that again, and nothing is lost. If the iteration of the update writes them, as the bias of a load "
    "balance, a resumed run lacks that: call ttp.step_done() at the end of each iteration, and once before the loop, "
    "right after ttp.restore()"
)
_MADE_TWICE = (
    "the program changes %s between ttp.step_done() and the next forward pass. If the next iteration does it, as with "
    "a target network that moves at its top, a checkpoint that is made later in this iteration has the change already, "
    "and a resumed run makes it once more. If the iteration of the update does it, a checkpoint that is made before it "
    "lacks the change. Make it before ttp.step_done()"
)

_State = tuple[Any, Tensor | None]
"""What changes when a parameter is written to, and a sample of its values; None: there is none."""


def untrained(parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return the parameters that are in none of the optimizers, or frozen, by name."""
    trained = {id(p) for p in parameters_of(*optimizers) if p.requires_grad}
    return {name: p for name, p in parameters.items() if id(p) not in trained}


class Followers:
    """Compares parameters that no optimizer trains during the first updates. For the training thread.

    Args:
        model: the registered model; its next forward pass ends the post-step of an update.
        forwards: registers hooks on the forward passes of ``model``.
        parameters: the parameters that no optimizer trains, by name.
        on_host: returns whether a tensor is on the host: only there can its values be compared without waiting for a
            device.
        found: called with the names of parameters that changed inside of a version, or after an update and before the
            next forward pass; and with whether it was after the update.
        beside: returns the tensors of modules beside the model that are read in place too, by name.
        tells: returns whether to log that buffers are written to after an update. On ranks other than the first one
            DistributedDataParallel does it.
    """

    def __init__(
        self,
        model: nn.Module,
        forwards: ForwardHooks,
        parameters: Mapping[str, Tensor],
        on_host: Callable[[Tensor], bool],
        found: Callable[[list[str], bool], None],
        beside: Callable[[], Mapping[str, Tensor]],
        tells: Callable[[], bool],
    ) -> None:
        self._model, self._on_host, self._beside, self._tells = model, on_host, beside, tells
        self._named = {name: p for name, p in parameters.items() if p.numel() and not is_distributed(p)}
        self._found = found
        self.small: list[str] = []
        """The names of small parameters on the host, whose values are compared."""
        room = _COPIED_BYTES_MAX
        for name, parameter in sorted(self._named.items(), key=lambda item: item[1].nbytes):
            if on_host(parameter) and (room := room - parameter.nbytes) >= 0:
                self.small.append(name)
        self._updates = 0
        self._mark: dict[str, _State] | None = None  # the parameters at the last look; None: they are not compared now
        self._entered = False  # a forward pass has begun since the last update
        self._declared = False  # the program has declared the last version done: what changes then has to be logged
        self._warned = False  # that was logged
        self._beside_mark: dict[str, _State] | None = None  # what is beside the model, at the last forward pass
        self._written: dict[str, _State] | None = None  # the buffers at the end of an update, until a forward pass
        # Before hooks of the program, which may change buffers as a part of the forward pass.
        self._removers = [forwards.register(self._uses_buffers)]
        if self._named or beside():
            self._removers.append(forwards.register(self._forward, prepend=False))

    @property
    def all_small(self) -> bool:
        """Whether all the parameters are small ones."""
        return len(self.small) == len(self._named)

    def updated(self, declared: bool) -> bool:
        """Note that an update is finished.

        Args:
            declared: whether to log what changes before the next forward pass: the program has called
                ``ttp.step_done()``.

        Returns:
            Whether to call this method after the next update too.
        """
        if moved := self._moved():
            self._found(moved, False)
        self._updates += 1
        if self._updates > _UPDATES_WATCHED:
            self.close()
            return False
        self._mark, self._entered, self._beside_mark = self._look(), False, None
        self._declared = declared and not self._warned
        self.captured()
        return True

    def captured(self) -> None:
        """Note that the buffers of a version are captured now."""
        if self._removers and self._updates and not capturing():
            self._written = self._look_at_buffers()

    def at_gate(self) -> None:
        """Check the parameters, just before the next update.

        Raises:
            UsageError: the program has changed parameters, or modules beside the model, since a forward pass began.
        """
        if self._beside_mark and (changed := _changed(self._beside_mark, self._states_of(self._beside()))):
            raise UsageError(
                f"the program changes {first_of(changed, _LISTED_MAX)} between the beginning of a forward pass and "
                "optimizer.step(), and a module given as extra_state is read when a checkpoint is written: it would "
                "hold the module as it is one step later. Give the module within model= instead, whose buffers are "
                'kept for each version: model=nn.ModuleDict({"model": model, "loss": loss}). Or give an object that is '
                "no module"
            )
        before, moved, now = self._mark or {}, self._moved(), self._mark or {}
        changed = [name for name in moved if self._entered and _differ(before[name][1], now[name][1])]
        if moved and not changed:  # if no forward pass was seen, the change may have been made before it
            self._found(moved, not self._entered)
        elif changed:
            raise UsageError(
                f"the program changes {first_of(changed, _LISTED_MAX)}, which no optimizer trains, between the "
                "beginning of a forward pass and optimizer.step(): a checkpoint made there would hold weights of no "
                "version, and a resumed run would change them once more. Change them right after optimizer.step(), as "
                "averages of the weights are (a momentum encoder, a target network). If they are statistics of a layer "
                "(Keras), make them buffers before wrap_optimizer(): take them out of module._parameters, and call "
                "module.register_buffer(name, parameter)"
            )

    def close(self) -> None:
        """Stop comparing, and remove the hooks."""
        for remove in self._removers:
            remove()
        self._removers, self._mark, self._written, self._beside_mark = [], None, None, None
        self._named, self.small = {}, []

    def _uses_buffers(self, module: nn.Module, _args: Any) -> None:
        """Compare the buffers at the first forward pass after an update, unless it is that of an evaluation."""
        if torch.compiler.is_compiling() or self._written is None or capturing():
            return
        before, self._written = self._written, None
        if not (module.training and torch.is_grad_enabled() and self._tells()):
            return
        if changed := _changed(before, self._look_at_buffers()):
            self._tells = lambda: False
            log.warning(_WRITTEN, first_of(changed, _LISTED_MAX))

    def _forward(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or self._mark is None or capturing():
            return
        if module.training and torch.is_grad_enabled():
            declared, self._entered, self._declared = self._declared, True, False
            self._beside_mark = self._states_of(self._beside())
            before = self._mark
            if moved := self._moved():  # changed after the update, or after one that the gradient scaler has skipped
                self._found(moved, True)
                if declared and (changed := _changed(before, self._mark)):
                    self._warned = True
                    log.warning(_MADE_TWICE, first_of(changed, _LISTED_MAX))

    def _moved(self) -> list[str]:
        """Return the names of the parameters that changed since the last call."""
        before = self._mark
        if before is None:
            return []
        now = self._mark = self._look()
        return [name for name in self._named if now[name][0] != before[name][0]]

    def _look_at_buffers(self) -> dict[str, _State]:
        return self._states_of(dict(self._model.named_buffers()))

    def _states_of(self, tensors: Mapping[str, Tensor]) -> dict[str, _State]:
        """Return the states of tensors that can be read; none if a device has no memory left for the samples."""
        try:
            found = {name: each for name, each in tensors.items() if _is_readable(each) and each.numel()}
            small = [n for n, each in found.items() if self._on_host(each) and each.nbytes <= _COPIED_BYTES_MAX]
            return _states(found, small)
        except Exception:
            log.debug("tensors of the program are not compared", exc_info=True)
            return {}

    def _look(self) -> dict[str, _State]:
        try:
            return _states(self._named, self.small)
        except Exception:
            log.warning("parameters that no optimizer trains are not followed; training goes on", exc_info=True)
            self._named, self.small = {}, []
            return {}


def _states(tensors: Mapping[str, Tensor], small: Collection[str]) -> dict[str, _State]:
    return {n: (copied_bytes(each), None) if n in small else _moving(each) for n, each in tensors.items()}


def _moving(tensor: Tensor) -> _State:
    return (tensor._version, tensor.data_ptr()), sample_of(tensor) if _is_readable(tensor) else None


def _is_readable(tensor: Tensor) -> bool:
    return is_plain(tensor) and not (tensor.is_inference() or tensor.is_meta)


def _changed(before: Mapping[str, _State], now: Mapping[str, _State]) -> list[str]:
    moved = [name for name in now if name in before and now[name][0] != before[name][0]]
    return [name for name in moved if _differ(before[name][1], now[name][1])]


def _differ(before: Tensor | None, now: Tensor | None) -> bool:
    """Return whether two samples differ, or one is missing. May wait for their device."""
    return before is None or now is None or before.device != now.device or not torch.equal(before, now)
