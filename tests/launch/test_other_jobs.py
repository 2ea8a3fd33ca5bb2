"""Tests when a ``save_dir`` counts as used by another job, by what the controllers of earlier launches answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.config import Config, RankEnv
from ttp.errors import DirectoryInUseError
from ttp.launch import other_jobs
from ttp.launch.preparation import settled
from ttp.launch.run_dir import note_port, noted_port, prepare_run_dir
from ttp.launch.token_file import write_token
from ttp.store.history import read_launches
from ttp.store.names import INCIDENTS

CONFIG = Config(port=1, token="ours")


@dataclasses.dataclass
class Jobs:
    """The jobs that have saved to a directory, and their controllers that can be reached, by port.

    Each controller gives its answers in turn, and then repeats the last one.
    """

    save_dir: Path
    answers: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    asked: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    secret: str = "ours"

    def launch(self, port: int, *further: str, run_id: str = "theirs") -> None:
        """Add a launch with a controller at ``port``, and further lines, to the launch history."""
        (self.save_dir / INCIDENTS).mkdir(exist_ok=True)
        lines: list[dict[str, Any]] = [{"kind": "incarnation", "run_id": run_id, "controller": f"far:{port}"}]
        ends = {"released": {"exit_code": 75}}
        lines += [{"kind": kind, "controller": "far:99", **ends.get(kind, {})} for kind in further]
        with (self.save_dir / INCIDENTS / "launches.log").open("a") as log:
            log.writelines(json.dumps(line) + "\n" for line in lines)

    def ask(self, address: str, port: int, token: str, *, brief: bool) -> Any:
        assert address == "far" and not brief
        self.asked.append((port, token))
        left = self.answers[port]
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if token == self.secret else None

    def refuse_shared(self, run_id: str = "ours", config: Config = CONFIG, launch: int = 0) -> None:
        other_jobs.refuse_shared(self.save_dir, config, rank_0(run_id, launch))


def rank_0(run_id: str = "ours", launch: int = 0) -> RankEnv:
    return RankEnv(0, 2, 0, "here", run_id, launch)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    found = Jobs(tmp_path)
    monkeypatch.setattr(other_jobs, "ask_status", found.ask)
    monkeypatch.setattr(other_jobs, "listens", lambda _address, port, _timeout_s: port in found.answers)
    monkeypatch.setattr(other_jobs, "is_local", lambda _host: False)
    monkeypatch.setattr(other_jobs, "_POLL_S", 0)
    return found


def status(
    save_dir: Path, stage: str = "training", state: str = "live", run_id: str = "theirs", between: bool = False
) -> Any:
    first = SimpleNamespace(rank=0, state=state, pid=7, host="far")
    others = [SimpleNamespace(rank=1, state="live", pid=8, host="far")]
    facts = {"run_id": run_id, "save_dir": str(save_dir), "stage": stage, "between_launches": between, "pid": 70}
    return SimpleNamespace(**facts, ranks=[*others, first])


def test_a_job_that_trains_is_named(tmp_path: Path, jobs: Jobs) -> None:
    jobs.launch(5)
    jobs.answers[5] = [status(tmp_path)]
    with pytest.raises(DirectoryInUseError, match=r"run theirs, stage training, rank 0 is pid 7 on far, .* far:5"):
        jobs.refuse_shared()


@pytest.mark.parametrize(("run_id", "refused"), [("theirs", False), ("none", True)])
def test_a_process_that_joins_the_running_job_is_no_other_job(
    tmp_path: Path, jobs: Jobs, run_id: str, refused: bool
) -> None:
    jobs.launch(5, run_id=run_id)
    jobs.answers[5] = [status(tmp_path, run_id=run_id)]
    with pytest.raises(DirectoryInUseError) if refused else contextlib.nullcontext():
        jobs.refuse_shared(run_id)


@pytest.mark.parametrize("link", [False, True])
def test_a_directory_has_several_paths(tmp_path: Path, jobs: Jobs, link: bool) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    jobs.launch(5)
    jobs.answers[5] = [status(tmp_path / "link" if link else tmp_path)]
    with pytest.raises(DirectoryInUseError):
        other_jobs.refuse_shared(tmp_path if link else tmp_path / "link", CONFIG, rank_0())


@pytest.mark.parametrize(
    "answer",
    [
        lambda here: status(here, run_id="a third job"),
        lambda here: status(here / "other"),
        lambda here: status(here, state="lost"),
        lambda here: status(here, state="done"),
        lambda here: status(here, state="released"),
        lambda _here: None,
        lambda _here: RuntimeError("odd"),
        lambda _here: SimpleNamespace(),
    ],
)
def test_what_is_no_running_job_in_this_directory(answer: Callable[[Path], Any], tmp_path: Path, jobs: Jobs) -> None:
    jobs.launch(5)
    jobs.answers[5] = [answer(tmp_path)]
    jobs.refuse_shared()
    assert jobs.asked


@pytest.mark.parametrize("line", ["finished", "wrong"])
def test_a_launch_after_which_its_job_does_not_go_on_is_not_asked(line: str, tmp_path: Path, jobs: Jobs) -> None:
    jobs.launch(5, "released")
    jobs.launch(5, line)
    jobs.answers[5] = [status(tmp_path)]
    jobs.refuse_shared()
    assert not jobs.asked


def between(save_dir: Path, run_id: str = "theirs") -> Any:
    return status(save_dir, "waiting", "released", run_id, between=True)


def test_a_job_between_two_launches_is_waited_for_and_refused_if_it_does_not_end(
    tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher may be about to end, as that of a job which the scheduler starts again; or wait for a lost host."""
    jobs.launch(5, "released")
    jobs.answers[5] = [between(tmp_path), between(tmp_path), status(tmp_path, "waiting", "released")]
    jobs.refuse_shared()
    assert len(jobs.asked) == 3
    jobs.answers[5] = [between(tmp_path), status(tmp_path)]
    with pytest.raises(DirectoryInUseError, match="stage training"):
        jobs.refuse_shared()
    monkeypatch.setattr(other_jobs, "ENDING_S", 0)
    jobs.answers[5] = [between(tmp_path)]
    with pytest.raises(DirectoryInUseError, match=r"run theirs, between two launches: .* far:5"):
        jobs.refuse_shared()


@pytest.mark.parametrize("answer", [between, lambda here, run_id: status(here, "saving", "frozen", run_id)])
def test_a_restart_waits_for_no_other_job(answer: Callable[[Path, str], Any], tmp_path: Path, jobs: Jobs) -> None:
    jobs.launch(5, "released")
    jobs.answers[5] = [answer(tmp_path, "theirs"), status(tmp_path)]
    jobs.refuse_shared(launch=1)
    assert len(jobs.asked) == 1
    with pytest.raises(DirectoryInUseError, match="far:5"):
        jobs.refuse_shared(launch=1)


def test_a_restart_does_not_wait_for_storage_or_a_network_that_hangs(
    tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(other_jobs, "read_launches", lambda place: over.wait(60) and read_launches(place))
    monkeypatch.setattr(other_jobs, "LOOK_S", 0.05)
    jobs.refuse_shared(launch=1)
    over.set()


@pytest.mark.parametrize("launch", [0, 1])
@pytest.mark.parametrize("pid", [70, 71, None])
def test_a_job_without_an_id_is_not_refused_for_its_own_controller(
    pid: int | None, launch: int, tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host's controller may have the same port."""
    monkeypatch.setattr(other_jobs, "controller_pid", lambda *where: pid if where == ("here", 5, "ours") else -1)
    jobs.launch(5, "released", run_id="none")
    jobs.answers[5] = [status(tmp_path, run_id="none")]
    with contextlib.nullcontext() if pid == 70 else pytest.raises(DirectoryInUseError):
        jobs.refuse_shared("none", dataclasses.replace(CONFIG, port=5), launch)


@pytest.mark.parametrize("run_id", ["none", "theirs"])
def test_the_controller_of_a_host_where_rank_0_ran_before_refuses_no_rank_0_of_another_host(
    run_id: str, tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher of that host lives and takes part in the launch; the host of rank 0 is new, and counts from 0."""
    jobs.launch(5, "released", run_id=run_id)
    jobs.answers[5] = [between(tmp_path, run_id)]
    jobs.refuse_shared(run_id)
    assert len(jobs.asked) == (run_id == "none")
    monkeypatch.setattr(other_jobs, "ENDING_S", 0)
    with pytest.raises(DirectoryInUseError, match="between two launches"):
        jobs.refuse_shared("with an id")


def test_a_rank_0_that_keeps_its_process_under_another_controller_is_no_other_job(
    tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby controller leads the job, at a port or a host of its own."""
    jobs.launch(5, "leads", run_id="none")
    jobs.answers[99] = [status(tmp_path, run_id="none")]
    with pytest.raises(DirectoryInUseError):
        jobs.refuse_shared("none", dataclasses.replace(CONFIG, host="far"), launch=1)
    monkeypatch.setattr(os, "getpid", lambda: 7)
    with pytest.raises(DirectoryInUseError):
        jobs.refuse_shared("none", dataclasses.replace(CONFIG, host="near"), launch=1)
    jobs.refuse_shared("none", dataclasses.replace(CONFIG, host="far"), launch=1)


def test_the_last_launches_are_asked_the_newest_first(tmp_path: Path, jobs: Jobs) -> None:
    for port in (1, 2, 3, 4):
        jobs.launch(port)
        jobs.answers[port] = [status(tmp_path, state="lost")]
    jobs.launch(6)  # cut off with its controller: nothing listens there
    jobs.refuse_shared()
    assert list(dict.fromkeys(port for port, _ in jobs.asked)) == [4, 3]


def test_a_controller_that_took_over_is_asked(tmp_path: Path, jobs: Jobs) -> None:
    jobs.launch(5, "leads")
    jobs.answers = {5: [status(tmp_path, state="lost")], 99: [status(tmp_path)]}
    with pytest.raises(DirectoryInUseError, match="far:99"):
        jobs.refuse_shared()


def test_a_job_that_is_ending_is_waited_for(tmp_path: Path, jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    jobs.launch(5)
    jobs.answers[5] = [*[status(tmp_path, "saving", "frozen")] * 3, status(tmp_path, "released", "released")]
    jobs.refuse_shared()
    assert len(jobs.asked) == 4
    assert [record.message.partition(":")[2] for record in caplog.records] == [
        f" the job that saves to {tmp_path} now is ending or starts again"
    ]


def test_a_job_that_does_not_end_is_refused_at_last(
    tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_jobs, "ENDING_S", 0)
    jobs.launch(5)
    jobs.answers[5] = [status(tmp_path, "saving", "frozen")]
    with pytest.raises(DirectoryInUseError, match="stage saving"):
        jobs.refuse_shared()


def test_the_secret_of_another_job_of_this_user_is_found_on_its_host(tmp_path: Path, jobs: Jobs) -> None:
    jobs.launch(5)
    jobs.secret, jobs.answers[5] = "theirs", [status(tmp_path)]
    jobs.refuse_shared()
    config = dataclasses.replace(CONFIG, run_dir=str(tmp_path))
    write_token(tmp_path, "theirs")
    with pytest.raises(DirectoryInUseError):
        jobs.refuse_shared(config=config)


@pytest.mark.parametrize("answer", ["refused", "controller", ""])
def test_a_job_whose_secret_is_not_known_may_run(
    answer: str, tmp_path: Path, jobs: Jobs,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It was started with a TTP_RUN_DIR of its own, for example. Another job may have got the port meanwhile.

    If nobody listens, that is known already: a probe of a host that is down would cost 2 s more at each start.
    """
    probed = list[Any]()

    def probe(*asked: Any) -> str:
        probed.append(asked)
        return answer

    jobs.launch(5)
    jobs.answers |= {5: [None]} if answer else {}
    monkeypatch.setattr(other_jobs, "probe", probe)
    jobs.refuse_shared()
    assert bool(probed) == bool(answer)
    assert ["far:5, where that of run theirs was" in text for text in caplog.messages] == [True] * (answer == "refused")


def test_a_history_that_cannot_be_read_keeps_no_job_from_starting(
    tmp_path: Path, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, other_jobs.log.name)
    (tmp_path / INCIDENTS / "launches.log").mkdir(parents=True)
    jobs.refuse_shared()
    other_jobs.refuse_shared(tmp_path / "none", CONFIG, rank_0())
    (told,) = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert told[0] == logging.DEBUG and told[1].startswith(f"cannot look for other jobs in {tmp_path}: ")
    assert not jobs.asked


@pytest.mark.parametrize(
    ("theirs", "answer", "told"),
    [
        (5, SimpleNamespace(attached=True, between_launches=False), True),
        (5, SimpleNamespace(attached=False, between_launches=True), True),
        (5, SimpleNamespace(attached=False, between_launches=False), False),  # it has ended
        (5, None, False),
        (1, SimpleNamespace(attached=True, between_launches=False), False),  # the same job
    ],
)
def test_a_second_job_in_a_run_directory_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    theirs: int,
    answer: Any,
    told: bool,
) -> None:
    """Its port and token take the place of those of the first one, of which commands then know nothing."""
    for name in ("TTP_PORT", "TTP_TOKEN", "TTP_RUN_DIR"):
        monkeypatch.setenv(name, "")
    run_dir = prepare_run_dir(tmp_path / "run")
    write_token(run_dir, "theirs")
    note_port(run_dir, theirs)
    asked: list[tuple[int, str]] = []

    def ask(_: str, port: int, token: str) -> Any:
        asked.append((port, token))
        return answer

    monkeypatch.setattr(other_jobs, "ask_status", ask)
    with settled(Config(port=1, run_dir=str(run_dir)), several_nodes=False):
        assert noted_port(run_dir) == 1
    assert asked == ([(5, "theirs")] if theirs != 1 else [])
    assert (f"TTP_PORT=5 runs in the run directory {run_dir}" in caplog.text) is told
