"""``mindio_ttp.framework_ttp``: the names that training programs import, newer (``tft_*``) and older (``ttp_*``)."""

from __future__ import annotations

from ttp.api import ttp_to_persist
from ttp.compat.mindio.framework_ttp import ttp_decorator
from ttp.compat.mindio.framework_ttp.ttp_decorator import *  # noqa: F403 - these are the same names
from ttp.legacy import (
    ttp_end_updating_os,
    ttp_init_controller,
    ttp_init_processor,
    ttp_register_rename_handler,
    ttp_register_save_ckpt_handler,
    ttp_set_ckpt_args,
    ttp_set_fm_dump_callback,
    ttp_set_fm_rename_callback,
    ttp_start_controller,
    ttp_start_processor,
    ttp_start_updating_os,
)

__all__ = [
    "ttp_end_updating_os",
    "ttp_init_controller",
    "ttp_init_processor",
    "ttp_register_rename_handler",
    "ttp_register_save_ckpt_handler",
    "ttp_set_ckpt_args",
    "ttp_set_fm_dump_callback",
    "ttp_set_fm_rename_callback",
    "ttp_start_controller",
    "ttp_start_processor",
    "ttp_start_updating_os",
    "ttp_to_persist",
]
__all__ += ttp_decorator.__all__
