"""A relay between ranks and controller: each line carries what a stream of its own would have carried."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId, ReceivedAlike
from ttp.core.layout import Layout, Rank, Version
from ttp.core.relay import ALIKE, FRESH, HOLD_S, SLOTS, Frame, LineId, Relay, RelayEnd, Unfolded, folded, slot_s
from ttp.testing.toy import hello

LINES = 4
BEAT_S = 1.0
LAYOUT = Layout.data_parallel(LINES)


def beat(rank: int, version: int, activity: str = "") -> m.Heartbeat:
    return m.Heartbeat(Rank(rank), Version(version), m.Phase.IDLE, activity=activity)


def frozen(rank: int) -> m.Frozen:
    return m.Frozen(Rank(rank), "i", Version(7), m.Phase.IDLE, final=True)


def fault(rank: int) -> m.Fault:
    return m.Fault(Rank(rank), Rank(rank), m.FaultKind.EXCEPTION, "boom", "", "")


def alike(report: m.Report) -> m.Report:
    return replace(report, rank=m.SEVERAL)


def lines(*numbers: int) -> tuple[LineId, ...]:
    return tuple(map(LineId, numbers))


def relay_of(ranks: int) -> Relay:
    """Return a relay whose ranks have all said hello and sent one heartbeat."""
    relay = Relay(BEAT_S)
    for rank in range(ranks):
        relay.reported(LineId(rank), hello(rank, LAYOUT), 0.0)
        relay.reported(LineId(rank), beat(rank, 1), 0.0)
    assert relay.take(0.0) is not None
    return relay


# What may happen at the ranks' end: seconds pass, a rank beats, says something else, or its stream ends.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["wait", "beat", "frozen", "fault", "end", "freeze"]),
        st.integers(0, LINES - 1),
        st.integers(1, 3),
        st.sampled_from([0.0, 0.001, 0.3, 1.0]),
    ),
    max_size=60,
)


@given(STEPS)
def test_the_controller_hears_what_it_would_have_heard_without(steps: list[tuple[str, int, int, float]]) -> None:
    relay, unfolded, now = Relay(BEAT_S), Unfolded(), 0.0
    rank_of: dict[LineId, Rank] = {}
    said: dict[LineId, list[m.Report | None]] = {}
    heard: dict[LineId, list[m.Report | None]] = {}
    line_of = {rank: LineId(rank) for rank in range(LINES)}
    for rank, line in line_of.items():
        relay.reported(line, hello(rank, LAYOUT), now)
        said[line] = [hello(rank, LAYOUT)]

    def take() -> None:
        frame = relay.take(now)
        for several, report in unfolded.reports(frame) if frame is not None else ():
            for line in several:
                if isinstance(report, m.Hello):
                    rank_of[line] = report.rank
                each = replace(report, rank=rank_of[line]) if isinstance(report, ALIKE) else report
                heard.setdefault(line, []).append(each)

    for what, rank, version, wait_s in steps:
        line = line_of[rank]
        saying: dict[str, m.Report] = {"beat": beat(rank, version), "frozen": frozen(rank), "fault": fault(rank)}
        report = saying.get(what)
        if report is not None:
            relay.reported(line, report, now)
            said[line].append(report)
        elif what == "end":
            relay.ended(line, now)
            said[line].append(None)
            line_of[rank] = LineId(max(said) + 1)  # it comes back on another stream
            relay.reported(line_of[rank], hello(rank, LAYOUT), now)
            said[line_of[rank]] = [hello(rank, LAYOUT)]
        elif what == "freeze":
            relay.told([line], m.Freeze(Rank(rank), 1, "i", "c", snapshot=False))
        now += wait_s
        take()
    now += 2 * BEAT_S
    take()
    for line, reports in said.items():
        assert without_beats(heard[line]) == without_beats(reports)
        assert is_subsequence(heard_once(heard[line]), reports)  # nothing is made up, nothing overtakes
        if reports[-1] is not None:
            assert last_beat(heard[line]) == last_beat(reports)


def without_beats(reports: list[m.Report | None]) -> list[m.Report | None]:
    return [report for report in reports if not isinstance(report, m.Heartbeat)]


def heard_once(reports: list[m.Report | None]) -> list[m.Report | None]:
    """Return the reports without repeated heartbeats, which the relay sends for its ranks."""
    found: list[m.Report | None] = []
    last: m.Report | None = None
    for report in reports:
        if not isinstance(report, m.Heartbeat) or report != last:
            found.append(report)
        last = report if isinstance(report, m.Heartbeat) else last
    return found


def last_beat(reports: list[m.Report | None]) -> m.Report | None:
    return next((report for report in reversed(reports) if isinstance(report, m.Heartbeat)), None)


def is_subsequence(part: list[m.Report | None], whole: list[m.Report | None]) -> bool:
    rest = iter(whole)
    return all(item in rest for item in part)


def test_evidence_goes_up_at_once_and_is_not_behind_beats() -> None:
    relay = relay_of(LINES)
    relay.reported(LineId(0), beat(0, 2), 0.5)
    assert relay.take(0.5) is None  # a beat has time
    relay.reported(LineId(1), fault(1), 0.5)
    assert relay.take(0.5) == Frame(((lines(1), fault(1)),))


def test_what_a_rank_said_earlier_arrives_earlier() -> None:
    relay = relay_of(LINES)
    relay.reported(LineId(0), beat(0, 2), 0.5)
    relay.reported(LineId(0), fault(0), 0.5)
    assert relay.take(0.5) == Frame(((lines(0), alike(beat(0, 2))), (lines(0), fault(0))))


def test_one_frame_stands_for_all_that_beat_and_names_the_silent() -> None:
    relay = relay_of(LINES)
    for second in (1, 2):
        for rank in range(LINES - 1):
            relay.reported(LineId(rank), beat(rank, 1 + (rank == 0) * second), second - 0.01)
        frame = relay.take(float(second))
        assert frame is not None and frame.beat
        assert frame.reports == ((lines(0), alike(beat(0, 1 + second))),)
        assert frame.silent == (() if second < FRESH else (LineId(LINES - 1),))


def test_frames_of_a_host_leave_in_its_slot_of_the_wall_clock() -> None:
    assert {slot_s(f"host{n}", BEAT_S) for n in range(1000)} == {n * BEAT_S / SLOTS for n in range(SLOTS)}
    ahead_s, begin = 1_700_000_000.25, 7.1
    relay = Relay(BEAT_S, ahead_s)
    relay.reported(LineId(0), hello(0, LAYOUT), begin)
    relay.reported(LineId(0), beat(0, 1), begin)
    assert relay.take(begin) is not None
    for second in range(8, 12):
        due = relay.deadline()
        assert due is not None and abs(due - (second - 0.25)) < 1e-6
        frame = relay.take(due)
        assert frame is not None and frame.beat


@pytest.mark.parametrize(("joined", "first"), [(0.95, 2.0), (0.85, 1.0)])
def test_two_beats_are_not_close_together(joined: float, first: float) -> None:
    """A clock that runs a little slow would send two frames in each period."""
    relay = Relay(BEAT_S)
    relay.reported(LineId(0), hello(0, LAYOUT), joined)
    relay.reported(LineId(0), beat(0, 1), joined)
    relay.take(joined)
    assert relay.deadline() == pytest.approx(first)


def test_a_new_activity_is_said_at_once() -> None:
    relay = relay_of(LINES)
    relay.reported(LineId(0), beat(0, 1, "saving"), 0.5)
    assert relay.take(0.5) == Frame(((lines(0), alike(beat(0, 1, "saving"))),))


def test_what_ranks_say_alike_goes_up_once() -> None:
    relay = relay_of(LINES)
    for rank in range(LINES):
        relay.reported(LineId(rank), beat(rank, 2), 0.9)
    beats = relay.take(1.0)
    assert beats is not None and beats.reports == ((lines(*range(LINES)), alike(beat(0, 2))),)
    relay.told(lines(*range(LINES)), m.Freeze(Rank(0), 1, "i", "c", snapshot=False))
    for rank in range(LINES):
        relay.reported(LineId(rank), frozen(rank) if rank != 1 else replace(frozen(rank), has_gradient=True), 1.1)
    answers = relay.take(1.1)
    assert answers is not None and [of for of, _ in answers.reports] == [lines(0, 2, 3), lines(1)]


def test_what_a_line_says_for_another_rank_is_not_taken_for_its_own() -> None:
    relay = relay_of(2)
    relay.reported(LineId(0), frozen(1), 0.5)
    assert relay.take(0.5) == Frame(((lines(0), frozen(1)),))


def test_alike_is_not_put_before_what_the_line_has_said_earlier() -> None:
    relay = relay_of(2)
    relay.told(lines(0, 1), m.Freeze(Rank(0), 1, "i", "c", snapshot=False))
    relay.reported(LineId(0), frozen(0), 0.5)
    relay.reported(LineId(1), fault(1), 0.5)
    relay.reported(LineId(1), frozen(1), 0.5)
    frame = relay.take(0.5)
    assert frame is not None and [of for of, _ in frame.reports] == [lines(0), lines(1), lines(1)]
    assert frame.reports[1][1] == fault(1)


def test_answers_of_a_host_go_up_together_but_wait_for_nobody_for_long() -> None:
    relay = relay_of(LINES)
    relay.told(lines(*range(LINES)), m.Freeze(Rank(0), 1, "i", "c", snapshot=False))
    for rank in range(LINES - 1):
        relay.reported(LineId(rank), frozen(rank), 0.5)
    assert relay.take(0.5) is None and relay.deadline() == 0.5 + HOLD_S
    late = relay.take(0.5 + HOLD_S)
    assert late is not None and late.reports == ((lines(*range(LINES - 1)), alike(frozen(0))),)
    relay.reported(LineId(LINES - 1), frozen(LINES - 1), 0.7)
    last = relay.take(0.7)
    assert last is not None and len(last.reports) == 1  # nobody is left to wait for


def test_the_answers_do_not_wait_for_one_that_is_lost() -> None:
    relay = relay_of(2)
    relay.told([LineId(0), LineId(1)], m.Freeze(Rank(0), 1, "i", "c", snapshot=False))
    relay.reported(LineId(0), frozen(0), 0.5)
    relay.ended(LineId(1), 0.5)
    assert relay.take(0.5) == Frame(((lines(0), alike(frozen(0))), (lines(1), None)))
    relay.reported(LineId(0), frozen(0), 0.6)
    assert relay.take(0.6) is not None, "nor does a later one"


def test_an_order_for_all_comes_down_once() -> None:
    def freeze(incident: str = "i") -> m.Freeze:
        return m.Freeze(m.SEVERAL, 1, incident, "c", snapshot=False)

    welcome = m.Welcome(Rank(0), 1, 1, "x")
    orders: list[tuple[LineId, m.Order | None]] = [
        *((LineId(rank), freeze()) for rank in range(3)),
        (LineId(0), welcome),
        (LineId(1), welcome),
        (LineId(2), freeze("another")),
        (LineId(2), freeze()),
        (LineId(2), None),
        (LineId(3), freeze()),
    ]
    together = folded(orders)
    assert [of for of, _ in together] == [lines(0, 1, 2), lines(0), lines(1), lines(2), lines(2, 3), lines(2)]
    for each in set(orders_of := [line for line, _ in orders]):
        said = [order for of, order in together if each in of]
        assert said == [order for line, order in orders if line == each], orders_of


def test_a_relay_without_ranks_says_nothing() -> None:
    relay = relay_of(1)
    relay.ended(LineId(0), 0.5)
    assert relay.take(0.5) is not None
    assert relay.take(5.0) == Frame((), beat=True)  # the last one
    assert relay.deadline() is None


@dataclass
class Held:
    """A line in the controller."""

    line: LineId
    rank: Rank
    id: ConnectionId
    closing: bool = False


def test_the_end_of_a_line_does_not_end_another_one_with_its_number() -> None:
    """The controller ends a line in a while; meanwhile its relay ends it, too, and uses its number again."""
    ended: list[Held] = []
    end = RelayEnd(lambda number, rank: Held(number, rank, ConnectionId(len(ended))), ended.append)
    first = end.open(LineId(1), Rank(0))
    list(end.events(Frame(((lines(1), None), (lines(1), hello(0, LAYOUT))))))
    second = end.lines[LineId(1)]
    end.over(first)
    assert ended == [first] and not second.closing
    (event,) = end.events(Frame(((lines(1), alike(beat(0, 1))),)))
    assert isinstance(event, ReceivedAlike) and event.who == ((second.id, Rank(0)),)
    end.over(second)
    assert not [*end.events(Frame((), beat=True))], "what has ended beats no more"
    end.close()
    assert ended == [first, second]
