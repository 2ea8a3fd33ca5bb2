"""Hooks at the beginning of the forward passes that the loop calls.

The loop may call another object than the registered model: a DistributedDataParallel around it, or what
``torch.compile`` returns. Such a wrapper may wait for other ranks before it calls the model (it broadcasts buffers, and
rebuilds its buckets), and compiled code calls no hook of the modules inside of it. So wrappers get the hooks too.

A program may make a wrapper at any time. If none of the hooked modules was called in an iteration, all objects of the
process are searched. The search takes 0.1 to 0.2 s, so it is made after 1, 2, 4, 8, ... such iterations only, until it
finds something.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ttp.adapters.torch.loop.hook import Hook
from ttp.adapters.torch.sharding.data_parallel import ddps_around, instances_of
from ttp.adapters.torch.sharding.ddp_buckets import Ddp
from ttp.adapters.versions import numbers

_ORDERED_MIN = (2, 13)
"""Oldest torch whose compiler was seen to know the order of hooks that were registered with ``prepend``."""

_Call = Callable[[nn.Module, Any], None]


@dataclass(eq=False, slots=True)
class _Registered:
    """A function that is called at each forward pass, and the handles of its hooks."""

    call: _Call
    outside: _Call
    prepend: bool
    handles: list[Any] = field(default_factory=list)


class ForwardHooks:
    """Registers hooks on the modules that the loop calls.

    The module inside of a registered DistributedDataParallel is hooked too: loops often evaluate that one.

    Args:
        model: the registered model.
        ddps: the DistributedDataParallel modules that reduce its gradients, as far as they are known.
    """

    def __init__(self, model: nn.Module, ddps: Iterable[Ddp] = ()) -> None:
        around = [model] if isinstance(model, DistributedDataParallel) else []
        self._model: nn.Module = around[0].module if around else model
        self._called = [*called(self._model)]
        self._wrappers: list[tuple[weakref.ref[nn.Module], nn.Module]] = []  # each with the module inside of it
        self._registered: list[_Registered] = []
        self._missed = 0
        self.outside = False
        """Whether a wrapper of the model is known, so that the loop calls that one."""
        self.wrapped([*around, *ddps])

    def register(self, call: _Call, *, outside: _Call | None = None, prepend: bool = True) -> Callable[[], None]:
        """Call a function at the beginning of each forward pass.

        Args:
            call: gets the module that is called, and the arguments.
            outside: called instead when a wrapper of the model is called, with the module inside of it, as only that
                one tells whether it trains; None: ``call``.
            prepend: whether to call it before all hooks that are registered now: one of FSDP waits for other ranks.

        Returns:
            A function that removes the hooks; further calls of it do nothing.
        """
        registered = _Registered(call, outside or call, prepend)
        self._registered.append(registered)
        for module in self._called:
            registered.handles.append(_hooked(module, Hook(call), prepend))
        for wrapper, inner in self._wrappers:
            self._hook(registered, wrapper(), inner)
        return partial(self._remove, registered)

    def wrapped(self, ddps: Iterable[Ddp]) -> None:
        """Register the hooks on those of these modules that the program has wrapped around the model."""
        inside = set(map(id, self._model.modules()))
        self._add(ddp for ddp in ddps if id(ddp) not in inside)

    def _add(self, wrappers: Iterable[nn.Module]) -> None:
        known = {id(wrapper()) for wrapper, _ in self._wrappers} | set(map(id, self._called))
        for wrapper in wrappers:
            if id(wrapper) not in known:
                known.add(id(wrapper))
                inner, self.outside, self._missed = _inside(wrapper), True, 0
                self._wrappers.append((weakref.ref(wrapper), inner))
                for registered in self._registered:
                    self._hook(registered, wrapper, inner)

    def look_again(self) -> None:
        """Search for wrappers that are not known, as no hooked module was called in this iteration."""
        self._missed += 1
        if self._missed & (self._missed - 1) == 0:
            ddps = ddps_around(self._model)
            kind: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
            inside = set(map(id, (*self._called, *ddps)))
            compiled = [] if kind is None else instances_of(kind)
            self._add([*ddps, *(each for each in compiled if not inside.isdisjoint(map(id, each.children())))])

    def _hook(self, registered: _Registered, wrapper: nn.Module | None, inner: nn.Module) -> None:
        if wrapper is not None:
            hook = Hook(partial(_with_inner, registered.outside, inner))
            registered.handles.append(_hooked(wrapper, hook, registered.prepend))

    def _remove(self, registered: _Registered) -> None:
        self._registered = [each for each in self._registered if each is not registered]
        for handle in registered.handles:
            handle.remove()


def called(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules that the loop calls: ``model``, or its parts if it is a container without a forward pass.

    What ``torch.compile`` returns has its forward pass in the object. The module inside of it is returned too: loops
    often evaluate that one, as it is not compiled again for each shape.
    """
    whole = type(model).forward is not nn.Module.forward
    if whole or "forward" in vars(model):
        yield model
    if not whole:
        for child in model.children():
            yield from called(child)


def _hooked(module: nn.Module, hook: Hook, prepend: bool) -> Any:
    """Register a hook, and return its handle.

    torch 2.7, at least, compiles a module with its hooks in the order in which they were registered, and then finds
    others in their places ("Guard check failed"). So they are put anew into their dictionary, in their real order.
    """
    handle, hooks = module.register_forward_pre_hook(hook, prepend=prepend), module._forward_pre_hooks
    if prepend and numbers(torch.__version__) < _ORDERED_MIN:
        in_order = [*hooks.items()]
        hooks.clear()
        hooks.update(in_order)
    return handle


def _inside(wrapper: nn.Module) -> nn.Module:
    """Return the module inside of DistributedDataParallel and of what ``torch.compile`` returns."""
    name = "module" if isinstance(wrapper, DistributedDataParallel) else "_orig_mod"
    inner = dict(wrapper.named_children()).get(name)
    return wrapper if inner is None else _inside(inner)


def _with_inner(call: _Call, inner: nn.Module, _wrapper: nn.Module, args: Any) -> None:
    call(inner, args)
