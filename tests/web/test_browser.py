"""The page in a real Chromium: a real job with a killed rank, 4,096 ranks, and texts that look like scripts.

``nox -s web`` installs Selenium and axe-core; Chromium is Debian's ``chromium`` and ``chromium-driver``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.controller_load import clients, form
from tests.cli.test_incidents import SAVED, write
from tests.controller.conftest import Controller
from tests.e2e.harness import Job
from tests.waiting import until
from tests.web import browser as b
from ttp.wire.v1 import controller_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("ttp")]
pytest.importorskip("uvicorn", reason="pip install 'ttp-ft[web]'")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    with b.browser(tmp_path / "profile") as driver:
        yield driver


@pytest.fixture
def job() -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="train-") as folder:  # a short name, for the pictures
        made = Job(Path(folder), ranks=4, steps=100_000, hosts=["n17"], max_restarts=3)
        yield made.start()
        made.stop()


def of(job: Job) -> dict[str, str]:
    return {"TTP_PORT": str(job.port), "MASTER_ADDR": "127.0.0.1", "TTP_RUN_DIR": str(job.directory / "run" / "n17")}


def test_a_kill_is_seen_at_once(job: Job, page: Any, tmp_path: Path) -> None:
    job.wait_for_version(20)
    with b.served(env=of(job)) as address:
        page.get(address)
        until(lambda: b.text(page, "stage") == "Training")
        assert "token" not in page.current_url and page.find_elements("css selector", ".live")
        b.assert_well(page)
        victim = page.execute_script("return fetch('api/v1/status').then(a => a.json()).then(s => s.process[2])")
        os.kill(victim, signal.SIGKILL)
        until(lambda: "rank 2 on n17" in b.text(page, "cause"), 2)  # an engineer waits no longer
        until(lambda: "version" in b.text(page, "saved") and "durable" in b.text(page, "saved"))
        until(lambda: page.find_elements("css selector", "#lanes rect.lost"))
        assert page.find_elements("css selector", "#lanes rect.committed")
        b.dress(page, "light")
        died = ("SIGKILL", "its process died")  # the second where the job was saved before its launcher looked
        until(lambda: any(word in b.text(page, "cause") for word in died))
        b.picture(page, "web-kill", tmp_path)
        page.execute_script("document.getElementById('story').scrollIntoView()")
        b.picture(page, "web-lanes", tmp_path)
        until(lambda: b.text(page, "stage") == "Training" and "launch2" in b.text(page, "facts"), 60)
        b.assert_well(page)
        trace = page.execute_script("return fetch(document.getElementById('trace').href).then(a => a.json())")
        assert any(event["args"].get("name") == "rank 2" for event in trace["traceEvents"])
        job.stop()
        until(lambda: b.text(page, "stage") == "The controller does not answer")
        assert "rank 2" in b.text(page, "cause"), "what is known stays"


def test_the_end_of_a_job_is_told_from_a_controller_that_is_lost(job: Job, page: Any) -> None:
    job.wait_for_version(5)
    with b.served(env=of(job)) as address:
        page.get(address)
        until(lambda: b.text(page, "stage") == "Training")
        os.killpg(job.processes[0].pid, signal.SIGTERM)
        until(lambda: b.text(page, "stage") == "The job has ended")
        assert "exit 75: saved version" in b.text(page, "waits")


def test_keys_choose_ranks(job: Job, page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    job.wait_for_version(1)
    with b.served(env=of(job)) as address:
        page.get(address)
        until(lambda: page.find_elements("css selector", ".chosen"))
        ranks = page.find_element("id", "ranks")
        for key, rank in ((Keys.HOME, 0), (Keys.ARROW_RIGHT, 1), (Keys.END, 3), (Keys.ARROW_RIGHT, 3)):
            ranks.send_keys(key)
            assert ranks.get_attribute("aria-activedescendant") == f"rank-{rank}"
        assert "rank 3: live" in page.find_element("css selector", ".chosen").get_attribute("aria-label")
        number = page.find_element("id", "number")
        number.send_keys("2", Keys.ENTER)
        assert b.text(page, "detail").startswith("rank2")
        page.set_window_size(420, 900)
        assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"), "on a telephone"


def test_four_thousand_ranks(page: Any, tmp_path: Path) -> None:
    world = 4096
    with contextlib.closing(Controller(tmp_path)) as controller, clients(controller.port, world, 64):
        form(controller.stub)
        env = {"TTP_PORT": str(controller.port), "TTP_RUN_DIR": str(tmp_path)}
        with b.served(env=env) as address:
            page.set_window_size(1280, 1000)
            page.get(address)
            until(lambda: len(page.find_elements("css selector", ".cell.live")) >= world, 120)
            kind = pb.FAULT_KIND_EXITED
            request = pb.ReportFaultRequest(ranks=[2025], reason="killed by signal 9 (SIGKILL)", kind=kind)
            controller.stub.ReportFault(request)
            until(lambda: "rank 2025" in b.text(page, "cause"))
            until(lambda: page.find_elements("css selector", "#rank-2025.lost"))
            ranks = page.find_element("id", "ranks")
            ranks.send_keys("n")
            waits = ("waiting for the answer of", "all ranks wait for")  # freezing, or already saving
            until(lambda: any(text in b.text(page, "waits") for text in waits), 60)
            until(lambda: page.execute_async_script(SLOWEST) < 1000, 120, lambda: "the page does not answer")
            assert b.text(page, "detail").startswith("rank2025")
            page.execute_script("scrollTo(0, 0)")
            b.picture(page, "web-4096", tmp_path)
            b.assert_well(page, axe=False)  # takes a minute; the same elements as with four


SLOWEST = """
const done = arguments[0]; let last = performance.now(), worst = 0, left = 100;
(function frame() {
  const at = performance.now(); worst = Math.max(worst, at - last); last = at;
  if (left--) setTimeout(frame, 20); else done(worst);
})();
"""


def test_a_hostile_text_is_a_text(page: Any, tmp_path: Path) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    line = (0.2, "evidence", {"rank": 3, "evidence": evil, "text": evil, "detail": evil})
    odd = (0.3, f"{evil}", {"rank": evil, "text": evil})
    write(tmp_path, "20261120-094512-1-3fa9", [SAVED[0], line, odd, *SAVED[3:-2], (13.0, "released", {"text": evil})])
    with b.served("--save-dir", str(tmp_path), env={"TTP_RUN_DIR": str(tmp_path / "none")}) as address:
        page.get(address)
        until(lambda: evil in b.text(page, "lines"))
        assert evil in b.text(page, "cause") and evil in b.text(page, "incidents")
        assert not page.find_elements("css selector", "main img, main script")
        assert "owned" not in page.title
        b.assert_well(page)
        page.get(address.partition("?")[0] + "plain")
        assert "onerror" in page.find_element("tag name", "pre").text and "owned" not in page.title


def test_another_browser_without_the_token_sees_nothing(page: Any, tmp_path: Path) -> None:
    with b.served("--save-dir", str(tmp_path), env={"TTP_RUN_DIR": str(tmp_path / "none")}) as address:
        page.get(address.partition("?")[0])
        assert "needs its token" in page.find_element("tag name", "body").text
    assert json.dumps(page.get_cookies()) == "[]"
