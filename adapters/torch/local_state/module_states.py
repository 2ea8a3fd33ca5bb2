"""Captures the extra states (``get_extra_state()``) of modules, such as FP8 scales with Transformer Engine.

They change in the forward and the backward pass, so they are copied for each version before these begin. Nothing is
encoded until a checkpoint is written. A module may read its state from a device, as Transformer Engine does: then every
update waits for the device once, and the log says so.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

log = logging.getLogger("ttp.adapters.torch")

_KEPT = 4
"""Number of versions whose states are kept, because a host may be some updates ahead of its device."""


class ModuleStates:
    """Captures and keeps the extra states of the modules of one rank.

    Args:
        owners: the modules, by the name of their extra state in the checkpoint.
        on_device: whether the states may lie on an accelerator.
    """

    def __init__(self, owners: Mapping[str, nn.Module], *, on_device: bool = False) -> None:
        self._owners, self._on_device = dict(owners), on_device
        self._kept: dict[int, dict[str, Any]] = {}
        self._seen: set[str] = set()  # names of modules that ever had an extra state
        self._complained = False

    def values(self, version: int) -> dict[str, Any] | None:
        """Return the states of ``version``, without those that were empty; None: they were not captured."""
        return self._kept.get(version)

    def forget(self) -> None:
        """Drop all states. Call this when a restore has replaced them."""
        self._kept = {}

    def take(self, version: int) -> None:
        """Capture the states now as those of ``version``, and drop all but the newest ``_KEPT`` versions."""
        try:
            found = {key: copy.deepcopy(value) for key, value in states_of(self._owners).items()}
        except Exception:
            if not self._complained:
                self._complained = True
                log.warning("get_extra_state() failed: checkpoints may hold states of another version", exc_info=True)
            return
        self._note_new(found)
        before = sorted(known for known in self._kept if known < version)[1 - _KEPT :]
        self._kept = {known: self._kept[known] for known in before} | {version: found}

    def _note_new(self, found: Mapping[str, Any]) -> None:
        """Note which modules have a state now. Warn once that captures may wait for the device."""
        if found and not self._seen and self._on_device:
            log.warning(
                "get_extra_state() of %d modules is called at each update: it may wait for the device", len(found)
            )
        for key in found.keys() - self._seen:
            self._seen.add(key)
            self._first_seen(key, found[key])

    def _first_seen(self, key: str, state: Any) -> None:
        """Called with the first state of each module. Megatron's checks it here; for torch ``saving.trial`` does."""


def states_of(owners: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the present extra states by name, without empty ones."""
    states = ((key, owner.get_extra_state()) for key, owner in owners.items())
    return {key: value for key, value in states if not is_empty(value)}


def is_empty(value: Any) -> bool:
    """Return whether ``value``, a result of ``get_extra_state()``, means that the module has no extra state."""
    return value is None or (isinstance(value, Tensor) and value.numel() == 0)
