"""Torch's dynamic rendezvous goes, or does not answer: its host is lost, or the launcher that kept it was killed."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousGracefulExitError

from tests.waiting import until
from ttp.launch import stand_by
from ttp.launch.run import _of_meeting
from ttp.launch.stand_by import SPARE, Rescheduling


@pytest.mark.parametrize("looked", [True, False])
def test_workers_are_looked_after_and_end_while_the_rendezvous_does_not_answer(
    looked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host that keeps it has lost its power, so that nothing refuses the connection, perhaps just when all ranks of
    this host died, before the launcher has looked at them again.
    """
    monkeypatch.setattr(stand_by, "ANSWER_S", 0.05)
    monkeypatch.setattr(stand_by, "GONE_S", 0.05)
    answers = threading.Event()
    inner = Mock()
    inner._state_holder.state.redundancy_list = ()
    inner.settings.timeout.join.total_seconds.return_value = 600.0
    inner.num_nodes_waiting.side_effect = lambda: answers.wait() and 3
    meeting = Rescheduling(inner, wait_s=0)
    meeting.next_rendezvous()
    if looked:
        assert meeting.num_nodes_waiting() == meeting.num_nodes_waiting() == 0
    with pytest.raises(RendezvousConnectionError, match="does not answer"):
        meeting.next_rendezvous()
    assert inner.next_rendezvous.call_count == 1, "it would not return"
    assert meeting.shutdown()
    inner.shutdown.assert_not_called()
    answers.set()
    until(lambda: meeting.num_nodes_waiting() == 3)
    meeting.next_rendezvous()
    meeting.shutdown()
    inner.shutdown.assert_called_once()


@pytest.mark.parametrize(("backend", "asked"), [("c10d", 1), ("etcd-v2", 2)])
def test_the_job_trains_on_without_the_rendezvous(backend: str, asked: int, caplog: pytest.LogCaptureFixture) -> None:
    """Its launcher was killed. Torch would end the job, and fill the log with a stack trace for each attempt."""
    inner = Mock()
    inner._state_holder.state.redundancy_list = ()
    inner.get_backend.return_value = backend
    inner.num_nodes_waiting.side_effect = RendezvousConnectionError("broken pipe")
    meeting = Rescheduling(inner, wait_s=0)
    assert meeting.num_nodes_waiting() == meeting.num_nodes_waiting() == 0
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "the rendezvous has gone" in said.getMessage()
    assert inner.num_nodes_waiting.call_count == asked
    assert inner._stop_heartbeats.called == (backend == "c10d")
    assert ("until it is back" in said.getMessage()) is (backend != "c10d")
    inner.next_rendezvous.side_effect = RendezvousConnectionError("broken pipe")
    inner.settings.timeout.join.total_seconds.return_value = 600.0
    reason = "the launcher that kept the rendezvous has gone" if backend == "c10d" else "broken pipe"
    with pytest.raises(RendezvousConnectionError, match=reason):
        meeting.next_rendezvous()
    meeting._seated = True
    meeting.shutdown()
    assert inner.next_rendezvous.called is inner.shutdown.called is (backend != "c10d")


@pytest.mark.parametrize(("backend", "again"), [("c10d", 1), ("etcd-v2", 0)])
def test_a_host_that_is_lost_with_the_rendezvous_while_ranks_start_ends_the_job(
    backend: str, again: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The ranks would wait for its ranks until torch's time-out, half an hour. etcd may be away for a moment."""
    inner = Mock()
    inner.get_backend.return_value = backend
    inner.num_nodes_waiting.side_effect = RendezvousConnectionError("broken pipe")
    meeting = Rescheduling(inner, 0, lambda: True)
    assert [meeting.num_nodes_waiting() for _ in range(2)] == [again, 0]
    assert ("still starting, are ended" in caplog.text) is bool(again)


def test_each_time_that_etcd_is_away_is_told(caplog: pytest.LogCaptureFixture) -> None:
    away = RendezvousConnectionError("refused")
    inner = Mock(num_nodes_waiting=Mock(side_effect=[away, away, 2, away]))
    inner.get_backend.return_value = "etcd-v2"
    meeting = Rescheduling(inner, 0)
    assert [meeting.num_nodes_waiting() for _ in range(4)] == [0, 0, 2, 0]
    assert caplog.text.count("the rendezvous has gone") == 2


@pytest.mark.parametrize("end", [RendezvousGracefulExitError("closed"), RendezvousConnectionError("broken pipe")])
def test_a_host_that_has_lost_its_place_does_not_take_the_end_of_the_job_for_success(end: Exception) -> None:
    """Whether it still sees that the rendezvous is closed is chance. Without a place from the first, it stood by."""
    inner = Mock(_this_node="a", next_rendezvous=Mock(side_effect=[Mock(), end, end]))
    inner.num_nodes_waiting.return_value = 0
    inner.settings.timeout.join.total_seconds.return_value = 600.0
    inner._state_holder.state = SimpleNamespace(redundancy_list={"a"}, participants={})
    meeting = Rescheduling(inner, 0)
    meeting.next_rendezvous()
    with pytest.raises(RendezvousConnectionError) as raised:
        meeting.next_rendezvous()
    assert _of_meeting(raised.value) == f"ttp run: {SPARE}"
    meeting._seated = False
    with pytest.raises(type(end)):
        meeting.next_rendezvous()
