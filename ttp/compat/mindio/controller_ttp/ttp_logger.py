"""``mindio_ttp.controller_ttp.ttp_logger``: the logger that modules of frameworks import from the original."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("ttp.compat.mindio")
