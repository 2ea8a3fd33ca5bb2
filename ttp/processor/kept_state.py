"""Keeps the state of a rank that was released to go on in its process, for the restore that follows."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("ttp")


class KeptState:
    """The state that a rank had when it was released to go on, kept for the restore that follows."""

    def __init__(self) -> None:
        self._kept: Any = None
        self._why = "this process has just been started"
        self.way = ""
        """How this rank got its state, in words; empty: it has not been restored."""

    def keep(self, adapter: Any, incident: str) -> None:
        """Get the state from the source of the adapter, whose training thread has left its loop. Never raises.

        Args:
            adapter: the adapter of the old launch.
            incident: the incident that has ended.
        """
        self.way = ""
        try:
            self._kept, self._why = adapter.source.keep(incident), ""
        except Exception as problem:
            self._kept, self._why = None, str(problem) or repr(problem)

    def take(self) -> tuple[Any, str]:
        """Return the state and an empty text, or None and why there is no state. This object drops the state."""
        found, self._kept = (self._kept, self._why), None
        self._why = "it was given away already"
        return found

    def say(self, way: str) -> None:
        """Note and log how this rank got its state, in words."""
        self.way = way
        log.info("%s", way)
