"""Writes and restores the extra states (``get_extra_state()``) of Megatron's modules: FP8 scales of Transformer Engine.

An extra state is equal on all replicas of a shard (Megatron reduces it). So it is captured at the gate of each update,
as the extra state of the version that the update makes, and written with the shard.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ttp.adapters.torch.local_state.module_states import ModuleStates, is_empty, states_of
from ttp.adapters.torch.restoring.compare import hand_to
from ttp.adapters.torch.restoring.reader import read_value
from ttp.adapters.torch.saving.flatten_state import dump
from ttp.adapters.torch.saving.piece_index import IndexEntry
from ttp.errors import ConfigError

log = logging.getLogger("ttp.adapters.megatron")


class ExtraStates(ModuleStates):
    """The extra states of the modules of one rank, in Megatron's form.

    Args:
        owners: the modules, by the name of their extra state in the checkpoint.
        written: names of the states that this rank writes; ranks with other parts of the model may hold equal states.
        on_device: whether the states may lie on an accelerator.
    """

    def __init__(self, owners: Mapping[str, nn.Module], written: Iterable[str], *, on_device: bool = False) -> None:
        super().__init__(owners, on_device=on_device)
        self._written = set(written)

    def _first_seen(self, key: str, state: Any) -> None:
        """Refuse a new state that cannot be saved.

        Raises:
            ConfigError: the state cannot be stored without pickling.
        """
        if dump((state,), lambda tensor: tensor.cpu()) is None:
            raise ConfigError(
                f"{key}: get_extra_state() of a {type(self._owners[key]).__name__} gives a {type(state).__name__}, "
                "which cannot be loaded without unpickling: give a tensor of bytes, as newer releases of Transformer "
                "Engine do"
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
            CheckpointError: a state cannot be read.
            OtherModelError: a module refuses its state.
        """
        lost = []
        for key, owner in self._owners.items():
            if key not in saved:
                lost.append(key)
                continue
            (value,) = read_value(path, saved[key][0])
            if not is_empty(value):
                hand_to(f"set_extra_state() of {key}", owner.set_extra_state, value)
        present = [key for key in lost if key in states_of(self._owners)]
        return [f"the extra state of {', '.join(present[:5])} was not saved and stays as it is"] if present else []
