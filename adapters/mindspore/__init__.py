"""MindSpore: the power-off checkpoint. See docs/mindspore.md.

MindSpore is imported when a name is first used; torch never is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttp.adapters.mindspore.callbacks import TFTRegister, TrainFaultTolerance
    from ttp.adapters.mindspore.resuming import Resumed, restore
    from ttp.adapters.mindspore.wrapper import OptTFTWrapper, OptTTPWrapper

_HOME = {
    "OptTFTWrapper": "ttp.adapters.mindspore.wrapper",
    "OptTTPWrapper": "ttp.adapters.mindspore.wrapper",
    "Resumed": "ttp.adapters.mindspore.resuming",
    "TFTRegister": "ttp.adapters.mindspore.callbacks",
    "TrainFaultTolerance": "ttp.adapters.mindspore.callbacks",
    "restore": "ttp.adapters.mindspore.resuming",
}

__all__ = ["OptTFTWrapper", "OptTTPWrapper", "Resumed", "TFTRegister", "TrainFaultTolerance", "restore"]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'ttp.adapters.mindspore' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
