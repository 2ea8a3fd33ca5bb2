"""Metrics of the job for Prometheus, on ``TTP_METRICS_PORT``.

The controller's event loop publishes the numbers of the job once a second and when the job's stage changes; a thread of
the HTTP server reads the latest ones. So a scrape takes no lock, does not call the state machine, and cannot delay a
rescue.
Names and units follow https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import socket
import socketserver
import ssl
import threading
import time
import wsgiref.simple_server
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ttp._version import __version__
from ttp.config import Config
from ttp.controller.driver import Driver
from ttp.controller.service import rank_state
from ttp.controller.tally import BUCKETS_S, PARTS, Histogram, Tally
from ttp.core.messages import FaultKind
from ttp.errors import ConfigError
from ttp.wire.https import server_context

log = logging.getLogger("ttp.controller")

STATES = ("live", "frozen", "lost", "broken", "released", "done", "missing")
STAGES = (
    "waiting", "forming", "training", "freezing", "saving", "mending", "committing", "saved", "released", "finished",
)  # fmt: skip
CAUSES = (*(kind.value for kind in FaultKind), "unknown")
OUTCOMES = ("saved", "held", "nothing_new", "mended", "thawed", "not_saved")
ERRNOS = ("EACCES", "EDQUOT", "EIO", "ENOSPC", "EROFS", "ESTALE", "other")
"""Values of labels: states of a rank, stages of the job, causes and outcomes of an incident, usual errors of a save."""
PUBLISH_S = 1.0
"""Seconds between two looks at the job."""
RANKS_MAX = 64
"""Largest job whose ranks have metrics of their own: each rank is two time series."""
CONNECTIONS_MAX = 128
"""Largest number of clients at a time, each of which takes a thread: whoever comes then is disconnected."""
SCRAPE_S = 10.0
"""Seconds after which a client that sends nothing is disconnected."""
GAUGES = (
    ("controller_leader", "1 if this controller leads the job, 0 if it is a standby.", "leads"),
    ("controller_term", "Term of this controller: rises each time that a standby takes over.", "term"),
    ("controller_standbys", "Number of standby controllers.", "standbys"),
    ("job_incarnation", "Incarnation: launches of the job that this controller has seen begin.", "incarnation"),
    ("job_ranks_expected", "World size: ranks that the job has when it is complete.", "expected"),
    ("version_newest", "Highest version (finished updates) of any rank.", "newest"),
    ("version_oldest", "Lowest version (finished updates) of any rank.", "oldest"),
    (
        "version_copied",
        "Newest version of which every rank has stored a second copy on another host (buddy=True).",
        "copied",
    ),
    ("silent_seconds_max", "Longest time since the last message of any rank, in seconds.", "silent_s"),
    ("replicas_min", "Live replicas of the shard that has the fewest.", "replicas_min"),
)
"""Metrics with one value: name, description, and the field of ``JobNumbers`` with the value; None: no value."""
MISSING = "TTP_METRICS_PORT is set and prometheus-client is not installed: pip install 'ttp-ft[metrics]'"


@dataclass(frozen=True)
class RankNumbers:
    """The metrics of one rank; ``silent_s`` is the number of seconds since its last message."""

    rank: int
    host: str
    version: int
    silent_s: float


@dataclass(frozen=True)
class JobNumbers:
    """The values of a job at one moment; for their meaning see the table in docs/monitoring.md."""

    stage: str = "waiting"
    run_id: str = ""
    framework: str = ""
    leads: bool = False
    term: int = 0
    incarnation: int = 0
    standbys: int = 0
    expected: int = 0
    states: Counter[str] = field(default_factory=Counter)
    newest: int = 0
    oldest: int = 0
    copied: int | None = None
    silent_s: float = 0.0
    replicas_min: int | None = None
    ranks: tuple[RankNumbers, ...] = ()
    tally: Tally | None = None
    """The sums over events; None: these numbers were not made by a controller, which alone has them."""


def job_numbers(driver: Driver, tally: Tally) -> JobNumbers:
    """Return the present values of the job. Takes a few microseconds per rank."""
    machine, now = driver.machine, time.monotonic()
    job, layout = machine.job, machine.job.layout
    members = job.members
    expected = layout.world_size if layout else 0
    states = Counter(rank_state(machine, rank) for rank in members)
    states["missing"] = expected - len(members)
    speaking = [members[rank] for rank in job.live if rank in members]
    known = [member.version for member in speaking] or [member.version for member in members.values()]
    return JobNumbers(
        stage=machine.stage,
        run_id=job.run_id,
        framework=next((member.hello.framework for member in members.values()), ""),
        leads=layout is not None,
        term=machine.job.term,
        incarnation=job.incarnation,
        standbys=len(machine.standbys),
        expected=expected,
        states=states,
        newest=max(known, default=0),
        oldest=min(known, default=0),
        copied=machine.copied_version,
        silent_s=max((now - member.last_seen for member in speaking), default=0.0),
        replicas_min=min((len(job.live.intersection(g)) for g in layout.groups.values()), default=0)
        if layout
        else None,
        ranks=tuple(
            RankNumbers(rank, member.hello.host, member.version, now - member.last_seen)
            for rank, member in sorted(members.items())
        )
        if expected <= RANKS_MAX
        else (),
        tally=copy.deepcopy(tally),  # for the thread of a scrape
    )


class Collector:
    """Makes metric families from the latest numbers; see ``prometheus_client.registry.Collector``."""

    def __init__(self) -> None:
        self.latest = JobNumbers()

    def describe(self) -> list[Any]:
        """Return an empty list. Without this method the registry would call ``collect`` at registration."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield all metric families. Runs on the thread of a scrape."""
        from prometheus_client.core import InfoMetricFamily

        now = self.latest
        facts = {"version": __version__, "run_id": now.run_id, "framework": now.framework}
        text = "The ttp version, run id and framework of this controller's job."
        yield InfoMetricFamily("ttp_controller", text, value=facts)
        for name, text, fact in GAUGES:
            yield _gauge(name, text, getattr(now, fact))
        yield _by("ranks", "Number of ranks in each state.", "state", {state: now.states[state] for state in STATES})
        stages = {each: each == now.stage for each in STAGES}
        yield _by("stage", "1 for the current stage of the job, 0 for the others.", "stage", stages)
        if now.tally is not None:
            saved = now.tally.saved_version
            yield _gauge("version_saved", "Last version that this controller has seen committed.", saved)
            committed = now.tally.committed_unix_s or None
            yield _gauge("last_commit_timestamp_seconds", "Unix time of the last commit.", committed)
            yield from _sums(now.tally)
        yield from _of_ranks(now.ranks)


def _gauge(name: str, text: str, value: float | None) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"ttp_{name}", text)
    if value is not None:
        family.add_metric([], value)
    return family


def _by(name: str, text: str, label: str, values: Mapping[str, float]) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"ttp_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family


def _sums(tally: Tally) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    text = "Number of incidents that have ended, by cause and outcome."
    incidents = CounterMetricFamily("ttp_incidents", text, labels=["cause", "outcome"])
    for cause, outcome in itertools.product(CAUSES, OUTCOMES):  # zeros too, so that a first increase is visible
        incidents.add_metric([cause, outcome], tally.incidents[cause, outcome])
    spent = CounterMetricFamily("ttp_job_seconds", "Seconds that the job has spent in each state.", labels=["state"])
    for state in ("training", "freezing", "saving", "down", "restoring"):
        spent.add_metric([state], tally.spent_s[state])
    text = "Duration of each part of an incident, in seconds."
    parts = HistogramMetricFamily("ttp_incident_seconds", text, labels=["part"])
    for part in PARTS:
        parts.add_metric([part], *_buckets(tally.parts.get(part, Histogram())))
    text = "Seconds from the first sign of a fault to the first new step after the saved one."
    recovery = HistogramMetricFamily("ttp_recovery_seconds", text)
    recovery.add_metric([], *_buckets(tally.recovery))
    failures = CounterMetricFamily("ttp_save_failures", "Number of failed saves and commits.", labels=["errno"])
    for name in sorted({*ERRNOS, *tally.save_failures}):
        failures.add_metric([name], tally.save_failures[name])
    yield from (incidents, spent, parts, recovery, failures)
    for name, text, value in (
        ("ttp_lost_steps", "Finished steps that were lost and trained again.", tally.lost_steps),
        ("ttp_saved_bytes", "Total size of committed checkpoints, in bytes.", tally.saved_bytes),
    ):
        yield CounterMetricFamily(name, text, value=value)


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    counts: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip((*map(str, map(float, BUCKETS_S)), "+Inf"), histogram.counts, strict=True):
        below += count
        counts.append((bound, below))
    return counts, histogram.total_s


def _of_ranks(ranks: tuple[RankNumbers, ...]) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    version = GaugeMetricFamily("ttp_rank_version", "Version (finished updates) of each rank.", labels=["rank", "host"])
    silent = GaugeMetricFamily(
        "ttp_rank_silent_seconds", "Seconds since the last message of each rank.", labels=["rank", "host"]
    )
    for each in ranks:
        labels = [str(each.rank), each.host]
        version.add_metric(labels, each.version)
        silent.add_metric(labels, each.silent_s)
    yield from (version, silent)


class _Server(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    """An HTTP server with a thread for each scrape, so that a silent client does not make other clients wait."""

    daemon_threads = True
    request_queue_size = 32

    def server_bind(self) -> None:
        """Bind without the name look-up of ``http.server``, because it may hang."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client on a thread of its own, unless ``CONNECTIONS_MAX`` clients are being served."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a client, on its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a client that disconnects or has no certificate is not an error of this server."""


class _Handler(wsgiref.simple_server.WSGIRequestHandler):
    timeout = SCRAPE_S

    def setup(self) -> None:
        """Make the TLS handshake on the request's own thread, where it does not delay other clients."""
        super().setup()
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because a scrape comes every few seconds."""


def _server(app: Any, address: str, port: int, secured: ssl.SSLContext | None) -> _Server:
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    made = type("Server", (_Server,), {"address_family": family})
    server: _Server = made((address, port), _Handler)
    server.set_app(app)
    if secured is not None:
        server.socket = secured.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    return server


async def serve_metrics(driver: Driver, config: Config) -> None:
    """Serve metrics until cancelled. If that fails, the reason is logged, and the controller runs without metrics."""
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app
    except ImportError:
        log.warning(MISSING)
        return
    port, address = config.metrics_port or 0, config.bind or "127.0.0.1"
    collector, registry = Collector(), CollectorRegistry()
    registry.register(collector)
    try:
        server = _server(make_wsgi_app(registry), address, port, server_context(config))
    except (OSError, ValueError, OverflowError, ConfigError) as problem:
        log.warning("metrics cannot be served on %s:%s (TTP_METRICS_PORT): %s", address, port, problem)
        return
    thread = threading.Thread(target=server.serve_forever, name="ttp-metrics", daemon=True)
    thread.start()
    log.info("serving metrics on %s:%s", address, port)
    tally, stage = Tally(), ""
    driver.observers.append(tally.take)
    try:
        due = 0.0
        while True:
            if (at := time.monotonic()) >= due or driver.machine.stage != stage:
                stage, due = driver.machine.stage, at + PUBLISH_S
                now = job_numbers(driver, tally)
                tally.look(stage, now.newest, at)
                collector.latest = now
            await asyncio.sleep(PUBLISH_S / 10)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PUBLISH_S)
