"""A relay and a controller with real streams: reports arrive through it, and lines end with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest

from tests.controller.conftest import Controller, FakeRank, Served
from tests.controller.test_service import frozen, save_whatever_is_asked
from tests.waiting import until
from ttp.config import Config, RankEnv
from ttp.core import messages as m
from ttp.core.layout import Rank, Version
from ttp.launch.relay import RelayServer
from ttp.launch.relay_file import AUTO_RANKS, RELAYED, TO_KEY, relay_of, wanted
from ttp.processor.link.relay_choice import RelayChoice
from ttp.wire.channel import metadata, open_channel, stub
from ttp.wire.relay import PROTOCOL
from ttp.wire.sockets import peers
from ttp.wire.v1 import controller_pb2 as pb
from ttp.wire.v1 import controller_pb2_grpc as rpc


class Relayed:
    """A controller behind a relay, for ``FakeRank``."""

    def __init__(self, controller: Controller, relay: RelayServer) -> None:
        self.port = relay.port
        self.metadata = (*metadata(controller.token), (TO_KEY, f"127.0.0.1:{controller.port}"))


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    running = Served(tmp_path, token="secret")
    yield running
    running.close()


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[RelayServer]:
    running = RelayServer(Config(token="secret", host="here", heartbeat_s=0.1), tmp_path)
    yield running
    running.close()


def rank_through(controller: Controller, relay: RelayServer, number: int, **changes: Any) -> FakeRank:
    rank = FakeRank(Relayed(controller, relay), number, **changes)  # type: ignore[arg-type] # has the port and metadata it asks for
    controller.ranks.append(rank)
    return rank


def joined(controller: Controller, relay: RelayServer, count: int = 2, **changes: Any) -> list[FakeRank]:
    """Return ranks behind the relay that the controller has welcomed."""
    ranks = [rank_through(controller, relay, number, **changes) for number in range(count)]
    assert [rank.expect(m.Welcome).rank for rank in ranks] == [*range(count)]
    return ranks


def states(controller: Controller) -> list[str]:
    return [rank.state for rank in controller.status().ranks]


def test_a_lost_rank_is_saved_by_one_behind_the_same_relay(controller: Controller, relay: RelayServer) -> None:
    zero, one = joined(controller, relay)
    until(lambda: controller.status().stage == "training")
    one.drop()
    freeze = zero.expect(m.Freeze)
    zero.say(frozen(0, freeze.incident, 5))
    save_whatever_is_asked(zero, zero.expect(m.Save))
    assert zero.expect(m.Release).exit_code == 75


def test_all_lines_end_with_the_relay_and_their_ranks_come_back_without_it(
    controller: Controller, relay: RelayServer
) -> None:
    joined(controller, relay)
    until(lambda: controller.status().stage == "training")
    relay.close()
    until(lambda: states(controller) == ["lost", "lost"])
    back = [controller.rank(number, resume=True, incarnation=1, term_seen=1) for number in (0, 1)]
    assert all(rank.expect(m.Freeze) for rank in back)  # it was an incident, and nothing is broken
    until(lambda: states(controller) == ["live", "live"])


def test_a_freeze_reaches_each_rank_and_the_last_answer_decides(controller: Controller, relay: RelayServer) -> None:
    ranks, outside = joined(controller, relay, 3, world_size=4), controller.rank(3, world_size=4)
    outside.expect(m.Welcome)
    outside.drop()
    for number, rank in enumerate(ranks):
        freeze = rank.expect(m.Freeze)
        rank.say(frozen(number, freeze.incident, 5))
    assert any_of(ranks, m.Save).version == 5


def any_of(ranks: list[FakeRank], kind: type) -> Any:
    """Return the first order of a kind that any of the ranks receives."""
    found: list[Any] = []
    came = threading.Event()

    def listen(rank: FakeRank) -> None:
        try:
            found.append(rank.expect(kind))
        except (grpc.RpcError, StopIteration):
            return
        came.set()

    for rank in ranks:
        threading.Thread(target=listen, args=(rank,), daemon=True).start()
    assert came.wait(20)
    return found[0]


def test_a_beat_is_vouched_for(controller: Controller, relay: RelayServer) -> None:
    for rank in joined(controller, relay):
        rank.say(m.Heartbeat(Rank(rank.number), Version(3), m.Phase.IDLE))
    until(lambda: [rank.version for rank in controller.status().ranks] == [3, 3])


def test_a_rank_that_is_refused_hears_why_and_the_others_stay(controller: Controller, relay: RelayServer) -> None:
    joined(controller, relay, 1)
    stranger = rank_through(controller, relay, 1, run_id="another job")
    assert stranger.expect(m.Refused).code is m.RefusalCode.OTHER_JOB
    assert stranger.ended()
    rank_through(controller, relay, 1).expect(m.Welcome)
    until(lambda: states(controller) == ["live", "live"])


def test_nonsense_of_one_rank_is_its_own_affair(controller: Controller, relay: RelayServer) -> None:
    zero, one = joined(controller, relay)
    one.say_raw(pb.RankReport())
    until(lambda: states(controller)[1] == "lost")
    assert zero.expect(m.Freeze)


def test_where_no_controller_is_the_rank_hears_that_it_is_not_the_relay_that_is_gone(
    tmp_path: Path, relay: RelayServer
) -> None:
    gone = Controller(tmp_path, token="secret")
    gone.close()
    with pytest.raises(grpc.RpcError) as problem:
        rank_through(gone, relay, 0).hear()
    assert RELAYED in str(problem.value.details())


def test_without_the_token_the_relay_serves_nobody(controller: Controller, relay: RelayServer) -> None:
    wrong = Relayed(controller, relay)
    wrong.metadata = ((TO_KEY, f"127.0.0.1:{controller.port}"),)
    with pytest.raises(grpc.RpcError) as problem:
        FakeRank(wrong, 0).hear()  # type: ignore[arg-type] # as above
    assert problem.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_jobs_of_many_ranks_have_relays_unless_they_are_told_otherwise() -> None:
    auto = [wanted(Config(), world) for world in (1, AUTO_RANKS - 1, AUTO_RANKS, 10 * AUTO_RANKS)]
    assert auto == [False, False, True, True]
    assert [wanted(Config(), AUTO_RANKS, here) for here in (0, 1, 2)] == [True, False, True]
    assert wanted(Config(relay="on"), 1, 1)
    assert not wanted(Config(relay="off"), 10 * AUTO_RANKS)


def test_a_relay_is_found_as_long_as_it_lives(tmp_path: Path) -> None:
    config = Config(token="secret", host="here")
    assert relay_of(config, tmp_path) is None
    relay = RelayServer(config, tmp_path)
    assert relay_of(config, tmp_path) == (relay.port, os.getpid())
    assert relay_of(Config(token="secret", host="elsewhere"), tmp_path) is None
    relay.close()
    assert relay_of(config, tmp_path) is None


def look(controller: Controller, relay: RelayServer) -> float | None:
    with open_channel("127.0.0.1", relay.port) as channel:
        answer = stub(channel).Look(pb.LookRequest(), metadata=Relayed(controller, relay).metadata, timeout=20)
    return answer.silent_s if answer.HasField("silent_s") else None


def test_the_relay_says_how_long_it_has_heard_nothing_of_a_controller(
    controller: Controller, relay: RelayServer
) -> None:
    assert look(controller, relay) is None, "nobody has asked for that controller"
    rank_through(controller, relay, 0).expect(m.Welcome)
    until(lambda: look(controller, relay) is not None)
    silent_s = look(controller, relay)
    assert silent_s is not None and 0.0 <= silent_s < 60.0


def test_orders_do_not_wait_for_the_name_service(
    controller: Controller, relay: RelayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    welcomed = threading.Event()
    monkeypatch.setattr("ttp.launch.relay.peers", lambda host, port: welcomed.wait() and peers(host, port))
    rank_through(controller, relay, 0).expect(m.Welcome)
    assert look(controller, relay) is None, "its address is not known yet"
    welcomed.set()
    until(lambda: look(controller, relay) is not None)


def test_a_relay_that_is_stopped_is_left_and_one_that_goes_on_is_not(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        config = Config(token="secret", host="here", relay="on", run_dir=str(tmp_path))
        (tmp_path / "relay-here.json").write_text(json.dumps({"port": 4711, "pid": process.pid}))
        choice = RelayChoice(config, RankEnv(1, 2, 1, "127.0.0.1", "job", 0))
        choice.ended(4711, "the controller ended the stream")
        assert choice.port() == 4711 and not choice.stands_still()
        process.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        assert [choice.stands_still() for _ in range(4)] == [False, True, False, False], "it is left once"
        choice.ended(4711, "CANCELLED: it was left")
        assert choice.port() is None
        process.send_signal(signal.SIGCONT)
        until(lambda: not choice.stands_still())
        process.kill()
    assert not choice.stands_still(), "it is gone, and its streams tell that"


def test_a_rank_that_is_alone_on_its_host_starts_no_relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    env = RankEnv(0, AUTO_RANKS, 0, "127.0.0.1", "job", 0)
    config = Config(token="secret", host="here", run_dir=str(tmp_path))
    assert RelayChoice(config, env).port() is None
    told_to = RelayChoice(replace(config, relay="on"), env)
    assert told_to.port() is not None
    told_to.close()


def test_a_relay_of_another_build_is_refused_and_hears_what_to_do(controller: Controller) -> None:
    for protocol in ((), (("ttp-protocol", "2"),)):
        said = (*metadata(controller.token), *protocol)
        with pytest.raises(grpc.RpcError, match="install the same ttp on every host") as refused:
            next(controller.stub.Relay(iter(()), metadata=said, timeout=20))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


class OlderController(rpc.ControllerServicer):
    """Accepts streams of relays without telling its protocol version."""

    def Relay(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802 - the proto's name
        context.send_initial_metadata(())
        yield from (pb.RelayOrders() for _ in request_iterator)

    Attach: Any = Relay
    Look: Any = Relay
    GetStatus: Any = Relay
    WatchEvents: Any = Relay
    ReportFault: Any = Relay
    SaveNow: Any = Relay
    GetVerdict: Any = Relay


class SlowController(OlderController):
    """Takes a stream once it ``may``, and notes the end of it."""

    def __init__(self) -> None:
        self.may, self.ended = threading.Event(), threading.Event()

    def Relay(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802 - the proto's name
        self.may.wait(20)
        context.send_initial_metadata((PROTOCOL,))
        yield from (pb.RelayOrders() for _ in request_iterator)
        self.ended.set()


def test_a_rank_that_left_before_the_controller_answered_keeps_no_stream_open(relay: RelayServer) -> None:
    server, slow = grpc.server(ThreadPoolExecutor(2)), SlowController()
    rpc.add_ControllerServicer_to_server(slow, server)
    at: Any = SimpleNamespace(token="secret", port=server.add_insecure_port("127.0.0.1:0"))
    server.start()
    with open_channel("127.0.0.1", relay.port) as channel, pytest.raises(grpc.RpcError) as late:
        next(stub(channel).Attach(iter(()), timeout=0.3, metadata=Relayed(at, relay).metadata))
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    slow.may.set()
    assert slow.ended.wait(5), "nobody needs the stream"
    server.stop(None)


def test_ranks_hear_that_their_controller_is_of_another_build(relay: RelayServer) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    rpc.add_ControllerServicer_to_server(OlderController(), server)
    older = SimpleNamespace(token="secret", port=server.add_insecure_port("127.0.0.1:0"))
    server.start()
    with pytest.raises(grpc.RpcError, match=r"an older protocol.*install the same ttp on every host") as refused:
        FakeRank(Relayed(older, relay), 0).hear()  # type: ignore[arg-type] # as above
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    server.stop(None)
