"""Random meetings of a job that is started anew with processes of an earlier start: the new one comes to be."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.core.talk import PATIENCE, Talk
from ttp.core import messages as m
from ttp.core.controller.events import ConnectionId, Received, Send, StreamEnded, Tick
from ttp.core.layout import Rank, Version
from ttp.testing.scenario import grid
from ttp.testing.toy import hello

ENDS_S = 120.0


@dataclass(eq=False)
class Process:
    rank: Rank
    old: bool
    comes_at: float
    dies_at: float = ENDS_S
    version: int = 0
    connection: ConnectionId | None = None
    joined: bool = False
    gone: bool = False


class Meeting:
    """A controller, new processes of all ranks, and processes of some ranks that another controller has led."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        world = rng.choice([2, 3, 4])
        self.talk = Talk(grid(1, world), joined=0)
        self.talk.machine.job.learn(self.talk.layout)
        self.incarnation, begins, gap_s = rng.choice([1, 4]), rng.random() * 5, PATIENCE.gather_s * 0.9
        ranks = [Rank(rank) for rank in range(world)]
        order = rng.sample(ranks, world)
        self.new = [Process(rank, False, begins + n * gap_s * rng.random()) for n, rank in enumerate(order)]
        dies = [rng.random() * 20 if rng.random() < 0.4 else ENDS_S for _ in ranks]
        left = [rank for rank in ranks if rng.random() < 0.5][: world - 1]
        version = 7 * (rng.random() < 0.7)  # else the earlier start made no update
        self.processes = [*self.new, *(Process(r, True, rng.random() * 10, dies[r], version) for r in left)]
        self.wrong: list[str] = []
        self.mixed = False  # new processes, and some that made no update, were a whole job, as after a takeover
        self._streams = 0

    def play(self) -> None:
        """Let the processes come and die, until the new ones are the job or it takes too long."""
        talk = self.talk
        while talk.now < ENDS_S and not (talk.machine.job.complete and all(p.joined for p in self.new)):
            waiting = [(p.comes_at, p) for p in self.processes if p.connection is None and not p.gone]
            dying = [(p.dies_at, p) for p in self.processes if not p.gone]
            due = talk.machine.deadline()
            at_s, process = min([*waiting, *dying], key=lambda event: event[0])
            if due is not None and due < at_s:
                talk.now = max(talk.now, due)
                talk.event(Tick())
                self._deliver()
                continue
            talk.now = max(talk.now, at_s)
            if process.dies_at <= talk.now:
                self._leaves(process)
            else:
                self._comes(process)

    def _comes(self, process: Process) -> None:
        self._streams += 1
        process.connection = ConnectionId(self._streams)
        led = {"incarnation": self.incarnation, "resume": True, "term_seen": 1, "version": Version(process.version)}
        more = led if process.old else {}
        said = hello(process.rank, self.talk.layout, nonce=f"{process.old} {process.rank}", **more)
        self._tell(process, said)

    def _leaves(self, process: Process) -> None:
        connection, process.connection, process.joined, process.gone = process.connection, None, False, True
        if connection is not None:
            self.talk.event(StreamEnded(connection))
            self._deliver()

    def _tell(self, process: Process, said: m.Report) -> None:
        assert process.connection is not None
        self.talk.event(Received(process.connection, said))
        self._deliver()

    def _deliver(self) -> None:
        for action in [action for action in self.talk.said if isinstance(action, Send)]:
            for process in self.processes:
                if process.connection == action.connection:
                    self._obeys(process, action.order)

    def _obeys(self, process: Process, order: m.Order) -> None:
        rank, version = process.rank, Version(process.version)
        match order:
            case m.Welcome():
                process.joined = True
                left = [p for p in self.processes if p.old and p.joined and not p.version]
                self.mixed |= self.talk.machine.job.complete and bool(left)
            case m.Refused(_, m.RefusalCode.BUSY, _):
                self._leaves(process)
                process.gone, process.comes_at = False, self.talk.now + 1
            case m.Refused() | m.Release():
                self._leaves(process)
                self.wrong += [] if process.old or self.mixed else [f"rank {rank}: {order}"]
            case m.Freeze(_, _, incident):
                self._tell(process, m.Frozen(rank, incident, version, m.Phase.IDLE, True))
            case m.Save(_, _, incident, generation):
                piece = m.Piece(f"{rank}_{generation}", 1, "d", "shard", "s0", rank)
                self._tell(process, m.Saved(rank, incident, generation, (piece,)))
            case m.Commit(_, _, incident, generation):
                self._tell(process, m.Committed(rank, incident, generation, "/save/step_7", 1))


def test_a_new_start_comes_to_be_whatever_is_left_of_an_earlier_one() -> None:
    for seed in range(300):
        meeting = Meeting(seed)
        meeting.play()
        assert not meeting.wrong, seed
        assert meeting.mixed or all(process.joined for process in meeting.new), seed
