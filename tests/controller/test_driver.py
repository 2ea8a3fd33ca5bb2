"""How the driver carries out the machine's actions, if some of them fail."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.controller.conftest import on_a_loop
from tests.core.talk import PATIENCE, answers
from ttp.controller.connection import Connection
from ttp.controller.driver import Driver
from ttp.controller.journal import Journal
from ttp.controller.log_output import ALIKE_MAX
from ttp.core import messages as m
from ttp.core.controller.events import (
    ConnectionId,
    HostsDrained,
    RankWasWrong,
    Received,
    ReceivedAlike,
    SaveRequested,
    StreamEnded,
)
from ttp.core.layout import Rank, Version
from ttp.core.layout_messages import TellLayout
from ttp.store.history import FILE, Launch, line_of, parse_launches, read_launches
from ttp.testing.scenario import grid
from ttp.testing.toy import hello


class NoThreads:
    """A journal on a host where no thread can be started."""

    def write(self, *_: Any) -> None:
        raise RuntimeError("can't start new thread")

    launch_begins = launch_goes_on = write


class Job:
    """A driver that knows the layout of its job, and the streams of the ranks that have joined."""

    def __init__(self, world: int, journal: Any = None, host: str = "", **patience: Any) -> None:
        kept: Any = journal or NoThreads()
        self.driver, self.layout = Driver(replace(PATIENCE, **patience), kept, host), grid(1, world)
        self.driver.machine.job.learn(self.layout)
        self.machine = self.driver.machine

    def joins(self, rank: int = 0, **more: Any) -> Connection:
        connection = self.driver.connect(lambda: None)
        self.driver.feed(Received(connection.id, replace(hello(rank, self.layout), **more)))
        return connection

    @property
    def incident(self) -> str:
        assert self.machine.incident is not None
        return self.machine.incident.id


def frozen(rank: int, incident: str) -> m.Frozen:
    return m.Frozen(Rank(rank), incident, Version(7), m.Phase.IDLE, final=True)


def heard(connection: Connection) -> list[m.Order]:
    orders, connection._orders = connection._orders, []
    return [order for order in orders if order is not None]


@on_a_loop
async def test_a_journal_that_fails_keeps_no_order_from_its_rank() -> None:
    journal: Any = NoThreads()
    driver, layout = Driver(PATIENCE, journal), grid(1, 2)
    lost, other = (driver.connect(lambda: None) for _ in range(2))
    for rank, connection in enumerate((lost, other)):
        driver.feed(Received(connection.id, hello(rank, layout)))
        for order in heard(connection):
            if isinstance(order, TellLayout):
                driver.feed_all(Received(connection.id, part) for part in answers(order, layout))
    assert driver.machine.stage == "training"
    driver.disconnect(lost)
    assert any(isinstance(order, m.Freeze) for order in heard(other))


def frozen_job() -> tuple[Job, list[Connection], list[m.Frozen]]:
    """Return a job whose rank 3 of four has failed, and the streams and answers of the others."""
    job = Job(4)
    ranks = [job.joins(rank) for rank in range(4)]
    job.driver.disconnect(ranks.pop())
    return job, ranks, [frozen(rank, job.incident) for rank in range(3)]


@on_a_loop
async def test_what_follows_from_answers_is_looked_for_once_when_all_that_have_come_are_taken() -> None:
    job, ranks, said = frozen_job()
    settle, settled = job.machine.settle, []

    def counted(now: float) -> Any:
        settled.append(now)
        return settle(now)

    job.machine.settle = counted  # type: ignore[method-assign] # what the driver calls
    for connection, answer in zip(ranks, said, strict=True):
        job.driver.feed(Received(connection.id, answer), more=True)
    assert not settled and job.machine.stage == "freezing"
    await asyncio.sleep(0)
    assert len(settled) == 1 and job.machine.stage == "saving"


@on_a_loop
async def test_what_ranks_say_alike_is_one_event_and_what_comes_later_is_later() -> None:
    job, ranks, said = frozen_job()
    said[2] = replace(said[2], has_gradient=True)
    with patch.object(job.machine, "on_event", wraps=job.machine.on_event) as take:
        for connection, answer in zip(ranks, said, strict=True):
            job.driver.feed(Received(connection.id, answer), more=True)
        job.driver.disconnect(ranks[2])
    together = ReceivedAlike(((ranks[0].id, Rank(0)), (ranks[1].id, Rank(1))), replace(said[0], rank=m.SEVERAL))
    alone = ReceivedAlike(((ranks[2].id, Rank(2)),), replace(said[2], rank=m.SEVERAL))
    assert [call.args[0] for call in take.call_args_list] == [together, alone, StreamEnded(ranks[2].id)]
    await asyncio.sleep(0)
    assert job.machine.stage == "saving"


@on_a_loop
async def test_a_controller_that_takes_over_learns_what_the_one_before_has_recorded(tmp_path: Path) -> None:
    """Otherwise a drained host would start ranks again, a wrong job would be restarted, and a saved one be lost."""

    async def lead(talk: Callable[[Job, Connection], None] = lambda *_: None, **more: Any) -> Job:
        journal = Journal(tmp_path / "run", [str(tmp_path)])
        job = Job(1, journal)
        talk(job, job.joins(save_dir=str(tmp_path), **more))
        journal.close(60)
        await asyncio.sleep(0)  # what the journal has read
        return job

    def saves(job: Job, rank: Connection) -> None:
        feed = job.driver.feed
        feed(SaveRequested(1, "asked"))
        id = job.incident
        feed(Received(rank.id, frozen(0, id)))
        feed(Received(rank.id, m.Saved(Rank(0), id, 0, (m.Piece("p", 1, "d", "shard", "s0", Rank(0)),))))
        feed(Received(rank.id, m.Committed(Rank(0), id, 0, "step_7", 1)))
        feed(HostsDrained(frozenset({"h", "other"})))
        feed(HostsDrained(frozenset({"other"}), drained=False))
        feed(RankWasWrong("rank 3 exited with code 64"))

    known: dict[str, Any] = {"resume": True, "takeover": True, "term_seen": 1}
    before = (await lead(saves)).machine
    now = (await lead(incarnation=1, version=Version(7), **known)).machine
    assert now.rescue.committing.last == before.rescue.committing.last == (7, "step_7")
    assert now.drained_hosts == ["h"]
    assert now.verdict == before.verdict and now.verdict.code == 64
    other = (await lead(incarnation=2, **known)).machine
    assert other.rescue.committing.last is None and not other.drained_hosts, "that is another launch"


@on_a_loop
async def test_a_controller_that_takes_over_knows_the_hosts_of_ranks_that_it_never_meets(tmp_path: Path) -> None:
    """The host of the first controller is lost with rank 0: it was accused without a name, and started again."""

    async def lead(*hosts: str, also: tuple[str, ...] = (), **more: Any) -> dict[Rank, str]:
        journal = Journal(tmp_path / "run", [str(tmp_path)])
        job = Job(3, journal, "b")
        for rank, host in enumerate(hosts, start=3 - len(hosts)):
            job.joins(rank, host=host, save_dir=str(tmp_path), **more)
        for host in also:
            job.machine.job.seats.add(Rank(2))
            job.joins(2, host=host, save_dir=str(tmp_path), nonce=host)
        journal.close(60)
        await asyncio.sleep(0)
        return dict(job.machine.job.homes)

    await lead("a", "b", "a", also=("c",))
    back: dict[str, Any] = {"incarnation": 1, "resume": True, "takeover": True, "term_seen": 1, "version": Version(7)}
    assert await lead("b", **back) == {0: "a", 1: "b", 2: "c"}


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ({f"node-{n:04}.cluster": f"{8 * n}-{8 * n + 7}" for n in range(1250)}, 10_000),
        ({f"node-{n:04}.cluster": ",".join(str(n + 1250 * k) for k in range(8)) for n in range(1250)}, 10_000),
        ({f"node-{n}": f"{n}" for n in range(100_000)}, 0),
        ({"a": "0-1", "b": "x", "c": "5-99999999999", "d": "", "e": 3, "f": "5-" + "9" * 30}, 3),
        (["a"], 0),
    ],
)
def test_the_hosts_of_a_launch_are_one_short_line(told: Any, kept: int) -> None:
    line = line_of("formed", 1.0, {"world_size": 9, "hosts": told})
    assert len(line) < 1 << 18 and line.count("\n") == 2
    (launch,) = parse_launches((line_of("incarnation", 1.0, {}) + line).encode())
    assert launch.joined_unix_s and len(launch.hosts_of_ranks()) == kept


@on_a_loop
async def test_what_a_slow_disk_tells_of_the_launch_before_is_not_taken_for_this_one() -> None:
    """Its ranks would be accused as of a drained host, and a version that it saved would not be saved again."""
    journal: Any = NoThreads()
    told: list[Callable[[int, Launch, float], None]] = []
    journal.launch_begins = lambda *given: told.append(given[-1])
    job = Job(1, journal)
    job.driver.disconnect(job.joins(incarnation=1, resume=True, takeover=True, term_seen=1))
    job.joins(launch=1, nonce="new")
    launch = Launch("job", 1, 0.0, code=64, text="wrong", version=7, path="step_7", drained=frozenset({"h"}))
    told[0](2, launch, 0.0)
    await asyncio.sleep(0)
    assert job.machine.job.incarnation == 2 and job.machine.rescue.committing.last is None
    assert job.machine.verdict.code is None and not job.machine.drained_hosts
    told[1](2, launch, 0.0)
    await asyncio.sleep(0)
    assert job.machine.rescue.committing.last == (7, "step_7")


@pytest.mark.parametrize("hosts", [("here", "there"), ("there", "here")])
@on_a_loop
async def test_launches_are_recorded_where_the_host_of_the_controller_sees_the_directory(
    tmp_path: Path, hosts: tuple[str, str]
) -> None:
    """Hosts may mount one directory in different places, and the first rank to join may be on any of them."""
    (tmp_path / "here").mkdir()
    journal = Journal(tmp_path / "run", [str(tmp_path / "here")])
    job = Job(2, journal, "here")
    for rank, host in enumerate(hosts):
        job.joins(rank, host=host, save_dir=str(tmp_path / host))
    for number in range(2):
        goodbye = m.Goodbye(Rank(number), m.GoodbyeReason.DONE, Version(7))
        job.driver.feed(Received(ConnectionId(number + 1), goodbye))
    journal.close(60)
    (launch,) = read_launches(tmp_path / "here")
    assert (launch.code, launch.text) == (0, "trained to the end") and launch.joined_unix_s
    lines = (tmp_path / "here" / "incidents" / FILE).read_text().split("\n")
    assert all('"run_id": "job", "incarnation": 1' in line for line in lines if line), "each names its launch"


@on_a_loop
async def test_a_launch_that_ends_before_a_rank_of_this_host_has_joined_is_recorded(tmp_path: Path) -> None:
    """A controller may run where no rank does, and its ranks may die before all have joined."""
    journal = Journal(tmp_path / "run", [str(tmp_path)])
    job = Job(2, journal, "here")
    for launch in range(3):
        job.driver.disconnect(job.joins(host="there", save_dir=str(tmp_path), launch=launch, nonce=f"{launch}"))
    job.driver.close()
    journal.close(60)
    assert [launch.incarnation for launch in read_launches(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(("ago_s", "patience_s"), [(60, 90.0), (7 * 3600, 60.0)])
@on_a_loop
async def test_an_alarm_that_another_controller_raised_lately_is_known(
    tmp_path: Path, ago_s: float, patience_s: float
) -> None:
    lines = [line_of("incarnation", 1.0, {}), line_of("stood_still", time.time() - ago_s, {"stood_s": 30.0})]
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / "launches.log").write_text("".join(lines))
    journal = Journal(tmp_path / "run", [str(tmp_path)])
    job = Job(1, journal, hang_s=60.0)
    job.joins(save_dir=str(tmp_path))
    journal.close(60)
    await asyncio.sleep(0)
    for version in range(20):
        beat = m.Heartbeat(Rank(0), Version(version), m.Phase.IDLE)
        job.machine.on_event(Received(ConnectionId(1), beat), time.monotonic() + version)
    assert job.machine._parts.hangs.patience_s == patience_s


@on_a_loop
async def test_the_pace_of_a_job_that_another_controller_led_is_known_from_what_that_one_has_recorded(
    tmp_path: Path,
) -> None:
    begins = {"run_id": "job", "incarnation": 2}
    lines = [line_of("incarnation", 1.0, begins), line_of("stood_still", time.time(), {"stood_s": 30.0})]
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / "launches.log").write_text("".join(lines))
    journal = Journal(tmp_path / "run", [str(tmp_path)])
    job, known = Job(1, journal, hang_s=60.0), {"incarnation": 2, "resume": True, "term_seen": 1, "takeover": True}
    job.joins(save_dir=str(tmp_path), version=Version(20), **known)
    journal.close(60)
    await asyncio.sleep(0)
    for second in range(4):
        beat = m.Heartbeat(Rank(0), Version(20), m.Phase.IDLE)
        job.machine.on_event(Received(ConnectionId(1), beat), time.monotonic() + second)
    assert job.machine._parts.hangs.patience_s == 90.0


@on_a_loop
async def test_after_an_error_in_a_timed_action_there_is_another_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Job(1).driver
    monkeypatch.setattr(driver.machine, "deadline", lambda: 1 / 0)
    driver._tick()
    assert driver._timer is not None and "the controller tries again" in caplog.text


@on_a_loop
async def test_a_large_job_has_no_log_line_for_each_rank(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ttp.controller")
    job = Job(100)
    ranks = [job.joins(rank) for rank in range(100)]
    for rank, connection in enumerate(ranks):
        lost = m.Fault(Rank(rank), Rank(rank), m.FaultKind.COLLECTIVE, "closed by peer")
        job.driver.feed(Received(connection.id, lost))
    shown = [record for record in caplog.records if record.levelno == logging.INFO]
    assert 2 * ALIKE_MAX < len(shown) < 2 * ALIKE_MAX + 10
