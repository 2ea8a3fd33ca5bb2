"""What ``ttp.cli.spans`` hands to OpenTelemetry's SDK, which stands here as a recorder.

``tests/traces`` checks with the SDK and a collector.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.cli.test_incidents import SAVED, write
from ttp.cli import spans as sending
from ttp.cli.incident_reader import read_incident
from ttp.cli.spans import NotSentError, send, spans
from ttp.errors import ConfigError
from ttp.store.history import line_of


@dataclass
class Span:
    """A span as it was made."""

    name: str
    above: Span | None
    start: int
    attributes: dict[str, Any]
    links: list[Any]
    id: int
    end_ns: int = 0
    status: Any = None
    events: list[tuple[str, int]] = field(default_factory=list)

    def set_status(self, status: Any) -> None:
        self.status = status

    def add_event(self, name: str, timestamp: int) -> None:
        self.events.append((name, timestamp))

    def end(self, at: int) -> None:
        self.end_ns = at


class Provider:
    """Makes spans with the ids of the generator that it is given."""

    resource: ClassVar[dict[str, str]] = {}

    def __init__(self, *, resource: dict[str, str], id_generator: Any, **_: object) -> None:
        self.ids, Provider.resource = id_generator, resource

    def get_tracer(self, *_: object) -> Any:
        return self

    def start_span(
        self,
        name: str,
        context: Span | None = None,
        *,
        attributes: dict[str, Any],
        start_time: int,
        links: list[Any] | None = None,
    ) -> Span:
        return Span(name, context, start_time, attributes, links or [], self.ids.generate_span_id())


class Exporter:
    """A collector that takes spans, or refuses them."""

    sent: list[Any]
    taken = True

    def export(self, made: list[Any]) -> str:
        Exporter.sent = made
        if not self.taken:
            logging.getLogger("opentelemetry.exporter").warning("Transient error:\n connection refused")
        return "success" if self.taken else "failure"

    def shutdown(self) -> None:
        """See the SDK's exporters."""


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the recorder stand for the SDK and for the exporters of both protocols."""
    status = SimpleNamespace(OK="ok", ERROR="error")
    made: dict[str, dict[str, Any]] = {
        "trace": {
            "Status": lambda code, text="": (code, text), "StatusCode": status,
            "set_span_in_context": lambda span: span,
            "Link": lambda context: context, "SpanContext": lambda *ids: ids[:2],
            "TraceFlags": type("TraceFlags", (int,), {"SAMPLED": 1}),
        },
        "sdk.resources": {"Resource": SimpleNamespace(create=dict)},
        "sdk.trace": {"TracerProvider": Provider},
        "sdk.trace.export": {"SpanExportResult": SimpleNamespace(SUCCESS="success")},
        "exporter.otlp.proto.grpc.trace_exporter": {"OTLPSpanExporter": Exporter},
        "exporter.otlp.proto.http.trace_exporter": {"OTLPSpanExporter": Exporter},
    }  # fmt: skip
    for name, content in made.items():
        module = ModuleType(f"opentelemetry.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Exporter, "taken", True)
    monkeypatch.setattr(os, "nice", lambda _: 0)
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("sdk")
def test_every_span_lies_within_the_one_above_and_has_the_same_id_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = read_incident(write(tmp_path, "one", SAVED))
    made: list[Span] = spans(log)
    root, *rest = made
    assert (root.name, root.above, root.status) == ("ttp.incident", None, ("ok", ""))
    assert {span.name for span in rest} >= {"ttp.freeze", "ttp.save", "ttp.save.shard", "ttp.commit.manifest"}
    for span in rest:
        assert span.above is not None and span.above.start <= span.start <= span.end_ns <= span.above.end_ns + 1000
    (shard,) = (span for span in rest if span.name == "ttp.save.shard")
    assert (shard.above and shard.above.name, shard.attributes) == ("ttp.save", {"ttp.rank": 0, "ttp.bytes": 2000})
    assert root.attributes["ttp.version"] == 12 and root.attributes["ttp.exit.code"] == 75
    assert any("rank 3 was lost" in name for name, _ in root.events)
    assert Provider.resource["service.name"] == "ttp-controller"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    assert [span.id for span in spans(log)] == [span.id for span in made]
    assert "service.name" not in Provider.resource, "the SDK takes it from the variable"


@pytest.mark.usefixtures("sdk")
def test_an_incident_without_a_plan_that_saved_nothing_is_an_error(tmp_path: Path) -> None:
    failed = (9.0, "save_failed", {"rank": 0, "text": "No space left"})
    told = [*SAVED[:8], failed, (10.0, "released", {"exit_code": 70, "text": "nothing could be saved"})]
    found = {span.name: span for span in spans(read_incident(write(tmp_path, "one", told)))}
    assert found["ttp.save.shard"].status == ("error", "No space left")
    assert found["ttp.incident"].status[0] == "error"
    (only,) = spans(read_incident(write(tmp_path, "two", [(1.0, "thawed", {})])))
    assert only.status[0] == "ok" and "ttp.version" not in only.attributes, "a false alarm"


@pytest.mark.usefixtures("sdk")
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_what_a_collector_says_when_it_refuses_is_passed_on(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    assert send(["a", "b"]) == 2
    monkeypatch.setattr(Exporter, "taken", False)
    with pytest.raises(NotSentError, match="did not accept the spans: Transient error: connection refused"):
        send(["a"])


@pytest.mark.usefixtures("sdk")
def test_a_controller_hands_over_the_lines_of_an_incident_or_of_the_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The restore has a trace of its own, which names the incident before it."""
    lines = write(tmp_path, "one", SAVED).read_bytes()
    monkeypatch.setattr(os, "fdopen", lambda *_: io.BytesIO(lines))
    assert sending.main("one", restore=False) == 0
    root = Exporter.sent[0]
    launch = {"run_id": "job", "incarnation": 2, "world_size": 2, "save_dir": str(tmp_path)}
    lines = line_of("incarnation", 10.0, launch).encode()
    Exporter.sent = []
    assert sending.main("one", restore=True) == 0 and not Exporter.sent, "this launch has restored nothing"
    lines += line_of("restored", 12.0, {"version": 12, "bytes": 2000}).encode()
    assert sending.main("one", restore=True) == 0
    (restore,) = Exporter.sent
    assert (restore.name, restore.end_ns, restore.attributes["ttp.version"]) == ("ttp.restore", 12 * 10**9, 12)
    assert [link[1] for link in restore.links] == [root.id]
    monkeypatch.setattr(Exporter, "taken", False)
    assert sending.main("one", restore=True) == 1 and "did not accept" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["opentelemetry.sdk.resources", "opentelemetry.sdk.trace.export"])
def test_without_opentelemetry_it_is_said_what_to_install(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match="pip install 'ttp-ft"):
        send([]) if missing.endswith("export") else spans(read_incident(write(tmp_path, "one", SAVED)))
