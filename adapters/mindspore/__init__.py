"""MindSpore: its checkpoints, and what can be made of them. MindSpore is imported when it is needed, not before."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttp.adapters.mindspore.group_info import write_group_info
    from ttp.adapters.mindspore.newest import Loaded, load_newest
    from ttp.adapters.mindspore.replica_path import get_ckpt_path_with_strategy

_HOME = {
    "Loaded": "ttp.adapters.mindspore.newest",
    "get_ckpt_path_with_strategy": "ttp.adapters.mindspore.replica_path",
    "load_newest": "ttp.adapters.mindspore.newest",
    "write_group_info": "ttp.adapters.mindspore.group_info",
}

__all__ = ["Loaded", "get_ckpt_path_with_strategy", "load_newest", "write_group_info"]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'ttp.adapters.mindspore' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
