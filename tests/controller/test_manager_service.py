"""The service for an outside manager: it needs the token, serves one manager at a time, and refuses nonsense in
words.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from tests.controller.conftest import Controller
from tests.waiting import until
from ttp.core.layout import Rank
from ttp.errors import ConfigError
from ttp.mindio.handlers import Manager
from ttp.mindio.manager_wire import call_from_wire, call_to_wire, notice_from_wire, notice_to_wire
from ttp.mindio.protocol.manager_messages import CallKind, FaultOf, ManagerCall, Notice, NoticeKind, RankFault
from ttp.wire import channel
from ttp.wire.limits import WireError
from ttp.wire.v1 import rounds_pb2 as pb
from ttp.wire.v1 import rounds_pb2_grpc as rpc


def manager(controller: Controller, token: str = "", run_dir: Path | None = None) -> Manager:
    def quiet(*told: Any) -> None:
        """Return four callbacks that do nothing."""

    return Manager(
        "127.0.0.1", controller.port, token,
        report_fault_ranks=quiet, report_stop_complete=quiet, report_strategies=quiet, report_result=quiet,
        run_dir=run_dir,
    )  # fmt: skip


def test_only_who_knows_the_token_is_heard_and_one_at_a_time(start: Any) -> None:
    controller = start(token="secret")
    stranger, first, second = manager(controller), manager(controller, "secret"), manager(controller, "secret")
    try:
        first.start()
        assert first.wait_attached(60)
        assert stranger.stop_train({0: 1}) == 1 and not stranger.high_availability()
        stub = rpc.ManagerStub(controller.channel)
        with pytest.raises(grpc.RpcError, match="another manager is attached"):
            next(stub.Attend(pb.AttendRequest(), metadata=controller.metadata, timeout=60))
        first.close()
        assert first.stop_train({0: 1}) == 1 and not first.high_availability()
        second.start()
        assert second.wait_attached(60)
        assert second.stop_train({0: 1}) == 1  # no job is training here
        assert second.stop_train({0: 9}) == 1 and second.stop_train({}, "sit") == 1
    finally:
        for one in (stranger, first, second):
            one.close()


def test_a_manager_is_not_attached_where_no_controller_is() -> None:
    alone = manager(SimpleNamespace(port=1))  # type: ignore[arg-type] # nobody listens there
    alone.start()
    try:
        assert not alone.wait_attached(1.5)
    finally:
        alone.close()


def test_a_manager_finds_another_controller_while_a_certificate_is_renewed(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, client = start(), "ttp.mindio.handlers.manager"
    other = manager(SimpleNamespace(port=1), run_dir=tmp_path)  # type: ignore[arg-type] # nobody listens there
    problems = [ConfigError("the key does not belong to the certificate")]

    def open_channel(*args: Any) -> grpc.Channel:
        if problems:
            raise problems.pop()
        return channel.open_channel(*args)

    monkeypatch.setattr(f"{client}.places", lambda *_: ("127.0.0.1:1", "elsewhere"))
    monkeypatch.setattr(f"{client}.reigning", lambda *_: (f"127.0.0.1:{controller.port}", None))
    monkeypatch.setattr(f"{client}.wire", SimpleNamespace(open_channel=open_channel))
    other.start()
    try:
        until(lambda: other._where.endswith(f":{controller.port}"), 20)
        assert not problems and other.wait_attached(20)
    finally:
        other.close()


@pytest.mark.parametrize(
    "message",
    [
        pb.Notice(what="sing"),
        pb.Notice(what="strategy", seconds=-1),
        pb.Notice(what="strategy", strategy="x" * 5000),
        pb.Notice(what="stop_train", faults=[pb.RankFault(rank=-1)]),
        pb.Notice(what="stop_train", faults=[pb.RankFault(rank=1, kind=7)]),
    ],
)
def test_a_notice_that_makes_no_sense_is_refused_in_words(message: pb.Notice) -> None:
    with pytest.raises(WireError):
        notice_from_wire(message)


def test_notices_and_calls_come_back_as_they_were() -> None:
    faults = (RankFault(Rank(3), FaultOf.NETWORK, "1f"),)
    for kind in NoticeKind:
        notice = Notice(kind, faults, 2.5, "retry", "x")
        assert notice_from_wire(notice_to_wire(notice)) == notice
    for told in CallKind:
        call = ManagerCall(told, faults, 406, "no", ("exit", "dump"), "dump")
        assert call_from_wire(call_to_wire(call)) == call
    with pytest.raises(WireError, match="is not a kind of call to a manager"):
        call_from_wire(pb.ManagerCall(what="sing"))
