"""Compares a checkpoint with the model and the optimizer into which it is to be loaded, before anything is modified."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ttp.adapters.torch.restoring.param_groups import SavedGroups
from ttp.adapters.torch.saving.piece_index import IndexEntry, described
from ttp.adapters.torch.saving.state import optimizer_kind
from ttp.adapters.torch.sharding.dtensor_chunks import Cutter
from ttp.adapters.torch.sharding.names import ModelNames, first_of
from ttp.errors import OtherModelError
from ttp.processor.faults import is_collective_error

_LISTED_MAX = 8
_PASSING = (OSError, MemoryError, torch.cuda.OutOfMemoryError)
_NOT_HYPERPARAMETERS = {
    "params",
    "param_names",
    "initial_lr",
    "swa_lr",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
}
"""Keys of a param group that do not identify the optimizer's class: schedulers and programs add them."""


def model_differences(
    names: ModelNames, items: Sequence[IndexEntry], left_out: Collection[str], cutter: Cutter
) -> list[str]:
    """Return the differences between a model and a checkpoint of a model, as sentences; empty if there are none.

    Compared are names, shapes and dtypes.

    Args:
        names: names of the live model's tensors.
        items: the entries of the checkpoint about the model.
        left_out: names of values that the checkpoint does not have, because they could not be stored.
        cutter: knows the whole shapes of sharded parameters.
    """
    here: dict[str, str] = {
        name: described(str(tensor.dtype).removeprefix("torch."), cutter.shape(name, tensor))
        for name, tensor in (names.parameters | names.buffers).items()
    }
    there = {str(item.path[1]): described(item.dtype, item.shape) for item in items if item.path[0] == "model"}
    # The type of a module's extra state is not compared: the module's own code has to accept it.
    there = {name: "" if name in names.extra_states else signature for name, signature in there.items()}
    here |= {name: "" for name in names.extra_states if not is_left_out(name, left_out)}
    for name in names.of_any_shape & there.keys():  # such a buffer takes the saved shape
        here[name] = there[name]
    differing = [
        f"{name} ({here[name]} here, {there[name]} in the checkpoint)"
        for name in sorted(here.keys() & there.keys())
        if here[name] != there[name]
    ]
    return [
        *_sentence("not in the checkpoint", sorted(here.keys() - there.keys())),
        *_sentence("not in this model", sorted(there.keys() - here.keys() - names.extra_states.keys())),
        *_sentence("different", differing),
    ]


def is_left_out(extra_state: str, left_out: Collection[str]) -> bool:
    """Return whether a module's extra state, or a part of it, was left out of the checkpoint."""
    return any(key == f"model.{extra_state}" or key.startswith(f"model.{extra_state}.") for key in left_out)


def optimizer_differences(names: ModelNames, optimizer: Optimizer, saved: SavedGroups, saved_kind: str) -> list[str]:
    """Return the differences between an optimizer and a saved one, as sentences; empty if there are none.

    Compared are the class, the kinds of settings, and which parameter is in which group. A different class is accepted
    if both have the same kinds of settings.

    Args:
        names: names of the live model's tensors.
        optimizer: the live optimizer.
        saved: the saved param groups, with names of parameters.
        saved_kind: class of the saved optimizer; empty: unknown.
    """
    groups = optimizer.param_groups
    here, there = _settings(groups), _settings(saved)
    if saved_kind and saved_kind != optimizer_kind(optimizer) and here != there:
        return [f"the optimizer is {optimizer_kind(optimizer)} here and {saved_kind} in the checkpoint"]
    if len(groups) != len(saved):
        return [f"the optimizer has {len(groups)} param groups here and {len(saved)} in the checkpoint"]
    found: list[str] = []
    for number, (group, other) in enumerate(zip(groups, saved, strict=True)):
        mine, theirs = {names.of(parameter) for parameter in group["params"]}, set(other.get("params", ()))
        found += _sentence(f"only here in param group {number}", sorted(mine - theirs))
        found += _sentence(f"only in the checkpoint in param group {number}", sorted(theirs - mine))
    return found


def hand_to(what: str, load: Callable[[Any], object], saved: Any) -> None:
    """Hand a saved state over to ``load``, a method of an object of the program.

    Args:
        what: the method, for the message.
        load: the method.
        saved: the state.

    Raises:
        OtherModelError: it does not accept the state.
    """
    try:
        load(saved)
    except Exception as problem:
        if is_collective_error(problem) or isinstance(problem, _PASSING):
            raise  # another rank is lost, or memory or storage are short: a restart may help
        raise OtherModelError(
            f"{what} refused what was saved ({type(problem).__name__}: {problem}). Use the code that wrote the "
            "checkpoint, or another save_dir to start at step 0"
        ) from problem


def _settings(groups: SavedGroups) -> set[str]:
    return {key for group in groups for key in group} - _NOT_HYPERPARAMETERS


def _sentence(title: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [f"{title}: {first_of(names, _LISTED_MAX)}"]
