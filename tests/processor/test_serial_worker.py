"""Jobs run one after the other, from whichever thread they come."""

from __future__ import annotations

import threading

import pytest

from tests.processor.fake_source import no_thread
from tests.waiting import until
from ttp.processor.serial_worker import SerialWorker


def test_two_first_jobs_at_once_have_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of the machine and the training thread may both submit the first job."""
    worker, done, started = SerialWorker("ttp-test"), threading.Event(), []
    other = threading.Thread(target=lambda: worker.submit(done.set))
    start = threading.Thread.start

    def slowly(thread: threading.Thread) -> None:
        if thread.name == "ttp-test":
            started.append(thread)
            if len(started) == 1:
                start(other)
                other.join(0.5)  # it is through, or waits for this one
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slowly)
    worker.submit(lambda: None)
    other.join(60)
    assert done.wait(60)
    assert len(started) == 1
    worker.close()


def test_a_job_that_has_not_begun_yet_makes_the_worker_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[threading.Thread] = []

    def start_later(thread: threading.Thread) -> None:
        late.append(thread)

    worker = SerialWorker("ttp-test")
    with monkeypatch.context() as slow:
        slow.setattr(threading.Thread, "start", start_later)
        worker.submit(lambda: None)
    assert worker.busy
    late[0].start()
    until(lambda: not worker.busy)
    worker.close()
    late[0].join(60)
    assert not worker.busy


def test_one_that_begins_at_once_needs_no_thread_when_a_job_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, done = SerialWorker("ttp-test", at_once=True), threading.Event()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    worker.submit(done.set)
    assert done.wait(60)
    worker.close()


def test_one_that_cannot_begin_at_once_begins_with_the_first_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", no_thread)
        worker = SerialWorker("ttp-test", at_once=True)
    done = threading.Event()
    worker.submit(done.set)
    assert done.wait(60)
    worker.close()
