"""MindSpore: the power-off checkpoint, and tools for its checkpoint files. See docs/mindspore.md.

MindSpore is imported when a public name is first used. torch is never imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttp.adapters.mindspore.callbacks import TFTRegister as TFTRegister
    from ttp.adapters.mindspore.callbacks import TrainFaultTolerance as TrainFaultTolerance
    from ttp.adapters.mindspore.resuming import Resumed as Resumed
    from ttp.adapters.mindspore.resuming import restore as restore
    from ttp.adapters.mindspore.wrapper import OptTFTWrapper as OptTFTWrapper
    from ttp.adapters.mindspore.wrapper import OptTTPWrapper as OptTTPWrapper
    from ttp.mindspore_files.group_info import write_group_info as write_group_info
    from ttp.mindspore_files.newest_whole import Loaded as Loaded
    from ttp.mindspore_files.newest_whole import load_newest as load_newest
    from ttp.mindspore_files.replica_path import get_ckpt_path_with_strategy as get_ckpt_path_with_strategy

_NAMES = {
    "ttp.adapters.mindspore.callbacks": ("TFTRegister", "TrainFaultTolerance"),
    "ttp.adapters.mindspore.resuming": ("Resumed", "restore"),
    "ttp.adapters.mindspore.wrapper": ("OptTFTWrapper", "OptTTPWrapper"),
    "ttp.mindspore_files.group_info": ("write_group_info",),
    "ttp.mindspore_files.newest_whole": ("Loaded", "load_newest"),
    "ttp.mindspore_files.replica_path": ("get_ckpt_path_with_strategy",),
}
_HOME = {name: home for home, names in _NAMES.items() for name in names}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
