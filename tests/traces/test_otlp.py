"""The spans of an incident, as a collector receives them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.making import making
from tests.waiting import until

pytest.importorskip("opentelemetry.sdk", reason="pip install 'ttp-ft[otlp]': nox -s traces does")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="pip install 'ttp-ft[otlp]'")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from tests.cli.conftest import Ttp, ttp
from tests.cli.test_incidents import SAVED, write
from tests.e2e.harness import Job
from tests.ports import free_port
from ttp.cli.incident_reader import read_incident
from ttp.cli.spans import spans, trace_id
from ttp.store.history import line_of

__all__ = ["ttp"]

Span = dict[str, Any]


class Collector(otlp_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Records the spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.service = ""
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        otlp_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for part in request.resource_spans:
            self.service = next(a.value.string_value for a in part.resource.attributes if a.key == "service.name")
            self.spans += [span for scope in part.scope_spans for span in scope.spans]
        return otlp.ExportTraceServiceResponse()

    def close(self) -> None:
        self._server.stop(None).wait()

    @property
    def env(self) -> dict[str, str]:
        where = f"http://127.0.0.1:{self.port}"
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": where, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def assert_is_one_trace(found: list[Any], incident: str) -> None:
    """Check that there is one root, and that every other span lies within its parent."""
    by_id = {span.span_id: span for span in found}
    assert len(by_id) == len(found) and {span.trace_id.hex() for span in found} == {trace_id(incident)}
    assert [span.name for span in found if not span.parent_span_id] == ["ttp.incident"]
    for span in found:
        above = by_id.get(span.parent_span_id, span)
        begin, end = above.start_time_unix_nano, above.end_time_unix_nano
        assert begin <= span.start_time_unix_nano <= span.end_time_unix_nano <= end + 1000, span.name


def test_an_incident_is_sent_from_its_file_and_twice_is_the_same(
    tmp_path: Path, ttp: Ttp, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in collector.env.items():
        monkeypatch.setenv(name, value)
    write(tmp_path, "one", SAVED)
    said = ttp("incidents", tmp_path, "--last", "--otlp")
    assert (said.code, said.out) == (0, f"7 spans sent as trace {trace_id('one')}\n")
    assert_is_one_trace(collector.spans, "one")
    first, collector.spans = collector.spans, []
    ttp("incidents", tmp_path, "--last", "--otlp")
    assert [span.span_id for span in first] == [span.span_id for span in collector.spans]
    root = next(span for span in first if span.name == "ttp.incident")
    facts = {a.key: a.value.string_value or a.value.int_value for a in root.attributes}
    assert (facts["ttp.incident.id"], facts["ttp.version"], facts["ttp.exit.code"]) == ("one", 12, 75)
    assert collector.service == "ttp-controller" and any("rank 3 was lost" in event.name for event in root.events)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    ttp("incidents", tmp_path, "--last", "--otlp")
    assert collector.service == "mine"


def test_what_failed_is_an_error(tmp_path: Path) -> None:
    story = [
        *SAVED[:8],
        (9.0, "save_failed", {"rank": 0, "text": "No space left"}),
        (10.0, "released", {"exit_code": 70}),
    ]
    found = {span.name: span for span in spans(read_incident(write(tmp_path, "one", story)))}
    assert found["ttp.save.shard"].status.description == "No space left"
    assert not found["ttp.incident"].status.is_ok
    (only,) = spans(read_incident(write(tmp_path, "two", [(1.0, "thawed", {})])))
    assert only.status.is_ok and "ttp.version" not in only.attributes, "a false alarm"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_that_is_not_there_is_said_with_the_reason(
    protocol: str, tmp_path: Path, ttp: Ttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    write(tmp_path, "one", SAVED)
    said = ttp("incidents", tmp_path, "--last", "--otlp")
    assert said.code == 1 and "the collector did not accept the spans: Failed to export" in said.err, said.err


def test_a_launch_that_has_restored_nothing_has_no_trace(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in collector.env.items():
        monkeypatch.setenv(name, value)
    launch = {"run_id": "job", "incarnation": 2, "world_size": 2, "save_dir": str(tmp_path)}
    lines = line_of("incarnation", 10.0, launch)
    for restored in ("", line_of("restored", 12.0, {"version": 12, "bytes": 2000})):
        command = [sys.executable, "-m", "ttp.cli.spans", "one", "--restore"]
        subprocess.run(command, input=(lines + restored).encode(), check=True, timeout=60)
        assert [span.name for span in collector.spans] == ["ttp.restore"] * bool(restored)


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with making(lambda **settings: Job(tmp_path / "job", **settings).start(), Job.stop) as make_job:
        yield make_job


def kill(job: Job, rank: int, launch: int) -> None:
    until(lambda: len(job.starts()) == launch, 60)
    job.wait_for_version(5 + job.starts()[-1])
    process = json.loads(job.ttp("status", "--json").stdout)["ranks"][rank]["pid"]
    os.kill(process, signal.SIGKILL)
    until(lambda: len(job.starts()) == launch + 1, 90)


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ttp")
def test_a_real_kill_arrives_at_a_real_collector(
    make_job: Callable[..., Job], collector: Collector, ttp: Ttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(ranks=2, steps=100_000, env=collector.env)
    kill(job, 1, launch=1)
    until(lambda: any(span.name == "ttp.restore" for span in collector.spans), 60)
    (lines,) = job.incidents()
    incident = [span for span in collector.spans if span.name != "ttp.restore"]
    assert_is_one_trace(incident, lines[0]["incident"])
    names = {span.name for span in incident}
    assert {"ttp.freeze", "ttp.save", "ttp.commit", "ttp.save.shard", "ttp.commit.manifest"} <= names
    root = next(span for span in collector.spans if span.name == "ttp.incident")
    assert abs(root.start_time_unix_nano / 1e9 - lines[0]["unix_s"]) < 0.001
    (restore,) = (span for span in collector.spans if span.name == "ttp.restore")
    assert [(link.trace_id, link.span_id) for link in restore.links] == [(root.trace_id, root.span_id)]
    assert root.end_time_unix_nano < restore.start_time_unix_nano < restore.end_time_unix_nano
    facts = {a.key: a.value.int_value for a in restore.attributes}
    assert facts["ttp.version"] == job.committed()[0] and facts["ttp.bytes"] > 1000
    for name, value in collector.env.items():
        monkeypatch.setenv(name, value)
    collector.spans = []
    ttp("incidents", job.directory / "checkpoints", "--last", "--otlp")
    (again,) = (span for span in collector.spans if span.name == "ttp.restore")
    assert (again.trace_id, again.span_id) == (restore.trace_id, restore.span_id), "sent twice is the same"


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("ttp")
def test_without_a_collector_jobs_are_saved_as_ever_and_it_is_said_once(make_job: Callable[..., Job]) -> None:
    nobody = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    job = make_job(ranks=2, steps=100_000, env={**nobody, "TTP_LOG": "DEBUG"})
    kill(job, 1, launch=1)
    kill(job, 0, launch=2)
    assert len(job.committed()) == 2
    log = job.directory / "run" / "controller.log"

    def refused() -> list[str]:
        text = "not sent: the collector did not accept the spans"
        return [line for line in log.read_text().splitlines() if text in line]

    until(lambda: len(refused()) > 2, 60)
    assert [" WARNING " in line for line in refused()].count(True) == 1
