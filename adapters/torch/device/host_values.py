"""Keeps copies of the numbers that an optimizer has on the host, such as step counts, while its tensors are on devices.

The host may be ahead of the devices, so these numbers may be of a newer version than the tensors that can be saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ttp.adapters.torch.device.accelerator import AHEAD_MAX
from ttp.errors import CheckpointError

_SCANS = 3
"""Number of updates after which an optimizer has made all of its state."""

_Values = dict[Any, Any]
"""The state of one parameter."""
_Entry = tuple[_Values, Any]
"""The state of one parameter, and a key in it."""
_Place = tuple[int, Any]
"""The identity of the state of one parameter, and a key in it."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """The numbers of one version.

    Args:
        version: number of finished updates.
        places: index of each number in ``numbers``.
        numbers: the numbers, also those of scalar tensors: to read these one by one takes half the time of a stack.
    """

    version: int
    places: Mapping[_Place, int]
    numbers: list[Any]


class HostValues:
    """Copies the numbers that an optimizer has on the host after each update, for the last ``AHEAD_MAX + 1`` versions.

    Args:
        state: returns the live state of each parameter.
        on_host: returns whether a tensor is on the host.
    """

    def __init__(self, state: Callable[[], list[Any]], on_host: Callable[[Tensor], bool]) -> None:
        self._state, self._on_host = state, on_host
        self._kept: deque[_Kept] = deque(maxlen=AHEAD_MAX + 1)
        self._known: list[int] = []  # identities of the states: a program may load or reset them
        self._scans = 0
        self._tensors: list[_Entry] = []
        self._plain: list[_Entry] = []
        self._places: dict[_Place, int] = {}

    def note(self, version: int) -> None:
        """Copy the numbers as those of ``version``. For the training thread, when it has finished that update."""
        state = self._state()
        if self._scans < _SCANS or [*map(id, state)] != self._known:
            self._scan(state)
        try:
            self._keep(version)
        except (KeyError, AttributeError, RuntimeError):  # the optimizer keeps other values than before
            self._scan(state)
            self._keep(version)

    def of(self, values: Any, version: int) -> Any:
        """Return the state of one parameter with the numbers of ``version``. May be called on any thread.

        Args:
            values: the live state of the parameter.
            version: number of finished updates.

        Raises:
            CheckpointError: the numbers of that version are not kept.
        """
        if not isinstance(values, dict):
            return values
        return {key: self.value(values, key, version) for key in list(values)}

    def value(self, values: _Values, key: Any, version: int) -> Any:
        """Return one value of a parameter's state: a number as it was at ``version``, a tensor on a device unchanged.

        Raises:
            CheckpointError: the number of that version is not kept.
        """
        value = values[key]
        there = isinstance(value, Tensor) and self._on_host(value)
        if not there and type(value) not in (int, float):
            return value
        kept = next((each for each in reversed(tuple(self._kept)) if each.version == version), None)
        place = None if kept is None else kept.places.get((id(values), key))
        if kept is None or place is None:
            raise CheckpointError(
                f"the host is ahead of its device, and the optimizer's {key!r}, which is on the host, was not kept for "
                f"version {version}"
            )
        number = kept.numbers[place]
        return torch.tensor(number, dtype=value.dtype, device="cpu") if there else number

    def _keep(self, version: int) -> None:
        numbers = [values[key].item() for values, key in self._tensors]
        numbers += [values[key] for values, key in self._plain]
        self._kept.append(_Kept(version, self._places, numbers))

    def _scan(self, state: list[Any]) -> None:
        """Find the scalar tensors on the host and the Python numbers in the state."""
        self._tensors, self._plain = [], []
        for values in state:
            for key, value in list(values.items()) if isinstance(values, dict) else ():
                if isinstance(value, Tensor) and not value.dim() and self._on_host(value):
                    self._tensors.append((values, key))
                elif type(value) in (int, float):
                    self._plain.append((values, key))
        entries = enumerate((*self._tensors, *self._plain))
        self._places = {(id(values), key): index for index, (values, key) in entries}
        self._known, self._scans = [*map(id, state)], self._scans + 1
