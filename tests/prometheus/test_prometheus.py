"""Rules, alerts and the dashboard, checked by Prometheus itself: Debian's ``prometheus`` package, which has
promtool.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.controller.test_metrics import killed_and_back
from tests.e2e.harness import Job
from tests.ports import free_port
from tests.waiting import until
from ttp.controller.metrics import Collector, JobNumbers, RankNumbers
from ttp.controller.tally import Tally
from ttp.launch.presence import listens

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "ttp.rules.yml"

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="apt-get install prometheus")


def promtool(*arguments: object, given: str = "", cwd: Path | None = None) -> str:
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=cwd, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def panels() -> list[str]:
    """Return the queries of the dashboard, with its variables filled in."""
    told = json.loads((DEPLOY / "grafana" / "ttp.json").read_text())
    queries = [target["expr"] for panel in told["panels"] for target in panel.get("targets", ())]
    return [re.sub(r"\$job\b", ".*", query) for query in queries]


@needs_promtool
def test_alerts_fire_when_they_should_and_not_before() -> None:
    assert "SUCCESS" in promtool("test", "rules", "ttp.rules.test.yml", cwd=RULES.parent)
    tested = set(re.findall(r"alertname: (\w+)", RULES.with_name("ttp.rules.test.yml").read_text()))
    assert tested | {"TtpFalseAlarms"} == set(re.findall(r"alert: (\w+)", RULES.read_text()))


@needs_promtool
def test_the_names_of_metrics_are_as_prometheus_wants_them() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    tally, registry, collector = Tally(), CollectorRegistry(), Collector()
    killed_and_back(tally)
    collector.latest = JobNumbers(copied=1, replicas_min=1, ranks=(RankNumbers(0, "n0", 9, 0.5),), tally=tally)
    registry.register(collector)
    promtool("check", "metrics", given=generate_latest(registry).decode())


@needs_promtool
def test_every_query_of_the_dashboard_is_one(tmp_path: Path) -> None:
    rules = [{"record": f"q{number}", "expr": query} for number, query in enumerate(panels())]
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", file) and len(rules) > 10


@needs_promtool
def test_panels_take_no_value_of_a_standby_controller(tmp_path: Path) -> None:
    """It serves metrics too, and knows nothing of the job: its versions are 0, and it waits for ranks."""
    leads = {'ttp_version_oldest{job="a",instance="n0"}': 9, 'ttp_stage{job="a",instance="n0",stage="training"}': 1}
    stands_by = {'ttp_version_oldest{job="a",instance="n1"}': 0, 'ttp_stage{job="a",instance="n1",stage="waiting"}': 1}
    roles = {'ttp_controller_leader{job="a",instance="n0"}': 1, 'ttp_controller_leader{job="a",instance="n1"}': 0}
    wanted = {"ttp_version_oldest": ("{}", 9), "ttp_stage": ('ttp_stage{job="a",instance="n0",stage="training"}', 1)}
    expected = [
        {"expr": query, "eval_time": "1m", "exp_samples": [{"labels": labels, "value": value}]}
        for query in panels()
        for name, (labels, value) in wanted.items()
        if name in query
    ]
    series = [{"series": name, "values": f"{value}x5"} for name, value in {**leads, **stands_by, **roles}.items()]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": expected}
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"rule_files": [], "tests": [test]}))
    assert len(expected) == len(wanted) and "SUCCESS" in promtool("test", "rules", file)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    metrics = {"TTP_METRICS_PORT": str(free_port())}
    made = Job(tmp_path / "job", ranks=2, steps=100_000, env=metrics).start()
    yield made
    made.stop()


@pytest.fixture
def prometheus(job: Job, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Run a server that scrapes the job each second; returns a function that asks its API."""
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "train", "static_configs": [{"targets": [f"127.0.0.1:{job.env['TTP_METRICS_PORT']}"]}]}
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    flags = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data", "--log.level=warn"]
    server = subprocess.Popen(["prometheus", *flags, f"--web.listen-address=127.0.0.1:{port}"])

    def ask(path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]

    until(lambda: listens("127.0.0.1", port, 1.0))
    yield ask
    server.terminate()
    server.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="apt-get install prometheus")
def test_a_real_prometheus_sees_a_real_fault(job: Job, prometheus: Callable[[str], Any]) -> None:
    """First all ranks die at once and nothing can be saved, which pages; then one rank dies, which does not."""

    def value(query: str) -> list[float]:
        found = prometheus(f"query?query={urllib.parse.quote(query)}")["result"]
        return [float(one["value"][1]) for one in found]

    def firing() -> list[Any]:
        return [alert for alert in prometheus("alerts")["alerts"] if alert["state"] == "firing"]

    def kill(ranks: list[int]) -> None:
        told = json.loads(job.ttp("status", "--json").stdout)["ranks"]
        for rank in ranks:
            os.kill(told[rank]["pid"], signal.SIGKILL)

    slowly = partial(until, every_s=0.2)
    job.wait_for_version(5)
    slowly(lambda: value('ttp_stage{stage="training"}') == [1.0] and value("ttp_version_newest")[0] > 5)
    assert firing() == []
    kill([0, 1])
    alert = slowly(firing)[0]
    assert (alert["labels"]["alertname"], alert["labels"]["severity"]) == ("TtpNotSaved", "page")
    slowly(lambda: len(job.starts()) == 2)
    job.wait_for_version(job.starts()[-1] + 5)
    slowly(lambda: value('ttp_stage{stage="training"}') == [1.0])
    kill([1])
    slowly(lambda: sum(value('ttp_incidents_total{outcome="saved"}')) == 1)
    slowly(lambda: sum(value("ttp_recovery_seconds_count")) >= 1)
    slowly(lambda: value("ttp:goodput:ratio1h"))
    silent = [query for query in panels() if not prometheus(f"query?query={urllib.parse.quote(query)}")["result"]]
    assert not silent, "every panel of the dashboard shows something"
