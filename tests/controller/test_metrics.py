"""The metrics for Prometheus while a rank is killed and the job starts again."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.parser import text_string_to_metric_families

from tests.ports import free_port
from tests.waiting import until
from tests.wire.certificates import Authority
from ttp.cli.main import main
from ttp.cli.metrics import seen
from ttp.controller import metrics
from ttp.controller.metrics import Collector, JobNumbers, RankNumbers
from ttp.controller.tally import Tally
from ttp.wire.v1 import controller_pb2 as pb

Numbers = dict[tuple[str, str], float]
ROOT = Path(__file__).parents[2]


def scraped(text: str) -> Numbers:
    """Return the metrics by name and label values, with labels in the order of their names."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (sample.name, ",".join(value for _, value in sorted(sample.labels.items()))): sample.value for sample in samples
    }


def killed_and_back(tally: Tally) -> None:
    """A rank dies at version 8; 8 is saved, and the next launch makes the ninth update."""
    events: list[tuple[float, str, dict[str, Any]]] = [
        (10.0, "opened", {}),
        (10.0, "evidence", {"evidence": "exited"}),
        (10.02, "answer", {"version": 8}),
        (10.02, "plan", {"version": 8}),
        (10.3, "save_failed", {"text": "OSError: [errno 28] No space left on device: x"}),
        (10.5, "commit", {}),
        (10.6, "committed", {"version": 8, "size": 1000}),
        (10.7, "released", {}),
        (14.0, "restore", {"version": 8}),
    ]
    looks = [
        (-9.0, "waiting", 0),
        (0.0, "training", 0),
        (9.0, "training", 7),
        (10.0, "freezing", 8),
        (10.02, "saving", 8),
    ]
    looks += [(10.7, "released", 8), (13.0, "forming", 0), (14.0, "training", 8), (15.0, "training", 9)]
    while events or looks:
        if looks and (not events or looks[0][0] <= events[0][0]):
            at, stage, newest = looks.pop(0)
            tally.look(stage, newest, at)
        else:
            at, kind, facts = events.pop(0)
            tally.take(kind, facts, at, 1e9 + at)


def test_sums_of_a_kill() -> None:
    tally = Tally()
    killed_and_back(tally)
    assert tally.incidents == {("exited", "saved"): 1}
    assert (tally.saved_version, tally.saved_bytes, tally.lost_steps) == (8, 1000, 0)
    assert tally.save_failures == {"ENOSPC": 1}
    assert {part: round(h.total_s, 3) for part, h in tally.parts.items()} == {
        "freeze": 0.02, "save": 0.48, "commit": 0.1, "release": 0.1, "total": 0.7,
    }  # fmt: skip
    assert round(tally.recovery.total_s, 3) == 5.0 and sum(tally.recovery.counts) == 1
    spent = {state: round(seconds, 3) for state, seconds in tally.spent_s.items()}
    assert spent == {"training": 11.0, "freezing": 0.02, "saving": 0.68, "down": 2.3, "restoring": 1.0}


def test_reading_a_checkpoint_is_no_training() -> None:
    """It ends when all ranks have reported the restore, or one has trained further."""
    for ends in ("restored", "a step"):
        tally = Tally()
        tally.look("waiting", 0, 0.0)
        tally.take("incarnation", {"resumed": False}, 0.0, 0.0)
        tally.look("forming", 0, 0.0)
        tally.look("training", 0, 2.0)
        tally.take("restore", {"version": 8}, 3.0, 3.0)
        tally.look("training", 8, 4.0)
        if ends == "restored":
            tally.take("restored", {"version": 8, "size": 10}, 7.0, 7.0)
        tally.look("training", 8 if ends == "restored" else 9, 7.0)
        tally.look("training", 9, 10.0)
        assert tally.spent_s == {"restoring": 7.0, "training": 3.0}, ends


def test_a_version_that_was_not_saved_is_counted_as_lost_steps() -> None:
    tally = Tally()
    tally.look("training", 8, 0.0)
    for kind, facts in (
        ("opened", {}),
        ("evidence", {"evidence": "lost"}),
        ("released", {}),
        ("restore", {"version": 5}),
    ):
        tally.take(kind, facts, 1.0, 1.0)
    assert (tally.incidents, tally.lost_steps) == ({("lost", "not_saved"): 1}, 3)


def test_what_is_shown_follows_the_rules_of_names() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    tally, registry = Tally(), CollectorRegistry()
    killed_and_back(tally)
    collector = Collector()
    collector.latest = JobNumbers(stage="training", ranks=(RankNumbers(0, 'h"ost\n', 9, 0.5),), tally=tally)
    registry.register(collector)
    numbers = scraped(generate_latest(registry).decode())
    assert numbers["ttp_incidents_total", "exited,saved"] == 1 and numbers["ttp_stage", "training"] == 1
    assert numbers["ttp_incident_seconds_bucket", "+Inf,freeze"] == 1
    assert numbers["ttp_incident_seconds_bucket", "0.01,freeze"] == 0
    assert numbers["ttp_save_failures_total", "ENOSPC"] == 1 and numbers["ttp_save_failures_total", "EIO"] == 0
    assert numbers["ttp_rank_version", 'h"ost\n,0'] == 9, "a hostile name stays within its quotes"
    assert all(name.startswith("ttp_") and not name.endswith("_ms") for name, _ in numbers)


def test_every_series_is_there_before_the_first_incident() -> None:
    """The rate of a series that begins with 1 is 0, so the first incident would not be seen."""
    collector = Collector()
    collector.latest = JobNumbers(tally=Tally())
    labels = {family.name: {tuple(s.labels.values()) for s in family.samples} for family in collector.collect()}
    assert ("total", "+Inf") in labels["ttp_incident_seconds"] and ("ENOSPC",) in labels["ttp_save_failures"]


def test_when_all_ranks_are_lost_the_last_versions_are_told() -> None:
    """As the controller itself does: a 0 would look like a job that begins anew."""
    ranks = [pb.RankStatus(rank=r, host="n", state="lost", version=8 + r) for r in range(2)]
    now = seen(pb.GetStatusResponse(world_size=3, ranks=[*ranks, pb.RankStatus(rank=2, state="missing")]))
    assert (now.newest, now.oldest) == (9, 8)


def scrape(port: int, tls: ssl.SSLContext | None = None) -> Numbers:
    scheme = "http" if tls is None else "https"
    with urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/metrics", timeout=10, context=tls) as answer:
        return scraped(answer.read().decode())


def scraper(authority: Authority, shown: dict[str, str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    context.check_hostname = False
    if shown is not None:
        context.load_cert_chain(shown["TTP_TLS_CERT"], shown["TTP_TLS_KEY"])
    return context


def test_with_tls_what_was_renewed_is_shown_and_strangers_get_nothing(tmp_path: Path, start: Any) -> None:
    """Also while many silent clients are connected; the key is encrypted."""
    authority, other = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    client = authority.sign(file="client")
    password = tmp_path / "password"
    password.touch(mode=0o600)
    password.write_text("secret\n")
    own = authority.sign(password="secret")
    port = free_port()
    controller = start(wait=False, **own, TTP_TLS_KEY_PASSWORD=str(password), TTP_METRICS_PORT=str(port))
    until(lambda: f"metrics on 127.0.0.1:{port}" in controller.output())
    with contextlib.ExitStack() as silent:
        for _ in range(40):
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert scrape(port, scraper(authority, client))["ttp_controller_leader", ""] == 0
        for wrong in (scraper(authority), scraper(authority, other.sign())):
            with pytest.raises(OSError):
                scrape(port, wrong)

        def serial() -> object:
            context = scraper(authority, client)
            with socket.create_connection(("127.0.0.1", port), 10) as plain, context.wrap_socket(plain) as secured:
                return (secured.getpeercert() or {})["serialNumber"]

        first = serial()
        authority.sign(password="secret")
        until(lambda: serial() != first)
        Path(own["TTP_TLS_CERT"]).write_text("half a cert")
        assert scrape(port, scraper(authority, client))["ttp_controller_leader", ""] == 0, "the last usable one"
        until(lambda: controller.output().count("the renewed certificate cannot be used") == 1)


def test_a_controller_and_the_command(start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    controller = start(TTP_METRICS_PORT=str(port))
    until(lambda: f"metrics on 127.0.0.1:{port}" in controller.output())
    for rank in range(2):
        controller.rank(rank, world_size=2)
    until(lambda: scrape(port)["ttp_ranks", "live"] == 2)
    found = scrape(port)
    assert (found["ttp_controller_leader", ""], found["ttp_replicas_min", ""]) == (1, 2)
    file = tmp_path / "ttp.prom"
    assert main(["metrics", "--port", str(controller.port), "--textfile", str(file)]) == 0
    written = scraped(file.read_text())
    assert written["ttp_ranks", "live"] == 2 and ("ttp_version_saved", "") not in written
    assert set(written) <= set(found)
    os.mkfifo(tmp_path / "pipe")
    for target in ("no/ttp.prom", "pipe"):
        assert main(["metrics", "--port", str(controller.port), "--textfile", str(tmp_path / target)]) == 64
    assert (tmp_path / "pipe").is_fifo()
    assert "cannot be written" in capsys.readouterr().err


def test_silent_clients_take_a_bounded_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CONNECTIONS_MAX", 4)
    monkeypatch.setattr(metrics._Handler, "timeout", 60)  # else silence ends the others meanwhile
    server = metrics._server(make_wsgi_app(CollectorRegistry()), "127.0.0.1", 0, None)
    serving = threading.Thread(target=server.serve_forever, args=(0.01,))
    before = threading.active_count()
    serving.start()
    try:
        with contextlib.ExitStack() as silent:
            for _ in range(12):
                last = silent.enter_context(socket.create_connection(("127.0.0.1", server.server_port)))
            last.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                assert last.recv(1) == b"", "the last one is disconnected at once"
            assert threading.active_count() <= before + 1 + 4
        until(lambda: threading.active_count() <= before + 1)
        assert scrape(server.server_port) == {}
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


def test_a_port_that_is_taken_is_said_and_nothing_stops(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        controller = start(TTP_METRICS_PORT=str(port))
        until(lambda: f"metrics cannot be served on 127.0.0.1:{port} (TTP_METRICS_PORT)" in controller.output())
        assert controller.status().stage == "waiting"


@pytest.mark.parametrize("file", ["prometheus/ttp.rules.yml", "grafana/ttp.json"])
def test_rules_and_panels_use_what_is_there(file: str) -> None:
    """Every metric that a rule or a panel names exists."""
    import re

    from prometheus_client import CollectorRegistry, generate_latest

    tally, registry, collector = Tally(), CollectorRegistry(), Collector()
    killed_and_back(tally)
    collector.latest = JobNumbers(stage="training", copied=1, replicas_min=1, tally=tally)
    registry.register(collector)
    names = {name for name, _ in scraped(generate_latest(registry).decode())}
    named = set(re.findall(r"\bttp_\w+", (ROOT / "deploy" / file).read_text()))
    assert named and named <= names
