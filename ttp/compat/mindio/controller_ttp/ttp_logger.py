"""``mindio_ttp.controller_ttp.ttp_logger``: the log that frameworks' modules write into beside the original."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("ttp.compat.mindio")
