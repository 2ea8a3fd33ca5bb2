"""``mindio_ttp.framework_ttp``: the names that training programs import, newer (``tft_*``) and older (``ttp_*``)."""

from __future__ import annotations

from ttp import legacy
from ttp.api import ttp_to_persist
from ttp.compat.mindio.framework_ttp import ttp_decorator
from ttp.compat.mindio.framework_ttp.ttp_decorator import *  # noqa: F403 - these are the same names
from ttp.legacy import *  # noqa: F403 - these are the same names, too

__all__ = ["ttp_to_persist"]
__all__ += legacy.__all__
__all__ += ttp_decorator.__all__
