"""Finds state of an optimizer or a module that a checkpoint does not include. Runs after the first updates."""

from __future__ import annotations

import logging
import math
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from ttp.adapters.torch.loop.unwrap_optimizer import held_by, is_sharded, owners_of, unwrap_optimizer, wrappers_of
from ttp.adapters.torch.sharding.exchange import tells
from ttp.adapters.torch.sharding.names import parameters_of
from ttp.adapters.torch.tensor_memory import copied_bytes, is_plain
from ttp.errors import UsageError

log = logging.getLogger("ttp.adapters.torch")

Numbers = dict[tuple[int, str], str]
"""Attributes of optimizers or modules: the identity of the object and the attribute's name, to the value as text."""

_SCRATCH = frozenset({"old_p", "e_w"})
"""Attributes of SAM that live only from its first step to its second in one iteration."""
_DEPTH_MAX = 5
_USUAL = frozenset({type(None), bool, int, str, set, dict, OrderedDict})
"""Types of what every module has in attributes: thousands of modules must not take seconds."""
_SWITCHES = frozenset({"True", "False"})
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_READ_MAX = 1 << 20
"""Largest tensor in an attribute whose values are compared, in bytes. Of others only the memory and the counter are."""


def refuse_unsaved(given: Sequence[Optimizer], extra: Collection[Any]) -> None:
    """Refuse optimizers that keep state that would not be in a checkpoint. Call it when every optimizer has stepped.

    Args:
        given: the optimizers as the user gave them.
        extra: the objects that the user gave as ``extra_state``. A wrapper among them is saved by its ``state_dict()``.

    Raises:
        UsageError: an optimizer keeps such state.
    """
    _refuse_unowned([owner for optimizer in given for owner in owners_of(optimizer)])
    saved = set(map(id, extra))
    for optimizer in given:
        owners = owners_of(optimizer)
        for wrapper in wrappers_of(optimizer):
            if id(wrapper) not in saved:
                _refuse_wrapper(wrapper, owners)
        for owner in owners:
            if id(owner) not in saved:
                _refuse_own_tensors(owner)


def _refuse_unowned(owners: Sequence[Optimizer]) -> None:
    """Refuse entries of ``.state`` that belong to no parameter, unless one optimizer has them under strings."""
    several = len(owners) > 1
    for owner in owners:
        others = (key for key in list(owner.state) if not isinstance(key, Tensor))
        unowned = next((key for key in others if several or not isinstance(key, str)), None)
        if unowned is not None:
            which = "of several optimizers does not tell which of them such an entry belongs to"
            raise UsageError(
                f"{type(owner).__name__} keeps {unowned!r} in .state, which is no parameter: a checkpoint "
                f"{which if several else 'has names for strings only'}. Keep it in state[parameter] or in its param "
                "groups"
            )


def _refuse_wrapper(wrapper: Optimizer, owners: Sequence[Optimizer]) -> None:
    """Refuse a wrapper around ``owners`` that has tensors of its own, or a mode, that no checkpoint holds."""
    if kept := _kept_by(wrapper, owners):
        inside = ", ".join(type(owner).__name__ for owner in owners)
        raise UsageError(
            f"{type(wrapper).__name__} keeps tensors of its own (.{kept}), and a checkpoint holds only the "
            f"state of {inside} inside of it. If its state_dict() and load_state_dict() include these tensors, "
            'give the object to wrap_optimizer() as extra state too: extra_state={"optimizer": optimizer}'
        )
    if isinstance(getattr(wrapper, "train_mode", None), bool):
        raise UsageError(
            f"{type(wrapper).__name__}.train_mode tells which weights are in the model, and is in no "
            "checkpoint: a resumed job would move the weights once more. Use an optimizer that keeps it in its "
            "param groups (schedulefree.AdamWScheduleFree), or give the object as extra state too if its "
            "state_dict() has it"
        )


def _refuse_own_tensors(owner: Optimizer) -> None:
    """Refuse an optimizer that has stepped and keeps its state in attributes instead of in ``.state``."""
    if owner.state or is_sharded(owner) or type(owner).__module__.partition(".")[0] == "torch":
        return
    if kept := _kept_by(owner, ()):
        raise UsageError(
            f"{type(owner).__name__} has stepped, its .state is empty, and it keeps tensors in .{kept}: a "
            "checkpoint holds .state only. Keep them in self.state[parameter], or give the object to "
            "wrap_optimizer() as extra state too, with state_dict() and load_state_dict() that include them: "
            'extra_state={"optimizer": optimizer}'
        )
    own = set(map(id, parameters_of(owner)))
    others = (each for each in held_by(owner) if isinstance(each, Optimizer) and each is not owner and each.state)
    if part := next((each for each in others if not own.isdisjoint(map(id, parameters_of(each)))), None):
        raise UsageError(
            f"{type(owner).__name__} has stepped, its .state is empty, and the {type(part).__name__} inside of it has "
            "only a part of its parameters: a checkpoint would lack the state. If each rank updates a share of the "
            "parameters (OSS of fairscale), use ttp.adapters.torch.ReplicatedOptimizer instead"
        )


def numbers_of(given: Sequence[Optimizer], extra: Collection[Any]) -> Numbers:
    """Return the attributes of optimizers, but for torch's own, that hold only numbers. They are in no checkpoint.

    Tensors of one element on the host count as numbers. Those on a device are not read: that would wait for it. Random
    generators count too, by their state.

    Args:
        given: the optimizers as the user gave them.
        extra: the objects that the user gave as ``extra_state``. What they hold is saved.
    """
    saved = {id(value) for each in extra for value in getattr(each, "__dict__", {}).values()}
    return {
        (id(each), f"{type(each).__name__}.{name}"): repr(numbers)
        for optimizer in given
        for each in (*wrappers_of(optimizer), *owners_of(optimizer))
        if type(each).__module__.partition(".")[0] not in ("torch", "ttp") and not any(each is one for one in extra)
        for name, value in list(vars(each).items())
        if not (name in ("state", "param_groups") or id(value) in saved) and (numbers := _numbers_in(value)) is not None
    }


def tell_changed(before: Numbers, after: Numbers) -> None:
    """Warn, on rank 0, of numbers that an update has changed: of an optimizer that counts its steps itself.

    It is no error, as a cache does no harm. Not the first update, which makes what never changes again.
    """
    _tell(
        "%s changes with the updates and is in no checkpoint, which holds .state and .param_groups of an optimizer "
        "only: after a restore it begins anew, and the resumed run may have other bits. Keep it in "
        "state[parameter] or in the param groups, or give an object that saves and loads it as extra_state",
        {name for (owner, name), text in after.items() if before.get((owner, name)) != text},
    )


def _tell(warning: str, names: Collection[str]) -> None:
    if names and tells():
        log.warning(warning, ", ".join(sorted(names)))


def counts_of(model: nn.Module, extra: Collection[Any]) -> Numbers:
    """Return what modules keep in attributes: whole numbers, random generators and, of some, tensors.

    A loss or another measure for the log is seldom a whole number. Of ``model`` those beside buffers only, and the
    buffers' marks under ``""``. Not those of torch's own modules, and of those that save an extra state. What an object
    of ``extra`` holds is saved. Layers of a network keep tensors to be looked at (the map of an attention) or as a
    cache, so tensors count only of modules without weights whose class or name says that they are a loss, of those of
    ``extra``, and of modules right around a recurrent layer those of the width of its state, which goes on.
    """
    averages = [each for each in extra if isinstance(each, nn.Module)]
    within = {*model.modules()}
    beside = {module for each in averages for module in each.modules()} - within
    named = ((f"{name} {type(module).__name__}".lower(), module) for name, module in model.named_modules())
    losses = [module for words, module in named if "loss" in words or "criterion" in words]
    looked_at = {each: widths for each in within if (widths := _widths(each))}
    looked_at |= {each: set() for each in (*losses, *averages) if next(each.parameters(), None) is None}
    saved, found = _held_by(extra), Numbers()
    for module in _unsaved_modules((*within, *beside), saved):
        values = {f"{type(module).__name__}.{name}": value for name, value in list(vars(module).items())}
        others = [each for each in values.items() if type(each[1]) not in _USUAL and id(each[1]) not in saved]
        kept_as = ((name, _kept_as(value, looked_at.get(module))) for name, value in others)
        found |= {(id(vars(module)), name): text for name, text in kept_as if text}
        kept = _kept_buffers(module)
        if kept or module in beside:
            found |= {(id(module), name): repr(value) for name, value in values.items() if type(value) is int}
        if kept and module not in beside:
            marks = [None if t is None or t.is_inference() else (id(t), t._version) for t in kept]
            found[id(module), ""] = repr(marks)
    return found


def attributes_of(model: nn.Module, extra: Collection[Any]) -> Numbers:
    """Return what modules count in attributes (up to 1e15), and switches of those with weights or buffers.

    A layer that sets those from its first batch often remembers in such an attribute that it has done so. Loading code
    of the module's own would not help: a restore does not call it. Arguments as in ``counts_of``.
    """
    return {
        (id(module), f"{type(module).__name__}.{name}"): repr(value)
        for module in _unsaved_modules(model.modules(), _held_by(extra))
        if "torchmetrics.metric" not in (kind.__module__ for kind in type(module).__mro__)  # they count for the log
        for kept in [_kept_buffers(module) or any(p is not None for p in module._parameters.values())]
        for name, value in list(vars(module).items())
        if (type(value) in (int, float) and abs(value) < 1e15) or (kept and type(value) is bool and name != "training")
    }


def regular(start: Numbers, first: Numbers, second: Numbers) -> set[str]:
    """Return the names of numbers that grow or fall by equal steps or factors: a module counts, or cools down by them.

    A loss for the log, or the length of a batch, is seldom as regular. Arguments as ``attributes_of`` has returned them
    at the start, after the first update and after the second.
    """
    found = set()
    for key in start.keys() & first.keys() & second.keys():
        texts = start[key], first[key], second[key]
        if len({*texts}) < 3 or not _SWITCHES.isdisjoint(texts):
            continue
        a, b, c = map(float, texts)
        if math.isclose(b - a, c - b) or (a * c > 0 and math.isclose(b * b, a * c)):
            found.add(key[1])
    return found


def _held_by(extra: Collection[Any]) -> set[int]:
    """Return the identities of all that objects of ``extra`` hold, and so save, modules inside of it too."""
    objects = [each for each in extra if not isinstance(each, nn.Module)]
    held = [value for each in objects for value in getattr(each, "__dict__", {}).values()]
    return {id(each) for value in held for each in (value.modules() if isinstance(value, nn.Module) else [value])}


def _unsaved_modules(modules: Iterable[nn.Module], saved: Collection[int]) -> Iterator[nn.Module]:
    """Yield the modules whose attributes are in no checkpoint, but for those of torch's own classes."""
    for module in modules:
        if id(module) in saved or type(module).get_extra_state is not nn.Module.get_extra_state:
            continue
        kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))  # others: ``ABC``, ``Generic``
        if any(kind.__module__.partition(".")[0] not in ("torch", "ttp") for kind in kinds):
            yield module  # ``fully_shard`` makes a class of torch's out of the module's own, which is a base of it


def _kept_buffers(module: nn.Module) -> list[Tensor | None]:
    return [t for key, t in module._buffers.items() if key not in module._non_persistent_buffers_set]


def _widths(module: nn.Module) -> set[int]:
    """Return the widths of the states of the recurrent layers right inside of a module."""
    inside: list[Any] = [each for each in module.children() if isinstance(each, _RECURRENT)]
    return {width for each in inside for width in (each.hidden_size, getattr(each, "proj_size", 0)) if width}


def _kept_as(value: Any, widths: Collection[int] | None) -> str:
    """Return what tells whether a random generator or a tensor has changed; the tensor's shape is before ":".

    Of tensors those of the given widths only; None: none of them, and no width: all of them.

    Empty: it is neither, nor a tuple of such, cannot be read, or is a tensor that is no average of others: it is part
    of a backward pass, or holds no fractions (a mask), or one element, as a loss for the log.
    """
    if type(value) is tuple:  # the two states of an LSTM
        parts = [*takewhile(bool, (_kept_as(each, widths) for each in value))]  # it may hold a million words instead
        return "".join(parts) if len(parts) == len(value) else ""
    with suppress(Exception):  # a proxy of an object that is gone, a tensor without memory, or of torch.func
        if (stream := _stream_of(value)) is not None:
            return xxhash.xxh3_64_hexdigest(stream)
        kept = widths is not None and isinstance(value, Tensor) and is_plain(value) and value.is_floating_point()
        if kept and not value.requires_grad and value.numel() > 1 and (not widths or value.shape[-1] in widths):
            if value.device.type == "cpu" and value.nbytes <= _READ_MAX:
                return f"{tuple(value.shape)}:{xxhash.xxh3_64_hexdigest(copied_bytes(value))}"
            return f"{tuple(value.shape)}:{id(value)} {None if value.is_inference() else value._version}"
    return ""


def tell_counts(before: Numbers, after: Numbers, others: Collection[str]) -> None:
    """Warn, on rank 0, of what modules keep and no checkpoint has, such as the next free place of a queue.

    A tensor that has got another shape is of a batch, and no average. ``others`` are names to tell too.
    """
    both = ((key, text, after[key]) for key, text in before.items() if key in after)
    changed = {key for key, old, new in both if old != new and old.partition(":")[0] in (new.partition(":")[0], old)}
    _tell(
        "%s changes with the updates and is in no checkpoint, as it is no buffer: after a restore it begins anew, "
        "and the resumed run may have other bits. Keep it in a buffer (DistributedDataParallel sends those of rank 0 "
        "to all ranks), or give an object that saves and loads it as extra_state. If one does already, if the program "
        "sets it in each launch, or if the module never reads it, there is nothing to do",
        {name for owner, name in changed if name and ((owner, "") in changed or (owner, "") not in after)} | {*others},
    )


def tell_switched(before: Numbers, after: Numbers) -> None:
    """Warn, on rank 0, of switches of modules that have changed since the start: a restarted module sets them again."""
    _tell(
        "%s was switched after wrap_optimizer() and is in no checkpoint, as it is no buffer: after a restore it is "
        "what it was at the start. If the module sets itself up from its first batch by it, it does so once more, "
        "over what was restored. Keep it in a buffer, or give an object that saves and loads it as extra_state. If "
        "one does already, if the program itself sets it in each launch, or if nothing depends on it, there is "
        "nothing to do",
        {key[1] for key, text in after.items() if text in _SWITCHES and before.get(key, text) != text},
    )


def _numbers_in(value: Any, depth: int = _DEPTH_MAX) -> list[float] | None:
    """Return the numbers in a value that holds nothing else, whatever the keys of its dicts are; else None."""
    if type(value) in (int, float):
        return [value]
    if type(value) is Tensor and value.numel() == 1 and value.device.type == "cpu":
        with suppress(RuntimeError):  # some layouts and types have no ``item()``
            return [value.item()]
    if (stream := _stream_of(value)) is not None:
        return [xxhash.xxh3_64_intdigest(stream)]
    if not depth or not isinstance(value, (list, tuple, deque, Mapping)):
        return None
    found = [_numbers_in(each, depth - 1) for each in list(value.values() if isinstance(value, Mapping) else value)]
    return None if None in found else [number for part in found for number in part or ()]


def _stream_of(value: Any) -> bytes | None:
    """Return the state of a random generator of torch, Python or numpy; None: it is none, or needs no saving."""
    if any(value is each for each in (torch.default_generator, *torch.cuda.default_generators)):
        return None  # a checkpoint has those of the process
    if isinstance(value, torch.Generator):
        with suppress(RuntimeError):  # that of a device has no state to read while a graph is captured
            return copied_bytes(value.get_state())
        return None
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else repr(value.getstate()).encode()
    numpys = type(value).__module__.startswith("numpy.random") and value is not sys.modules["numpy.random"].mtrand._rand
    bits = getattr(value, "bit_generator", getattr(value, "_bit_generator", None)) if numpys else None
    return None if bits is None else repr(bits.state).encode()


def refuse_schedules(given: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
    """Refuse a scheduler that has no state, or writes into param groups of a wrapper that are not saved.

    Raises:
        UsageError: there is such a scheduler.
    """
    for each in schedulers:
        if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
            raise UsageError(
                f"the scheduler is a {type(each).__name__} without state_dict() or load_state_dict(): give it both, as "
                "torch's own have, and give it to wrap_optimizer() as extra_state="
            )
    saved = {id(group) for each in given for owner in owners_of(each) for group in owner.param_groups}
    for wrapper in (wrapper for each in given for wrapper in wrappers_of(each)):
        if any(id(group) not in saved for group in wrapper.param_groups) and any(
            getattr(scheduler, "optimizer", None) is wrapper for scheduler in schedulers
        ):
            raise UsageError(
                f"the scheduler changes the learning rate in param groups of {type(wrapper).__name__}, and only the "
                "groups of the optimizers inside of it are saved: make a scheduler for each optimizer inside, and give "
                "wrap_optimizer() the list of these schedulers"
            )


def tell_strange_schedules(given: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
    """Warn, on rank 0, of a scheduler of an optimizer that is none of the given ones, nor inside or around one.

    Args:
        given: the optimizers as the user gave them.
        schedulers: the schedulers.
    """
    if not tells():
        return
    inside = [each for optimizer in given for each in (*wrappers_of(optimizer), *owners_of(optimizer))]
    known = [*inside, *map(unwrap_optimizer, inside)]
    groups = {id(group) for each in known for group in each.param_groups}
    for scheduler in schedulers:
        its = getattr(scheduler, "optimizer", None)
        if not isinstance(its, Optimizer) or any(id(group) in groups for group in its.param_groups):
            continue
        if not any(thing is each for thing in vars(its).values() for each in known):
            log.warning(
                "the %s given as scheduler= belongs to an optimizer (%s) that wrap_optimizer() was not given: it "
                "changes no learning rate of the given ones, and the rates that it sets are not saved. Make it for the "
                "optimizer that the loop steps, after that was made",
                type(scheduler).__name__,
                type(its).__name__,
            )


def _kept_by(optimizer: Optimizer, inside: Sequence[Optimizer]) -> str:
    """Return an attribute that holds tensors with shapes of parameters and is not saved; empty if there is none."""
    parameters = [*parameters_of(optimizer)]
    shapes = {parameter.shape for parameter in parameters}
    known = {id(p) for p in parameters} | {id(each.state) for each in inside} | {id(optimizer.param_groups)}
    known |= {id(group) for each in (optimizer, *inside) for group in each.param_groups}

    def holds(value: Any, depth: int) -> bool:
        if id(value) in known or isinstance(value, (Optimizer, nn.Module)) or depth > _DEPTH_MAX:
            return False
        if isinstance(value, Tensor):
            return value.shape in shapes and value.dim() > 0
        if isinstance(value, dict):
            return any(holds(item, depth + 1) for key, item in list(value.items()) if key not in _SCRATCH)
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return any(holds(item, depth + 1) for item in list(value))
        foreign = hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value)
        if not foreign or type(value).__module__.partition(".")[0] == "torch":
            return False
        known.add(id(value))
        return holds(vars(value), depth + 1)

    return next((name for name, value in list(vars(optimizer).items()) if holds(value, 0)), "")
