"""Collects the contents of a checkpoint as references to live tensors, without copying them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ttp.adapters.torch.loop.untouched import Habits
from ttp.adapters.torch.loop.unwrap_optimizer import members_of, unwrap_optimizer
from ttp.adapters.torch.saving.job_state import FROZEN, TOGGLED, ZEROED, JobState
from ttp.adapters.torch.saving.preimage import Image
from ttp.adapters.torch.sharding.names import ModelNames


def checkpoint_state(
    names: ModelNames, optimizer: Optimizer, captured: Mapping[str, Any], job: JobState, image: Image | None = None
) -> dict[str, Any]:
    """Collect the state of a checkpoint, as nested mappings for ``write_shard``.

    ``model`` and ``optim`` are what ``get_state_dict(model, optimizer)`` of torch returns. ``scheduler`` is for users
    who load the checkpoint without ttp; ttp itself reads the job state.

    Args:
        names: names of the registered model.
        optimizer: the registered optimizer.
        captured: buffers of the version being saved; see ``model_state``.
        job: the job-wide scalars.
        image: the copy of the version before the last update, to save that version; None: save the live state.
    """
    model = model_state(names, captured)
    if image is not None:
        model = {name: image.of(value) for name, value in model.items()}
    state: dict[str, Any] = {
        "model": model,
        "optim": optimizer_state(names, optimizer, None if image is None else image.state_of(optimizer)),
        "ttp": {"version": job.version, "optimizer": optimizer_kind(optimizer)},
    }
    if job.several is not None:
        state["scheduler"] = [each.state for each in job.schedules]
    elif job.scheduler is not None:
        state["scheduler"] = job.scheduler
    return state


def model_state(names: ModelNames, captured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of ``model.state_dict()``, without running any of its hooks.

    Args:
        names: names of the registered model.
        captured: buffers and extra states of the version being saved, by their names in ``model`` or in the checkpoint.
            Missing ones are taken from the live module; names that do not belong into a checkpoint are ignored.
    """
    state: dict[str, Any] = dict(names.parameters)
    state.update(names.buffers)
    known = {names.canonical(name): value for name, value in captured.items()}
    for name, owner in names.extra_states.items():
        state[name] = known[name] if name in known else owner.get_extra_state()
    state.update((name, value) for name, value in known.items() if name in state and name not in names.parameters)
    return state


def optimizer_state(names: ModelNames, optimizer: Optimizer, kept: Mapping[Any, Any] | None = None) -> dict[str, Any]:
    """Return what ``get_optimizer_state_dict`` of torch would return, as references to the live tensors.

    If the optimizer shards its state over ranks, the result has the state on this rank and the param groups of all
    parameters.

    Args:
        names: names of the registered model.
        optimizer: the registered optimizer.
        kept: a copy of ``optimizer.state`` to use instead; None: use the live state.
    """
    state: dict[str, Any] = {}
    for owner, values in list((unwrap_optimizer(optimizer).state if kept is None else kept).items()):
        state[names.of(owner) if isinstance(owner, Tensor) else str(owner)] = values
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names.of(parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def groups_with(
    live: Sequence[dict[str, Any]], optimizer: Optimizer, settings: Sequence[Sequence[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the param groups with the settings (learning rate and so on) of an earlier version.

    Groups that the program has added since then belong to the next version and are left out.

    Args:
        live: the live param groups of all optimizers, in the form of ``optimizer_state``.
        optimizer: the registered optimizer.
        settings: the settings of that version: for each member of ``optimizer`` a list with those of each group.
    """
    rest, found = iter(live), []
    for member, kept in zip(members_of(optimizer), settings, strict=True):
        own = list(islice(rest, len(member.param_groups)))
        found += [group | old for group, old in zip(own, kept, strict=False)]
    return found


def frozen(names: ModelNames, optimizer: Optimizer) -> list[str]:
    """Return the names of the parameters of ``optimizer`` that have ``requires_grad=False`` now."""
    return [name for name, parameter in names.updated_by(optimizer).items() if not parameter.requires_grad]


def how_they_train(names: ModelNames, optimizer: Optimizer, habits: Habits) -> dict[str, list[str]]:
    """Return what a checkpoint says of the parameters beside their values: names, by the keys of ``job_state``."""
    trained = names.updated_by(optimizer) if habits.zeroes else {}
    zeroed = [n for n, p in trained.items() if p.grad is not None and p.grad.layout is torch.strided]
    toggled = [name for name, p in names.parameters.items() if id(p) in habits.toggled]
    return {FROZEN: frozen(names, optimizer), TOGGLED: toggled, ZEROED: zeroed}


def optimizer_kind(optimizer: Optimizer) -> str:
    """Return the class name of the optimizer, or of all its members. It recognises checkpoints of another optimizer."""
    kinds = (type(unwrap_optimizer(member)) for member in members_of(optimizer))
    return " + ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
