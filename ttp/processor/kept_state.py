"""What a rank still has when it was released to go on in its process, until it is restored."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("ttp")


class KeptState:
    """What a rank had when it was released to go on, for the restore that follows."""

    def __init__(self) -> None:
        self._kept: Any = None
        self._why = "this process has just been started"
        self.way = ""
        """How this rank came to its state, in words."""

    def keep(self, adapter: Any, incident: str) -> None:
        """Ask the adapter, whose training thread is out of its loop. Never raises."""
        self.way = ""
        try:
            self._kept, self._why = adapter.keep(incident), ""
        except Exception as problem:
            self._kept, self._why = None, str(problem) or repr(problem)

    def take(self) -> tuple[Any, str]:
        """What there is, or why there is nothing. It is not held here any more."""
        found, self._kept = (self._kept, self._why), None
        self._why = "it was given away already"
        return found

    def say(self, way: str) -> None:
        """How this rank came to its state."""
        self.way = way
        log.info("%s", way)
