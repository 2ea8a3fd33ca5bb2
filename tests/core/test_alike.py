"""A message that stands for several ranks has the same effect as one message of each rank."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.core.machines import Canon
from tests.core.talk import PATIENCE, Talk, apart
from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId, ReceivedAlike, Send, StreamEnded
from ttp.core.controller.hangs import HangWatch
from ttp.core.layout import Rank, Version
from ttp.testing.scenario import grid

WORLD = 6
RANKS = st.lists(st.integers(0, WORLD - 1), unique=True, min_size=1).map(tuple)
VERSION = st.integers(6, 8).map(Version)
BEATS = st.builds(
    m.Heartbeat,
    st.just(m.SEVERAL),
    VERSION,
    st.sampled_from((m.Phase.IDLE, m.Phase.UPDATING)),
    mark=st.integers(0, 1),
    activity=st.sampled_from(("", "", "", "evaluation")),
    written=st.integers(0, 2),
)
ANSWERS = st.builds(
    m.Frozen,
    st.just(m.SEVERAL),
    st.sampled_from(("i1", "i1", "i1", "i2", "")),
    VERSION,
    st.sampled_from((m.Phase.IDLE, m.Phase.IDLE, m.Phase.TORN)),
    st.booleans(),
    has_gradient=st.booleans(),
    has_preimage=st.booleans(),
    main_thread_blocked=st.booleans(),
)
SAID = st.tuples(RANKS, st.one_of(BEATS, ANSWERS))
HAPPENS = st.one_of(SAID, SAID, SAID, st.tuples(st.sampled_from(("lost", "back", "wait", "hung", "ask")), RANKS))


@given(st.integers(1, 3).map(lambda shards: grid(shards, WORLD // shards)), st.lists(HAPPENS, max_size=25))
def test_said_alike_or_alone(layout: Any, steps: list[tuple[Any, Any]]) -> None:
    together, alone = Talk(layout), Talk(layout)
    for what, how in steps:
        if isinstance(how, m.Report):
            assert orders(say(together, what, how)) == orders(say(alone, *((r,) for r in what), how))
        else:
            for talk in (together, alone):
                happen(talk, what, how)
        assert known(together) == known(alone)


@given(
    st.lists(
        st.tuples(
            RANKS,
            st.integers(7, 8).map(Version),
            st.just(0),
            st.sampled_from((m.Phase.IDLE, m.Phase.IDLE, m.Phase.DONE)),
            st.sampled_from(("", "", "evaluation")),
            st.sampled_from((0.0, 1.0, 5.0)),
        ),
        max_size=30,
    )
)
def test_seen_together_or_one_by_one(steps: list[Any]) -> None:
    together, alone, now = HangWatch(1.0), HangWatch(1.0), 0.0
    for ranks, version, mark, phase, activity, later_s in steps:
        now += later_s
        beat = m.Heartbeat(m.SEVERAL, version, phase, mark, activity)
        together.observed(ranks, beat, now)
        for rank in ranks:
            alone.observed((rank,), beat, now)
        assert CANON(together) == CANON(alone)


def say(talk: Talk, *said: Any) -> list[Any]:
    """Deliver reports of these ranks at a time, then settle."""
    *several, report = said
    actions = []
    for ranks in several:
        who = tuple((ConnectionId(talk.streams[rank]), Rank(rank)) for rank in ranks)
        actions += talk.machine.on_event(ReceivedAlike(who, report), talk.now, more=True)
    return apart([*actions, *talk.machine.settle(talk.now)])


def orders(actions: list[Any]) -> list[str]:
    return sorted(repr(action) for action in actions if isinstance(action, Send))


def happen(talk: Talk, what: str, ranks: tuple[int, ...]) -> None:
    rank = ranks[0]
    if what == "lost":
        talk.event(StreamEnded(ConnectionId(talk.streams[rank])))
    elif what == "back":
        talk.back(rank)
    elif what == "wait":
        talk.after(0.4)
    elif what == "hung":
        talk.fault(rank, m.FaultKind.HUNG, subject=ranks[-1])
    else:
        talk.ask()


def known(talk: Talk) -> Any:
    """Return all state that decides what follows, without an incident's reason, which depends on the order of ranks."""
    for incident in (talk.machine.incident, talk.machine.rescue.last):
        if incident is not None:
            incident.why = ""
    return CANON(talk.machine)


CANON = Canon()


def test_a_stream_that_was_replaced_says_nothing() -> None:
    talk = Talk(grid(1, 3))
    talk.accuse(2, m.FaultKind.EXITED)
    old = ConnectionId(talk.streams[1])
    talk.back(1)
    answer = m.Frozen(m.SEVERAL, talk.id, Version(7), m.Phase.IDLE, final=True)
    talk.event(ReceivedAlike(((ConnectionId(talk.streams[0]), Rank(0)), (old, Rank(1))), answer))
    assert talk.incident.ranks.waiting == {1} and list(talk.incident.ranks.answers) == [0]


def test_all_who_write_are_seen_to_write() -> None:
    talk = Talk(grid(2, 2))
    talk.accuse(3, m.FaultKind.EXITED)
    talk.now = 1.0
    talk.frozen_all(7, 0, 1, 2)
    talk.now = 2.0
    say(talk, (0, 1), m.Heartbeat(m.SEVERAL, Version(7), m.Phase.IDLE, written=5))
    assert talk.incident.draft.progress == {0: (5, 2.0), 1: (5, 2.0)}


def test_who_is_asked_again_puts_off_nobody() -> None:
    talk = Talk(grid(1, 3))
    talk.accuse(2, m.FaultKind.EXITED)
    talk.now = 3.0
    talk.back(1)
    assert talk.incident.ranks.expire_check_at == PATIENCE.answer_s
