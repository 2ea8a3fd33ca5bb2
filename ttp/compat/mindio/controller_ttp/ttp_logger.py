"""``mindio_ttp.controller_ttp.ttp_logger``: the logger that frameworks' modules use beside the original."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("ttp.compat.mindio")
