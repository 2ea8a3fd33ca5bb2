"""Optimizer state in torch's flattened form, which jobs of several pipeline stages write, made nested again."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from typing import Any

from ttp.adapters.torch.convert.contents import StateValue
from ttp.errors import CheckpointError

_STATE, _GROUPS = "state.", "param_groups."


def nested_optimizer(leaves: Sequence[StateValue]) -> tuple[StateValue, ...]:
    """``optim.state.<parameter>.<key>`` and ``optim.param_groups.<parameter>.<setting>`` as state and groups.

    Parameters of equal settings share a group, in the order of the model; the groups that the job had are not known.

    Raises:
        CheckpointError: a name belongs to no parameter.
    """
    flat, rest = [leaf for leaf in leaves if _is_flat(leaf)], [leaf for leaf in leaves if not _is_flat(leaf)]
    if not flat:
        return tuple(leaves)
    parameters = {str(leaf.path[1]): None for leaf in rest if leaf.path[0] == "model" and len(leaf.path) > 1}
    state = [_state_leaf(leaf, parameters) for leaf in flat if str(leaf.path[1]).startswith(_STATE)]
    return (*rest, *state, *_groups(flat, parameters))


def _is_flat(leaf: StateValue) -> bool:
    return leaf.path[0] == "optim" and len(leaf.path) > 1 and str(leaf.path[1]).startswith((_STATE, _GROUPS))


def _split(leaf: StateValue, head: str, parameters: Container[str]) -> tuple[str, str]:
    """The parameter and what it has; names of both may hold dots."""
    owner, dot, key = str(leaf.path[1]).removeprefix(head).rpartition(".")
    while dot and owner not in parameters:
        owner, dot, before = owner.rpartition(".")
        key = f"{before}.{key}"
    if not dot:
        raise CheckpointError(f"{leaf.key} belongs to no parameter of the model")
    return owner, key


def _state_leaf(leaf: StateValue, parameters: Container[str]) -> StateValue:
    owner, key = _split(leaf, _STATE, parameters)
    shift = 2  # ("optim", "state.a.b") has become ("optim", "state", "a", "b")
    int_keys = tuple(position + shift if position > 1 else position for position in leaf.int_keys)
    return StateValue(("optim", "state", owner, key, *leaf.path[2:]), int_keys, leaf.value)


def _groups(flat: Sequence[StateValue], parameters: Collection[str]) -> list[StateValue]:
    settings: dict[str, dict[str, Any]] = {}
    for leaf in flat:
        if str(leaf.path[1]).startswith(_GROUPS):
            owner, key = _split(leaf, _GROUPS, parameters)
            settings.setdefault(owner, {})[key] = leaf.value
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for name in [name for name in parameters if name in settings]:
        members = next((members for known, members in groups if known == settings[name]), None)
        if members is None:
            groups.append((settings[name], [name]))
        else:
            members.append(name)
    found: list[StateValue] = []
    for number, (known, members) in enumerate(groups):
        values = {key: value for key, value in known.items() if key != "params"} | {"params": members}
        found += [StateValue(("optim", "param_groups", number, key), (), value) for key, value in values.items()]
    return found
