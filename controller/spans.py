"""Sends each finished incident, and the restore after it, as an OpenTelemetry trace; see ``ttp.cli.spans``.

A separate process sends each trace: the SDK is heavy, and exporters wait and retry, which must not slow the controller.
The process gets the events in memory, so it works even when storage fails.
"""

from __future__ import annotations

import json
import logging
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ttp.controller.journal import RecordedEvent, line_of
from ttp.launch.memory_file import memory_file
from ttp.launch.own_module import own_module
from ttp.store.history import BEGINS, HISTORY_KINDS
from ttp.store.history import line_of as history_line

log = logging.getLogger("ttp.controller")

OVER = ("closed", "thawed")
"""Kinds of events that end an incident."""
SENDING_S = 60.0
"""Seconds that sending a trace may take."""
LEAVING_S = 3.0
"""Seconds that a stopping controller waits for its last traces to be sent."""


def wanted(environ: Mapping[str, str]) -> bool:
    """Return whether OpenTelemetry's own environment variables name a trace collector."""
    named = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return bool(named) and environ.get("OTEL_SDK_DISABLED", "").lower() != "true"


class SpanSender:
    """Watches a controller's events, and sends a trace for each finished incident and each finished restore.

    Args:
        history: the controller's events; its last element is the event for which ``take`` is called.
    """

    def __init__(self, history: Sequence[RecordedEvent]) -> None:
        self._history = history
        self._threads: list[threading.Thread] = []
        self._said: set[str] = set()

    def take(self, kind: str, facts: Mapping[str, Any], now: float, unix_s: float) -> None:
        """Take an event that the controller records. Never blocks."""
        incident = self._history[-1].incident
        if kind in OVER and incident:
            events = [recorded for recorded in self._history if recorded.incident == incident]
            self._start((incident,), lambda: "".join(map(line_of, events)))
        elif kind == "restored" and facts.get("version"):
            events = [recorded for recorded in self._history if recorded.kind in (BEGINS, *HISTORY_KINDS)]
            released = (recorded.incident for recorded in reversed(events) if recorded.kind == "released")
            self._start((next(released, ""), "--restore"), lambda: "".join(map(_noted, events)))

    def _start(self, arguments: tuple[str, ...], text: Callable[[], str]) -> None:
        thread = threading.Thread(target=self._send, args=(arguments, text), name="ttp-spans", daemon=True)
        self._threads = [*(t for t in self._threads if t.is_alive()), thread]
        thread.start()

    def close(self) -> None:
        """Wait at most ``LEAVING_S`` seconds for running senders. A slower process continues without the controller."""
        for thread in self._threads:
            thread.join(LEAVING_S / len(self._threads))

    def _send(self, arguments: tuple[str, ...], text: Callable[[], str]) -> None:
        command = [*own_module("ttp.cli.spans"), *arguments]
        try:
            with memory_file() as lines:
                lines.write(text().encode())
                lines.seek(0)
                done = subprocess.run(
                    command, stdin=lines, capture_output=True, timeout=SENDING_S, start_new_session=True, check=False
                )
            problem = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] if done.returncode else ""
        except (OSError, subprocess.SubprocessError) as refused:
            problem = str(refused)
        level = logging.DEBUG if not problem or self._said else logging.WARNING
        self._said |= {problem} if problem else set()
        log.log(
            level,
            "sending incident %s as an OpenTelemetry trace: %s",
            " ".join(arguments),
            f"not sent: {problem}" if problem else "sent",
        )


def _noted(recorded: RecordedEvent) -> str:
    return history_line(recorded.kind, recorded.unix_s, json.loads(recorded.facts))
