"""A relay and a controller as real processes' parts: what ranks say through it arrives, and ends when they end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.controller.conftest import Controller, FakeRank, until
from tests.controller.test_service import frozen, save_whatever_is_asked
from ttp.config import Config
from ttp.core import messages as m
from ttp.core.layout import Rank, Version
from ttp.launch.relay import RELAYED, TO_KEY, RelayServer, relay_of
from ttp.wire.channel import metadata
from ttp.wire.v1 import controller_pb2 as pb


class Relayed:
    """A controller behind a relay, for ``FakeRank``."""

    def __init__(self, controller: Controller, relay: RelayServer) -> None:
        self.port = relay.port
        self.metadata = (*metadata(controller.token), (TO_KEY, f"127.0.0.1:{controller.port}"))


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    running = Controller(tmp_path, token="secret")
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


def states(controller: Controller) -> list[str]:
    return [rank.state for rank in controller.status().ranks]


def test_a_lost_rank_is_saved_by_one_behind_the_same_relay(controller: Controller, relay: RelayServer) -> None:
    zero, one = rank_through(controller, relay, 0), rank_through(controller, relay, 1)
    zero.expect(m.Welcome), one.expect(m.Welcome)
    until(lambda: controller.status().stage == "training")
    one.drop()
    freeze = zero.expect(m.Freeze)
    zero.say(frozen(0, freeze.incident, 5))
    save_whatever_is_asked(zero, zero.expect(m.Save))
    assert zero.expect(m.Release).exit_code == 75


def test_all_lines_end_with_the_relay_and_their_ranks_come_back_without_it(
    controller: Controller, relay: RelayServer
) -> None:
    ranks = [rank_through(controller, relay, 0), rank_through(controller, relay, 1)]
    assert {rank.expect(m.Welcome).rank for rank in ranks} == {0, 1}
    until(lambda: controller.status().stage == "training")
    relay.close()
    until(lambda: states(controller) == ["lost", "lost"])
    back = [controller.rank(number, resume=True, incarnation=1, term_seen=1) for number in (0, 1)]
    assert all(rank.expect(m.Freeze) for rank in back)  # it was an incident, and nothing is broken
    until(lambda: states(controller) == ["live", "live"])


def test_a_freeze_reaches_each_rank_and_the_last_answer_decides(controller: Controller, relay: RelayServer) -> None:
    ranks = [rank_through(controller, relay, number, world_size=4) for number in range(3)]
    outside = controller.rank(3, world_size=4)
    for rank in (*ranks, outside):
        rank.expect(m.Welcome)
    outside.drop()
    for number, rank in enumerate(ranks):
        freeze = rank.expect(m.Freeze)
        rank.say(frozen(number, freeze.incident, 5))
    assert any_of(ranks, m.Save).version == 5


def any_of(ranks: list[FakeRank], kind: type) -> Any:
    """The first order of that kind that one of the ranks gets."""
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
    ranks = [rank_through(controller, relay, number) for number in range(2)]
    for rank in ranks:
        rank.expect(m.Welcome)
        rank.say(m.Heartbeat(Rank(rank.number), Version(3), m.Phase.IDLE))
    until(lambda: [rank.version for rank in controller.status().ranks] == [3, 3])


def test_a_rank_that_is_refused_hears_why_and_the_others_stay(controller: Controller, relay: RelayServer) -> None:
    zero = rank_through(controller, relay, 0)
    zero.expect(m.Welcome)
    stranger = rank_through(controller, relay, 1, run_id="another job")
    assert stranger.expect(m.Refused).code is m.RefusalCode.OTHER_JOB
    assert stranger.ended()
    rank_through(controller, relay, 1).expect(m.Welcome)
    until(lambda: states(controller) == ["live", "live"])


def test_nonsense_of_one_rank_is_its_own_affair(controller: Controller, relay: RelayServer) -> None:
    zero, one = rank_through(controller, relay, 0), rank_through(controller, relay, 1)
    zero.expect(m.Welcome), one.expect(m.Welcome)
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


def test_a_relay_is_found_as_long_as_it_lives(tmp_path: Path) -> None:
    config = Config(token="secret", host="here")
    assert relay_of(config, tmp_path) is None
    relay = RelayServer(config, tmp_path)
    assert relay_of(config, tmp_path) == (relay.port, os.getpid())
    assert relay_of(Config(token="secret", host="elsewhere"), tmp_path) is None
    relay.close()
    assert relay_of(config, tmp_path) is None
