"""Random generators of the program's own, given as ``extra_state`` as they are."""

from __future__ import annotations

import sys
from typing import Any

import torch


class TorchGenerator:
    """Saves and loads the state of a ``torch.Generator``, in place."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the state, a tensor on the host."""
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state. Raises an error if it is that of another kind of generator."""
        self.generator.set_state(state["state"])


class NumpyGenerator:
    """Saves and loads the state of a ``numpy.random.Generator``, in place."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the name and the numbers of the bit generator."""
        return {**self.generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state. Raises an error if it is that of another kind of bit generator."""
        self.generator.bit_generator.state = state


def with_state_dict(given: Any) -> Any:
    """Return an object that saves and loads the state of a random generator; anything else as it is."""
    if isinstance(given, torch.Generator):
        return TorchGenerator(given)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(given, numpy.random.Generator):
        return NumpyGenerator(given)
    return given
