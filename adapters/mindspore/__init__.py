"""MindSpore: the power-off checkpoint, and what can be made of checkpoints. See docs/mindspore.md.

MindSpore is imported when a name is first used; torch never is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttp.adapters.mindspore.callbacks import TFTRegister, TrainFaultTolerance
    from ttp.adapters.mindspore.group_info import write_group_info
    from ttp.adapters.mindspore.newest import Loaded, load_newest
    from ttp.adapters.mindspore.replica_path import get_ckpt_path_with_strategy
    from ttp.adapters.mindspore.resuming import Resumed, restore
    from ttp.adapters.mindspore.wrapper import OptTFTWrapper, OptTTPWrapper

_HOME = {
    "Loaded": "newest",
    "OptTFTWrapper": "wrapper",
    "OptTTPWrapper": "wrapper",
    "Resumed": "resuming",
    "TFTRegister": "callbacks",
    "TrainFaultTolerance": "callbacks",
    "get_ckpt_path_with_strategy": "replica_path",
    "load_newest": "newest",
    "restore": "resuming",
    "write_group_info": "group_info",
}

__all__ = [
    "Loaded",
    "OptTFTWrapper",
    "OptTTPWrapper",
    "Resumed",
    "TFTRegister",
    "TrainFaultTolerance",
    "get_ckpt_path_with_strategy",
    "load_newest",
    "restore",
    "write_group_info",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
