"""The driver of one script: start the job, inject the faults of the script, and judge each run before the next begins.

One thread owns all state here; ranks and observers put entries into its inbox. All ranks are held before the first step
of a run until the run before is over: its incident is closed, the job trains again, and no timer is pending.
"""

from __future__ import annotations

import contextlib
import queue
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.chaos import notes
from ttp.chaos.checks import Judgement, diverges, judge
from ttp.chaos.injection import HurtJob, MissedError, heal_all, inject, targets
from ttp.chaos.inspection import checkpoints, closing_words
from ttp.chaos.launches import Launches
from ttp.chaos.notes import Digests, LifeKey
from ttp.chaos.place import Place
from ttp.chaos.rank_connection import END, HOLD
from ttp.chaos.record import Evidence, Injection, Record, Seen
from ttp.chaos.script import Fault, Script
from ttp.chaos.switchboard import RankEnded, RankProcess, RankStarted, RankSwitchboard, RankWaits
from ttp.chaos.vocabulary import START_PHASES
from ttp.chaos.ways import COLD
from ttp.config import Config
from ttp.inbox import Inbox

LOOK_S = 0.05
RUN_S_MAX = 300.0
LAUNCHES_MAX = 3
"""Largest number of launches of the job in one run."""
END_S = 120.0
READY_S = 60.0
SETTLE_S = 0.15
"""Seconds to wait after an injection: longer than an observer needs to see that a controller is gone."""

Reference = Mapping[int, Mapping[int, Digests]]


@dataclass(frozen=True, slots=True)
class Judged:
    """A finished run and its judgement."""

    record: Record
    judgement: Judgement


class AbortedError(Exception):
    """Raised when the job cannot be used for further runs; the text says why."""


class Driver:
    """Drives one job through its script.

    Args:
        script: the job and its runs.
        folder: the job's folder for logs, notes and checkpoints.
        place: hosts, disk and port of the job.
        reference: digests of the unbroken run, by rank and version.
        tell: is called with every finished run.
    """

    def __init__(
        self, script: Script, folder: Path, place: Place, reference: Reference, tell: Callable[[Judged], None]
    ) -> None:
        self.script, self.folder, self._tell, self._reference = script, folder, tell, reference
        self.closing: list[str] = []
        """Findings about the job as a whole, after its end."""
        self._inbox: Inbox[Any] = Inbox()
        self._switchboard = RankSwitchboard(self._inbox)
        self._job = HurtJob(script, place.hosts, place.disk)
        self._launches = Launches(script, folder, place, self._job, self._switchboard.path, self._inbox)
        self._index = -1
        self._record: Record | None = None
        self._pending: list[Fault] = []
        self._arrived: dict[str, set[int]] = {}
        self._timers: list[tuple[float, Fault]] = []
        self._began_s = 0.0
        self._stages: dict[int, tuple[str, float]] = {}
        self._standbys: set[str] = set()
        self._held_since: float | None = None
        self._diverged = False
        self._ended = False
        self._reasons = 0

    def run(self) -> None:
        """Run the whole script. If the job or the driver fails, the last judgement is ``stuck`` and says why."""
        self._switchboard.open()
        try:
            self._launches.start()
            self._began_s = time.monotonic()
            while not self._ended:
                self._turn()
            self._finish()
        except AbortedError as problem:
            self._abort(str(problem))
        except Exception as problem:  # an error in the driver of one job does not end the campaign
            (self.folder / "driver-error.log").write_text(traceback.format_exc())
            self._abort(f"the driver of the job failed: {problem!r}")
        finally:
            heal_all(self._job)
            self._launches.close()
            self._switchboard.close()

    # ------------------------------------------------------------------------------------------------------- the inbox

    def _turn(self) -> None:
        now = time.monotonic()
        due = min((at for at, _ in self._timers), default=now + LOOK_S)
        with contextlib.suppress(queue.Empty):
            self._take(self._inbox.get(timeout=min(LOOK_S, due - now)))
        self._fire_timers()
        self._look_after_launchers()
        self._maybe_next_run()
        if time.monotonic() > self._began_s + RUN_S_MAX:
            stages = sorted({stage for stage, _ in self._stages.values() if stage}) or ["without controller"]
            raise AbortedError(f"the run did not end within {RUN_S_MAX:g} s; the job is {' or '.join(stages)}")

    def _take(self, entry: Any) -> None:
        match entry:
            case RankStarted(rank_process):
                self._rank_started(rank_process)
            case RankWaits(rank_process, step, phase):
                rank_process.waiting_at = (step, phase)
                self._rank_waits(rank_process, step, phase)
            case RankEnded(rank_process):
                if self._job.rank_processes.get(rank_process.rank) is rank_process:
                    del self._job.rank_processes[rank_process.rank]
            case {"event": kind}:
                self._job.leader = entry["host"]
                self._heard(kind, entry)
            case {"stage": stage}:
                self._stages[entry["host"]] = (stage, entry["monotonic_s"])
            case {"answer": _} if self._record is not None:
                self._record.answers.append(entry)

    def _rank_started(self, rank_process: RankProcess) -> None:
        self._job.rank_processes[rank_process.rank] = rank_process
        self._note_process(rank_process)
        self._job.hurt.discard(rank_process.rank)
        if self._record is not None and rank_process.life not in self._record.lives:
            self._record.lives.append(rank_process.life)
            self._record.lives.sort()
        waiting = [fault for fault in self._pending if fault.step is not None and rank_process.rank in fault.watchers]
        ahead = self.script.runs[self._index + 1 :]
        faults = [
            *waiting,
            *(f for run in ahead for f in run.faults if f.step is not None and rank_process.rank in f.watchers),
        ]
        points = {(fault.step, fault.phase) for fault in faults} | {(run.step, HOLD) for run in ahead}
        rank_process.reply({"points": sorted(points), "phases": [*START_PHASES, END]})

    def _note_process(self, rank_process: RankProcess) -> None:
        if self._record is not None:
            of_life = self._record.processes.setdefault(rank_process.life, {})
            of_life[rank_process.rank] = rank_process.pid, rank_process.forked

    def _rank_waits(self, rank_process: RankProcess, step: int, phase: str) -> None:
        if self._is_barrier(step, phase):
            return  # held until all ranks wait here
        for fault in list(self._pending):
            here = fault.phase == phase and (fault.step == step if fault.step is not None else self._armed(fault))
            if here and rank_process.rank in fault.watchers:
                self._arrived.setdefault(fault.name, set()).add(rank_process.rank)
                if fault.seconds:
                    self._start_timer(fault)
                elif set(fault.watchers) <= self._arrived[fault.name]:
                    self._inject(fault)
        self._let_go(rank_process)

    def _let_go(self, rank_process: RankProcess) -> None:
        """Let a waiting rank continue, unless a fault still waits for other ranks to reach the same point."""
        waits = any(
            rank_process.rank in self._arrived.get(fault.name, ()) and not fault.seconds for fault in self._pending
        )
        if rank_process.waiting_at is not None and not waits:
            rank_process.waiting_at = None
            rank_process.reply({"do": "go"})

    def _heard(self, kind: str, entry: dict[str, Any]) -> None:
        seen = Seen(kind, entry["monotonic_s"], entry["incident"], entry["facts"])
        if kind == "incarnation":
            self._standbys.clear()
        elif kind == "standby":
            self._standbys.add(str(seen.facts["host"]))
        if self._record is None:
            return
        self._record.seen.append(seen)
        self._job.latest[kind] = seen.facts
        for fault in list(self._pending):
            if fault.event == kind and self._armed(fault):
                if fault.seconds:
                    self._start_timer(fault)
                else:
                    self._inject(fault)

    # -------------------------------------------------------------------------------------------------------- injection

    def _armed(self, fault: Fault) -> bool:
        """Return whether all earlier faults of the run have left the list of pending faults."""
        assert self._record is not None
        before = self._record.run.faults[: self._record.run.faults.index(fault)]
        return not any(earlier in self._pending for earlier in before)

    def _start_timer(self, fault: Fault) -> None:
        self._pending.remove(fault)
        self._timers.append((time.monotonic() + fault.seconds, fault))

    def _fire_timers(self) -> None:
        now = time.monotonic()
        for entry in sorted(self._timers, key=lambda t: t[0]):
            if entry[0] <= now:
                self._timers.remove(entry)
                self._inject(entry[1])

    def _inject(self, fault: Fault) -> None:
        """Inject a fault, record it, and let the ranks that waited for it continue."""
        assert self._record is not None
        if fault in self._pending:
            self._pending.remove(fault)
        inside = self._give_orders(fault)
        at_s, life = time.monotonic(), self._life(fault)
        try:
            done = inject(fault, self._job)
        except MissedError as problem:
            self._record.missed.append(f"{fault.name}: {problem}")
        else:
            hurt = Injection(fault.name, fault.what, done.who, at_s, life, done.unreadable, done.cut_off)
            self._record.injections.append(hurt)
        for rank in self._arrived.pop(fault.name, set()) - inside:
            if rank in self._job.rank_processes:
                self._let_go(self._job.rank_processes[rank])
        for follower in [f for f in self._pending if f.after == fault.name]:
            self._start_timer(follower)

    def _give_orders(self, fault: Fault) -> set[int]:
        """For a fault that ranks carry out themselves, order it in the answers they wait for. Return these ranks."""
        if fault.what not in ("raise", "exit", "hang", "hang-gil"):
            return set()
        told = set()
        for rank in targets(fault, self._job):
            rank_process = self._job.rank_processes.get(rank)
            if rank_process is not None and rank_process.waiting_at is not None:
                rank_process.waiting_at = None
                rank_process.reply({"do": fault.what})
                told.add(rank)
        return told

    def _life(self, fault: Fault) -> LifeKey:
        """Return the life of the ranks that a fault hurts.

        Ranks that continue in their processes are in the next life before other ranks.
        """
        assert self._record is not None
        there = self._job.rank_processes
        hurt = [there[rank] for rank in fault.who.numbers if rank in there] if fault.who.kind == "ranks" else []
        return max((rank_process.life for rank_process in hurt or there.values()), default=self._record.lives[-1])

    # ------------------------------------------------------------------------------------------------------------- runs

    def _maybe_next_run(self) -> None:
        """If all ranks are held and the last run is over, judge it and begin the next one."""
        waiting_at = {rank_process.waiting_at for rank_process in self._job.rank_processes.values()}
        everyone = len(self._job.rank_processes) == self.script.world_size and len(waiting_at) == 1
        where = waiting_at.pop() if everyone else None
        if where is None or not self._is_barrier(*where):
            self._held_since = None
            return
        self._held_since = self._held_since or time.monotonic()
        if not self._quiet() or not (where[1] == END or self._is_ready()):
            return
        if self._record is not None:
            self._judge()
        if where[1] == END:
            self._ended = True
        else:
            self._begin()
        for rank_process in self._job.rank_processes.values():
            rank_process.waiting_at = None
            rank_process.reply({"do": "go"})

    def _is_barrier(self, step: int, phase: str) -> bool:
        if phase == END:
            return True
        nxt = self._index + 1
        return phase == HOLD and nxt < len(self.script.runs) and self.script.runs[nxt].step == step

    def _quiet(self) -> bool:
        """Return whether the run is over: no timer is pending, the job trains, and all requests are answered."""
        since = max((at_s for stage, at_s in self._stages.values() if stage == "training"), default=None)
        if self._timers or since is None:
            return False
        record = self._record
        if record is None:
            return True
        last = max((s.at_s for s in record.injections), default=0.0)
        leader_killed = max((s.at_s for s in record.injected("kill", "segv") if s.who == "controller"), default=0.0)
        if time.monotonic() < last + SETTLE_S or since < leader_killed:
            return False
        record.back_s = record.back_s or max(since, last)
        answered = [answer for answer in record.answers if answer["answer"] in ("save", "again")]
        return len(answered) >= len(record.injected("save", "again"))

    def _is_ready(self) -> bool:
        """Return whether the next run may begin: the standby controllers run, and the templates are ready if needed.

        After ``READY_S`` it begins in any case.
        """
        config = Config.from_env(dict(self.script.env))
        assert self._held_since is not None
        if time.monotonic() > self._held_since + READY_S:
            return True
        forks = not self.script.forks or self._launches.can_fork()
        return forks and len(self._standbys) >= min(config.standbys, self.script.hosts - 1)

    def _begin(self) -> None:
        self._index += 1
        run = self.script.runs[self._index]
        self._record = Record(run, lives=[max(rank_process.life for rank_process in self._job.rank_processes.values())])
        for rank_process in self._job.rank_processes.values():
            self._note_process(rank_process)
        self._reasons = len(self._launches.reasons())
        self._pending, self._timers, self._arrived = list(run.faults), [], {}
        self._job.latest = {}
        self._job.hurt = set()
        self._began_s, self._launches.of_run = time.monotonic(), 0

    def _judge(self) -> None:
        assert self._record is not None
        record = self._record
        heal_all(self._job)
        record.missed += [f"{fault.name}: its moment never came ({fault.moment})" for fault in self._pending]
        record.found = checkpoints(self._launches.save_dirs)
        record.reasons = self._launches.reasons()[self._reasons :]
        self._close_run(self._evidence(record))

    def _evidence(self, record: Record) -> Evidence:
        written = notes.read(self.folder, self.script.world_size)
        cold = any(COLD in reason for reason in self._launches.reasons()[: self._reasons])
        return Evidence(self.script, record, written, self._reference, self._diverged, cold)

    def _close_run(self, evidence: Evidence) -> None:
        self._record, self._diverged = None, diverges(evidence)
        self._tell(Judged(evidence.record, judge(evidence)))

    def _abort(self, why: str) -> None:
        """Judge the current run as stuck, for the reason ``why``."""
        if self._record is None:
            self._index = max(self._index, 0)
            self._record = Record(self.script.runs[self._index]) if self.script.runs else None
        if self._record is not None:
            self._record.trouble = why
            self._close_run(self._evidence(self._record))

    def _look_after_launchers(self) -> None:
        """Start the launchers again when all of them have ended, as a scheduler does."""
        if not self._launches.over():
            return
        codes = self._launches.codes()
        if self._record is None:
            raise AbortedError(f"the job ended before its first run: exit codes {codes}")
        if set(codes) == {0}:
            raise AbortedError("the job ended before all runs were done")
        if self._launches.of_run >= LAUNCHES_MAX:
            raise AbortedError(f"the job ended with {codes}, though it was started {self._launches.of_run} times")
        self._record.exits += [code for code in codes if code is not None]
        self._launches.again()

    def _finish(self) -> None:
        """Wait until the job has ended after its last step, and check what it has left behind."""
        if not self._launches.wait(END_S):
            self.closing.append(f"the job had not ended {END_S:g} s after its last step")
        codes = self._launches.codes()
        if set(codes) != {0}:
            self.closing.append(f"the job ended with exit codes {codes}")
        self.closing += closing_words(self._launches.save_dirs, self._job.hosts, range(self.script.hosts))
