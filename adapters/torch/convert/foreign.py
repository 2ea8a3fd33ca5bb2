"""Converts state dicts in the forms in which programs usually save them to the form of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ttp.adapters.torch.convert.contents import WholeState, leaves_of
from ttp.errors import CheckpointError

_MODEL = ("model", "model_state_dict", "state_dict")
_OPTIMIZER = ("optim", "optimizer", "optimizer_state_dict")
_VERSION = ("version", "step", "global_step")
_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile put before every name."""


def to_whole_state(path: Path, loaded: Any, *, optimizer: bool) -> WholeState:
    """Convert the loaded contents of a torch file.

    The file may have one of three forms: a file of ``ttp convert --to torch``; a mapping with the state dicts of model
    and optimizer under one of the usual names (``model``, ``model_state_dict``, ``state_dict``; ``optim``,
    ``optimizer``, ``optimizer_state_dict``); the state dict of a model alone.

    Args:
        path: the file, for messages.
        loaded: its contents.
        optimizer: False to leave the optimizer's state out.

    Raises:
        CheckpointError: the file has none of these forms, or an optimizer's parameters have no names.
    """
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__} instead of a mapping from names to tensors")
    model_key = next((key for key in _MODEL if isinstance(loaded.get(key), Mapping)), None)
    rest: Mapping[str, Any] = {} if model_key is None else loaded
    ours: Any = rest.get("ttp") if isinstance(rest.get("ttp"), Mapping) else None
    given = loaded if model_key is None else loaded[model_key]
    model = _unwrapped(given) if ours is None else dict(given)
    if not any(isinstance(value, Tensor) for value in model.values()):
        raise CheckpointError(f"{path} holds no weights: it has no {', '.join(_MODEL)}, and is no state dict itself")
    state: dict[str, Any] = {"model": model}
    notes: list[str] = []
    optim = next((rest[key] for key in _OPTIMIZER if optimizer and isinstance(rest.get(key), Mapping)), None)
    if optim is not None:
        state["optim"] = _named(path, optim, model, notes)
    if isinstance(rest.get("extra"), Mapping):
        state["extra"] = rest["extra"]
    ours = ours or {}
    job = {**ours.get("job", {}), **_schedules(rest.get("scheduler"))} if optim is not None else None
    version = next((rest[key] for key in _VERSION if type(rest.get(key)) is int), None)
    return WholeState(path.name, version, leaves_of(state), str(ours.get("optimizer", "")), job, tuple(notes))


def _schedules(saved: Any) -> dict[str, Any]:
    """Return the fields of ``JobState`` for the state dict of one scheduler, or a list of those of several."""
    return {"several": [[state, False] for state in saved]} if isinstance(saved, list) else {"scheduler": saved}


def _unwrapped(model: Mapping[str, Any]) -> dict[str, Any]:
    names = [str(name) for name in model]
    prefix = ""
    while names and (found := next((w for w in _WRAPPERS if all(n.startswith(prefix + w) for n in names)), "")):
        prefix += found
    return {str(name).removeprefix(prefix): value for name, value in model.items()}


def _named(path: Path, optim: Mapping[str, Any], model: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the optimizer's state with names of parameters instead of their numbers in ``optimizer.state_dict()``."""
    groups, state = optim.get("param_groups"), optim.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        raise CheckpointError(f"the optimizer state in {path} has no `state` or no `param_groups`: use --no-optimizer")
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        return {"state": dict(state), "param_groups": groups}
    names = [str(name) for group in groups for name in group.get("param_names", ())]
    if len(names) != len(numbers):
        names = _by_position(path, groups, state, model)
        notes.append("the optimizer's state has numbers instead of names: they were taken for the order of the model")
    name_of = dict(zip(numbers, _unwrapped(dict.fromkeys(names)), strict=True))
    return {
        "state": {name_of[number]: values for number, values in state.items()},
        "param_groups": [
            {key: value for key, value in group.items() if key != "param_names"}
            | {"params": [name_of[number] for number in group["params"]]}
            for group in groups
        ],
    }


def _by_position(
    path: Path, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], model: Mapping[str, Any]
) -> list[str]:
    """Return the names for the optimizer's parameters, in the order of the model. Raises an error if they do not fit.

    They fit if there is one group, as many parameters as distinct tensors in the model, and all shapes agree.
    """
    distinct: dict[Any, str] = {}
    for name, value in model.items():
        if isinstance(value, Tensor):
            distinct.setdefault((value.data_ptr(), value.shape) if value.numel() else name, name)
    names = list(distinct.values())
    fits = len(groups) == 1 and len(groups[0]["params"]) == len(names)
    for number, name in zip(groups[0]["params"] if fits else (), names, strict=False):
        moments = [v for v in state.get(number, {}).values() if isinstance(v, Tensor) and v.dim()]
        fits = fits and all(moment.shape == model[name].shape for moment in moments if model[name].dim())
    if not fits:
        raise CheckpointError(
            f"the optimizer state in {path} has numbers instead of parameter names, and their names are unknown. Make "
            "the optimizer with model.named_parameters(), or save get_optimizer_state_dict(model, optimizer) of "
            "torch.distributed.checkpoint.state_dict; --no-optimizer converts the weights only"
        )
    return names
