"""Captures the extra states (``get_extra_state()``) of Megatron's modules: FP8 scales with Transformer Engine.

An extra state changes in the forward and the backward pass and is equal on all replicas of a shard (Megatron reduces
it). So it is captured at the gate of each update, as the extra state of the version that the update makes, and written
with the shard. Nothing is sent, and nothing is encoded until a checkpoint is written. A module may read the state from
its device, as Transformer Engine does: then every update waits for the device once, and the log says so.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ttp.adapters.torch.restoring.reader import read_value
from ttp.adapters.torch.saving.flatten_state import dump
from ttp.adapters.torch.saving.piece_index import IndexEntry
from ttp.errors import CheckpointError, ConfigError

log = logging.getLogger("ttp.adapters.megatron")

_KEPT = 4
"""Number of versions whose states are kept, because a host may be some updates ahead of its device."""
_LEARNING = 4
"""Number of first captures in which every module is asked for its state."""
_PARTS = 16
"""In later captures, modules that never had a state are asked in turns: 1/16 of them in each capture."""


class ExtraStates:
    """Captures, keeps and restores the extra states of the modules of one rank.

    Args:
        owners: the modules, by the name of their extra state in the checkpoint.
        written: names of the states that this rank writes; ranks with other parts of the model may hold equal states.
        on_device: whether the states may lie on an accelerator.
    """

    def __init__(self, owners: Mapping[str, nn.Module], written: Iterable[str], *, on_device: bool = False) -> None:
        self._owners, self._written, self._on_device = dict(owners), set(written), on_device
        self._kept: dict[int, dict[str, Any]] = {}
        self._captures = 0
        self._seen: set[str] = set()  # names of modules that ever had an extra state
        self._complained = False

    def take(self, version: int) -> None:
        """Capture the states now as those of ``version``, and drop all but the newest ``_KEPT`` versions.

        Raises:
            ConfigError: a state cannot be stored without pickling.
        """
        try:
            found = {key: copy.deepcopy(value) for key, value in self._find().items()}
        except Exception:
            if not self._complained:
                self._complained = True
                log.warning("get_extra_state() failed: checkpoints hold the states captured before", exc_info=True)
            return
        self._look_at_new(found)
        before = sorted(known for known in self._kept if known < version)[1 - _KEPT :]
        self._kept = {known: self._kept[known] for known in before} | {version: found}

    def _find(self) -> dict[str, Any]:
        """Return the present states, without asking every module that never had one (see ``_PARTS``).

        Programs switch FP8 on after some steps, and for many modules at once: when a module has a state for the first
        time, all modules are asked.
        """
        turn, self._captures = self._captures, self._captures + 1
        if turn < _LEARNING:
            return _states(self._owners)
        without = [key for key in self._owners if key not in self._seen]
        asked = {key: self._owners[key] for key in (*self._seen, *without[turn % _PARTS :: _PARTS])}
        found = _states(asked)
        if found.keys() <= self._seen:
            return found
        return found | _states({key: self._owners[key] for key in without if key not in asked})

    def _look_at_new(self, found: Mapping[str, Any]) -> None:
        """Warn once that captures may wait for the device, and refuse a new state that cannot be saved."""
        if found and not self._seen and self._on_device:
            log.warning(
                "get_extra_state() of %d modules is called at each update: it may wait for the device", len(found)
            )
        for key in found.keys() - self._seen:
            self._seen.add(key)
            if dump((found[key],), lambda tensor: tensor.cpu()) is None:
                raise ConfigError(
                    f"{key}: get_extra_state() of a {type(self._owners[key]).__name__} gives a "
                    f"{type(found[key]).__name__}, which cannot be loaded without unpickling: give a tensor of bytes, "
                    "as newer releases of Transformer Engine do"
                )

    def of(self, version: int) -> dict[str, tuple[Any]]:
        """Return the states of ``version`` that this rank writes, in Megatron's form for such values."""
        known = max((each for each in self._kept if each <= version), default=min(self._kept, default=None))
        if known != version:
            log.warning("the checkpoint of version %s holds the extra states of version %s", version, known)
        states = {} if known is None else self._kept[known]
        return {key: (states.get(key),) for key in self._owners if key in self._written}

    def restore(self, path: Path, saved: Mapping[str, Sequence[IndexEntry]]) -> list[str]:
        """Restore the state of every module.

        Args:
            path: the directory of the checkpoint.
            saved: the checkpoint's entries, by name.

        Returns:
            Notes for the log on modules that have a state now, but none in the checkpoint.

        Raises:
            CheckpointError: a state cannot be read, or its module refuses it.
        """
        lost = []
        for key, owner in self._owners.items():
            if key not in saved:
                lost.append(key)
                continue
            (value,) = read_value(path, saved[key][0])
            if is_empty(value):
                continue
            try:
                owner.set_extra_state(value)
            except Exception as problem:
                raise CheckpointError(f"{key}: set_extra_state() refused the saved state: {problem}") from problem
        present = [key for key in lost if key in _states(self._owners)]
        return [f"the extra state of {', '.join(present[:5])} was not saved and stays as it is"] if present else []


def _states(owners: Mapping[str, nn.Module]) -> dict[str, Any]:
    states = ((key, owner.get_extra_state()) for key, owner in owners.items())
    return {key: value for key, value in states if not is_empty(value)}


def is_empty(value: Any) -> bool:
    """Return whether ``value``, a result of ``get_extra_state()``, means that the module has no extra state."""
    return value is None or (isinstance(value, Tensor) and value.numel() == 0)
