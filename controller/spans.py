"""Sends incidents as traces once they are over; see ``ttp.cli.spans``.

A process of its own for each: the SDK is heavy, exporters wait and retry, and none of it may be felt by a controller
that watches over a job. It is given its story in memory, so storage that fails does not keep it from being told.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ttp.controller.journal import Happening, line_of

log = logging.getLogger("ttp.controller")

OVER = ("closed", "thawed")
SENDING_S = 60.0
LEAVING_S = 3.0
"""How long a controller that ends waits for its last incident to be handed over."""


def wanted(environ: Mapping[str, str]) -> bool:
    """Whether there is a collector: by the variables that OpenTelemetry has for it."""
    named = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return bool(named) and environ.get("OTEL_SDK_DISABLED", "").lower() != "true"


class SpanSender:
    """Watches a controller's events and sends what is over.

    Args:
        history: the controller's events; the last one is the one that is observed.
    """

    def __init__(self, history: Sequence[Happening]) -> None:
        self._history = history
        self._threads: list[threading.Thread] = []
        self._said: set[str] = set()

    def take(self, kind: str, facts: Mapping[str, Any], now: float, unix_s: float) -> None:
        """An event of the controller, as it is recorded. Never blocks."""
        if kind not in OVER or not (incident := self._history[-1].incident):
            return
        story = [happening for happening in self._history if happening.incident == incident]
        thread = threading.Thread(target=self._send, args=(incident, story), name="ttp-spans", daemon=True)
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]
        thread.start()

    def close(self) -> None:
        """Wait a little for what is being sent. What takes longer goes on without this process."""
        for thread in self._threads:
            thread.join(LEAVING_S / len(self._threads))

    def _send(self, incident: str, story: list[Happening]) -> None:
        command = [sys.executable, "-m", "ttp.cli.spans", incident]
        try:
            with os.fdopen(os.memfd_create("ttp-spans"), "w+b") as lines:
                lines.write("".join(map(line_of, story)).encode())
                lines.seek(0)
                done = subprocess.run(
                    command, stdin=lines, capture_output=True, timeout=SENDING_S, start_new_session=True, check=False
                )
            problem = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] if done.returncode else ""
        except (OSError, subprocess.SubprocessError) as refused:
            problem = str(refused)
        level = logging.DEBUG if not problem or self._said else logging.WARNING
        self._said |= {problem} if problem else set()
        log.log(level, "incident %s as a trace: %s", incident, f"not sent: {problem}" if problem else "sent")
