"""Try To Persist: when a rank of a distributed training job dies, no finished step is lost.

``import ttp`` loads no torch, mindspore or grpc; each is imported when it is first needed. If ``TTP_PORT`` is set, the
import also sets environment variables that NCCL reads when a process group is made, see ``ttp.launch.nccl``.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from ttp._version import __version__
from ttp.errors import (
    CheckpointError,
    ConfigError,
    RefusedError,
    RestoreError,
    TtpError,
    UsageError,
)

if TYPE_CHECKING:
    from ttp import accelerate as accelerate
    from ttp import deepspeed as deepspeed
    from ttp import hf as hf
    from ttp import lightning as lightning
    from ttp import ray as ray
    from ttp import titan as titan
    from ttp.api import paused, restore, step_done, ttp_to_persist, wrap_optimizer
    from ttp.core.layout import Layout
    from ttp.legacy import (
        ttp_end_updating_os,
        ttp_init_controller,
        ttp_init_processor,
        ttp_register_rename_handler,
        ttp_register_save_ckpt_handler,
        ttp_set_ckpt_args,
        ttp_start_controller,
        ttp_start_processor,
        ttp_start_updating_os,
    )
    from ttp.update_function import one_step

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Layout",
    "RefusedError",
    "RestoreError",
    "TtpError",
    "UsageError",
    "__version__",
    "one_step",
    "paused",
    "restore",
    "step_done",
    "ttp_end_updating_os",
    "ttp_init_controller",
    "ttp_init_processor",
    "ttp_register_rename_handler",
    "ttp_register_save_ckpt_handler",
    "ttp_set_ckpt_args",
    "ttp_start_controller",
    "ttp_start_processor",
    "ttp_start_updating_os",
    "ttp_to_persist",
    "wrap_optimizer",
]


FRAMEWORKS = ("accelerate", "deepspeed", "hf", "lightning", "ray", "titan")
"""Submodules that each need the package of one framework; see docs/frameworks.md."""
HOMES = {"Layout": "ttp.core.layout", "one_step": "ttp.update_function"}
"""Modules of public names that are neither in ``ttp.api`` nor (names of the seed documents) in ``ttp.legacy``."""


if not TYPE_CHECKING:  # to a type checker a misspelled name is an error

    def __getattr__(name: str) -> object:
        """Import a public name from its module on first use."""
        if name in FRAMEWORKS:
            return importlib.import_module(f"ttp.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'ttp' has no attribute {name!r}")
        old = name.startswith("ttp_") and name != "ttp_to_persist"
        home = HOMES.get(name, "ttp.legacy" if old else "ttp.api")
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("TTP_PORT"):
    from ttp.launch.nccl import prepare

    prepare()
