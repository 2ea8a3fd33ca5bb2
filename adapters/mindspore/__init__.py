"""MindSpore: the power-off checkpoint, and what can be made of checkpoints. See docs/mindspore.md.

MindSpore is imported when a name is first used; torch never is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttp.adapters.mindspore.callbacks import TFTRegister, TrainFaultTolerance
    from ttp.adapters.mindspore.resuming import Resumed, restore
    from ttp.adapters.mindspore.wrapper import OptTFTWrapper, OptTTPWrapper
    from ttp.mindspore_files.group_info import write_group_info
    from ttp.mindspore_files.newest_whole import Loaded, load_newest
    from ttp.mindspore_files.replica_path import get_ckpt_path_with_strategy

_HOME = {
    "Loaded": "ttp.mindspore_files.newest_whole",
    "OptTFTWrapper": "ttp.adapters.mindspore.wrapper",
    "OptTTPWrapper": "ttp.adapters.mindspore.wrapper",
    "Resumed": "ttp.adapters.mindspore.resuming",
    "TFTRegister": "ttp.adapters.mindspore.callbacks",
    "TrainFaultTolerance": "ttp.adapters.mindspore.callbacks",
    "get_ckpt_path_with_strategy": "ttp.mindspore_files.replica_path",
    "load_newest": "ttp.mindspore_files.newest_whole",
    "restore": "ttp.adapters.mindspore.resuming",
    "write_group_info": "ttp.mindspore_files.group_info",
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
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
