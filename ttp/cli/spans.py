"""Sends an incident as spans of OpenTelemetry, by OTLP: one trace, whose id is derived from the incident's id.

A controller starts ``python -m ttp.cli.spans INCIDENT`` once an incident is over, with the incident's lines on standard
input. Once the next launch has read the checkpoint, the controller starts it with ``--restore`` and the lines of the
launches. If the SDK, the network or the collector hang or fail, only this process is affected, and no process waits for
it. The usual variables configure it: ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``..._HEADERS``, ``..._PROTOCOL``,
``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

from ttp._version import __version__
from ttp.cli.incident_reader import IncidentLog, parse_incident
from ttp.cli.trace_events import CONTROLLER, SAVING, STAGES, Event, trace_events
from ttp.errors import ConfigError, TtpError
from ttp.store.history import Launch, parse_launches

NICE = 10
MISSING = "OpenTelemetry is not installed: pip install 'ttp-ft[otlp]'"
STAGE_SPANS = {"freeze": "ttp.freeze", "save": "ttp.save", "commit": "ttp.commit", "saved": "ttp.release"}
EVENTS_MAX = 128
"""Maximum number of events of the root span; the default limit of the SDK."""
TEXT_MAX = 1_000


class NotSentError(TtpError):
    """The collector did not take the spans."""


class _Ids:
    """Generates ids that are derived from the incident's id, so that sending an incident twice sends the same ids."""

    def __init__(self, incident: str) -> None:
        self._incident, self._count = incident, 0

    def generate_trace_id(self) -> int:
        """See ``IdGenerator.generate_trace_id`` of the SDK."""
        return int.from_bytes(hashlib.sha256(self._incident.encode()).digest()[:16], "big")

    def generate_span_id(self) -> int:
        """See ``IdGenerator.generate_span_id`` of the SDK."""
        self._count += 1
        return int.from_bytes(hashlib.sha256(f"{self._incident} {self._count}".encode()).digest()[:8], "big")

    def is_trace_id_random(self) -> bool:
        """See ``IdGenerator.is_trace_id_random`` of the SDK."""
        return False


def trace_id(incident: str) -> str:
    """Return the id of an incident's trace, as collectors show it."""
    return f"{_Ids(incident).generate_trace_id():032x}"


def spans(log: IncidentLog) -> list[Any]:
    """Return the spans of an incident: ``ttp.incident``, its stages, and what each rank wrote.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    tracer = _tracer(log.id)
    from opentelemetry.trace import Status, StatusCode, set_span_in_context

    events = trace_events(log)["traceEvents"]
    zero_ns = int(log.opened_unix_s * 1e9)
    made: list[Any] = []

    def begin(name: str, above: Any, event: Event, **attributes: Any) -> Any:
        context = None if above is None else set_span_in_context(above)
        said = {key.replace("_", "."): value for key, value in attributes.items()}
        made.append(tracer.start_span(name, context, attributes=said, start_time=zero_ns + int(event["ts"] * 1e3)))
        return made[-1]

    def end(span: Any, event: Event) -> None:
        span.end(zero_ns + int((event["ts"] + event["dur"]) * 1e3))

    whole = {"ts": 0.0, "dur": 1e3 * (log.lines[-1].at_ms if log.lines else 0.0)}
    root = begin("ttp.incident", None, whole, **_about(log))
    good = log.saved or log.last("thawed") is not None
    root.set_status(Status(StatusCode.OK) if good else Status(StatusCode.ERROR, log.outcome[:TEXT_MAX]))
    for event in [event for event in events if event["ph"] == "i"][:EVENTS_MAX]:
        root.add_event(event["name"][:TEXT_MAX], timestamp=zero_ns + int(event["ts"] * 1e3))
    stages = [event for event in events if (event["ph"], event["pid"], event.get("tid")) == ("X", CONTROLLER, STAGES)]
    above = [(event, begin(STAGE_SPANS[event["name"]], root, event)) for event in stages]
    for event in events:
        if event["ph"] == "X" and event["pid"] != CONTROLLER and event["tid"] == SAVING:
            stage = next((s for e, s in above if e["ts"] <= event["ts"] < e["ts"] + e["dur"]), root)
            name = "ttp.commit.manifest" if event["name"].startswith("commit") else "ttp.save.shard"
            one = begin(name, stage, event, ttp_rank=event["pid"] - 1, **_size(event))
            if event["name"].endswith("failed"):
                one.set_status(Status(StatusCode.ERROR, str(event["args"].get("text"))[:TEXT_MAX]))
            end(one, event)
    for event, span in above:
        end(span, event)
    end(root, whole)
    return made


def restore_span(launch: Launch, incident: str) -> Any:
    """Return a span ``ttp.restore``: from when all ranks of a launch had joined until they had read their state.

    Args:
        launch: a launch that has restored a checkpoint.
        incident: the incident that ended the launch before it, or empty. The span, which is a trace of its own, has a
            link to that incident's trace.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    tracer = _tracer(f"restore {launch.run_id} {launch.began_unix_s:.3f}")
    from opentelemetry.trace import Link, SpanContext, TraceFlags

    ids = _Ids(incident)
    root = SpanContext(ids.generate_trace_id(), ids.generate_span_id(), True, TraceFlags(TraceFlags.SAMPLED))
    told = {"ttp.run.id": launch.run_id, "ttp.version": launch.restored, "ttp.bytes": launch.restored_bytes}
    span = tracer.start_span(
        "ttp.restore",
        attributes=told,
        links=[Link(root)] if incident else [],
        start_time=int((launch.joined_unix_s or launch.began_unix_s) * 1e9),
    )
    span.end(int(launch.restored_unix_s * 1e9))
    return span


def _tracer(seed: str) -> Any:
    """Return a tracer whose ids are derived from ``seed``.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError:
        raise ConfigError(MISSING) from None
    facts = {"service.version": __version__, "service.instance.id": f"{socket.gethostname()}:{os.getppid()}"}
    if "OTEL_SERVICE_NAME" not in os.environ:
        facts["service.name"] = "ttp-controller"
    provider = TracerProvider(resource=Resource.create(facts), id_generator=_Ids(seed), shutdown_on_exit=False)
    return provider.get_tracer("ttp", __version__)


def _about(log: IncidentLog) -> dict[str, Any]:
    opened, released = log.last("opened"), log.last("released")
    told: dict[str, Any] = {"ttp_incident_id": log.id, "ttp_cause": log.cause[:TEXT_MAX]}
    told["ttp_outcome"] = log.outcome[:TEXT_MAX]
    if log.version is not None:
        told["ttp_version"] = log.version
    run_id = opened.facts.get("run_id") if opened is not None else None
    code = released.facts.get("exit_code") if released is not None else None
    return (
        told | ({"ttp_run_id": str(run_id)} if run_id else {}) | ({"ttp_exit_code": code} if code is not None else {})
    )


def _size(event: Event) -> dict[str, Any]:
    pieces = [piece for piece in event["args"].get("pieces") or () if isinstance(piece, dict)]
    return {"ttp_bytes": sum(int(piece.get("size") or 0) for piece in pieces)} if pieces else {}


def send(made: list[Any]) -> int:
    """Send spans, and return their number.

    Raises:
        ConfigError: the exporter for the chosen protocol is not installed.
        NotSentError: the collector did not take the spans.
    """
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    try:
        from opentelemetry.sdk.trace.export import SpanExportResult

        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(MISSING) from None
    heard = _Heard()
    logging.getLogger("opentelemetry").addHandler(heard)
    exporter = OTLPSpanExporter()
    try:
        if exporter.export(made) is not SpanExportResult.SUCCESS:
            raise NotSentError(f"the collector did not accept the spans: {heard.last or 'it does not answer'}")
    finally:
        exporter.shutdown()
    return len(made)


class _Heard(logging.Handler):
    """A log handler that keeps the exporter's last message, since the exporter's result says only that it failed."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler.emit``."""
        self.last = " ".join(record.getMessage().split())[:TEXT_MAX]


def main(incident: str, restore: bool) -> int:
    """Send the incident, or the restore after it, whose lines are on standard input. Returns the exit code."""
    os.nice(NICE)
    logging.getLogger("opentelemetry").propagate = False
    try:
        with os.fdopen(0, "rb") as lines:
            if not restore:
                send(spans(parse_incident(lines, incident, Path("-"))))
            elif (launches := parse_launches(lines.read())) and launches[-1].restored:
                send([restore_span(launches[-1], incident)])
    except TtpError as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--restore" in sys.argv[2:]))
