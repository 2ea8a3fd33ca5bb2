"""``ttp goodput``: shows how the time of a job was spent, over all its launches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from ttp.cli.directories import SaveDir, existing, save_dir_of
from ttp.cli.incident_reader import IncidentLog, incident_files, readable
from ttp.cli.output import Json, complain, count_text, duration_text, print_json, say, seconds
from ttp.errors import CheckpointError
from ttp.store.history import Launch, read_history

RUNS_S = 3600.0
"""Seconds. If the last launch has no recorded end, it counts as running unless its last sign of life is older."""
CLOCKS_S = 5.0
"""Seconds by which the clocks of hosts may differ; a record that is so much older than the one before it shows that the
clock went back.
"""
PARTS = ("training", "joining", "restoring", "freezing", "saving", "down")

RunId = Annotated[str | None, typer.Option("--run-id", help="Only launches of this job (TORCHELASTIC_RUN_ID).")]
_UNIX = "(seconds since 1970, as `date +%s -d '7 days ago'`)."
Since = Annotated[
    float | None, seconds("--since", least=0, most=1e12, about=f"Only what came at this time or later {_UNIX}")
]
Until = Annotated[
    float | None, seconds("--until", least=0, most=1e12, about=f"Only what came before this time {_UNIX}")
]


@dataclass(frozen=True, slots=True)
class Window:
    """The time that is looked at.

    Args:
        since_s: its first moment, in seconds since 1970.
        until_s: its end.
    """

    since_s: float = 0.0
    until_s: float = float("inf")

    def holds(self, moment_s: float) -> bool:
        """Return whether a moment is in the window."""
        return self.since_s <= moment_s < self.until_s

    def part(self, start_s: float, end_s: float) -> float:
        """Return how many seconds between two moments are in the window."""
        return max(0.0, min(end_s, self.until_s) - max(start_s, self.since_s))


@dataclass
class Goodput:
    """How the seconds of a job were spent, and how many steps were lost.

    Args:
        joining: seconds from the first rank of a launch to the moment when all ranks have joined.
        restoring: seconds from the end of joining until all ranks have read the state they begin with.
        training: seconds of the rest of the launch, without incidents.
        freezing: seconds from the first sign of a fault to the plan.
        saving: seconds from the plan to the release or thaw.
        down: seconds from the end of a launch to the beginning of the next.
        launches: number of launches.
        incidents: number of faults that ended a launch.
        unrecorded: number of them without a file, as the disk was full or every process was killed: their lost steps
            are not known.
        false_alarms: number of incidents after which training went on.
        lost_steps: finished steps that the checkpoint with which the next launch began did not have.
        mttr: mean seconds from the first sign of a fault to the beginning of the next launch; None: there was none.
        unreadable: number of lines and files that could not be read.
        clock_went_back: number of launches during which the clock was set back: their times are not known.
    """

    joining: float = 0.0
    restoring: float = 0.0
    training: float = 0.0
    freezing: float = 0.0
    saving: float = 0.0
    down: float = 0.0
    launches: int = 0
    incidents: int = 0
    unrecorded: int = 0
    false_alarms: int = 0
    lost_steps: int = 0
    mttr: float | None = None
    unreadable: int = 0
    clock_went_back: int = 0

    @property
    def elapsed(self) -> float:
        """Sum of all parts in seconds."""
        return float(sum(getattr(self, name) for name in PARTS))

    @property
    def ratio(self) -> float:
        """Share of the time that was training, from 0 to 1."""
        return self.training / self.elapsed if self.elapsed else 0.0


def goodput(
    directory: SaveDir, *, run_id: RunId = None, since: Since = None, until: Until = None, json: Json = False
) -> None:
    """Show how the time of a job was spent, over all its launches: from launches.log and the incidents of a save_dir.

    Joining ends when all ranks have joined, restoring when all of them have read the state they begin with. Lost steps
    were trained again, because a launch ended without a save, or the next one began with an older checkpoint. With
    --since or --until only the seconds between them count, and what happened in them.

    JSON keys: ratio (training / elapsed, 0 to 1), elapsed, joining, restoring, training, freezing, saving, down, mttr
    (seconds; mttr from the first sign of a fault to the next launch, null without any), launches, incidents,
    unrecorded (those of them without a file, as the disk was full or every process was killed: their lost steps are not
    known), false_alarms, lost_steps, unreadable (lines and files that could not be read), clock_went_back (launches
    during which the clock was set back: their times are not known).
    """
    place = existing(save_dir_of(directory))
    everything, torn = read_history(place)
    launches = [launch for launch in everything if run_id is None or launch.run_id == run_id]
    if not launches:
        raise CheckpointError(f"no launch {'of ' + run_id + ' ' if run_id else ''}is recorded in {place}")
    stories, unreadable = _stories(place, run_id)
    found = add_up(launches, stories, time.time(), Window(since or 0.0, 1e12 if until is None else until))
    if not (found.launches or found.elapsed):
        raise CheckpointError(f"no launch that is recorded in {place} ran in that time")
    found.unreadable = unreadable = unreadable + torn
    if json:
        print_json({"ratio": round(found.ratio, 4), "elapsed": found.elapsed, **asdict(found)})
        return
    launched = f"{found.launches} launch{'' if found.launches == 1 else 'es'}"
    say(f"goodput {found.ratio:.1%} of {duration_text(found.elapsed)} in {launched}")
    say(", ".join(f"{name} {duration_text(getattr(found, name))}" for name in PARTS))
    counts = (found.incidents, "fault"), (found.false_alarms, "false alarm"), (found.lost_steps, "lost step")
    back = "" if found.mttr is None else f"; {duration_text(found.mttr)} from a fault to the next launch, on average"
    say(", ".join(count_text(*each) for each in counts) + back)
    if found.unrecorded:
        complain(f"{count_text(found.unrecorded, 'fault')} left no incident here: more steps may be lost")
    if unreadable:
        complain(f"{count_text(unreadable, 'line')} could not be read, and were left out")
    if found.clock_went_back:
        complain(f"the clock was set back during {count_text(found.clock_went_back, 'launch')}: times are too short")


def _stories(place: Path, run_id: str | None) -> tuple[list[IncidentLog], int]:
    problems: list[str] = []
    stories, unreadable = [], 0
    for story in readable(reversed(incident_files(place)), problems.append):
        unreadable += story.unreadable
        opened = story.last("opened")
        if story.lines and (run_id is None or opened is None or opened.facts.get("run_id") == run_id):
            stories.append(story)
    return stories, unreadable + len(problems)


def add_up(
    launches: Sequence[Launch], stories: Sequence[IncidentLog], now_s: float, window: Window = Window()
) -> Goodput:
    """Add up the times and counts of one job.

    Args:
        launches: its launches, the oldest first.
        stories: its incidents, the oldest first.
        now_s: current time in seconds since 1970; a launch that is still running is counted up to now.
        window: the time that is looked at.
    """
    found = Goodput()
    mended: list[float] = []
    saved = 0
    for launch, until in zip(launches, _ends(launches), strict=True):
        found.launches += launch.began_unix_s < window.until_s and (launch.ended_unix_s or until) > window.since_s
        found.clock_went_back += _went_back(launch) and window.holds(launch.began_unix_s)
        if launch.restored_unix_s:  # an older one if the last was damaged; a newer one if an incident's file is gone
            found.lost_steps += max(0, saved - launch.restored) * window.holds(launch.restored_unix_s)
            saved = launch.restored
        own = [story for story in stories if launch.began_unix_s <= story.opened_unix_s < until]
        _add_times(found, launch, own, until, now_s, window)
        cut_off = until <= now_s and not launch.ended_unix_s  # nobody was left to record the end
        faults = [story.last("released") or (cut_off and not story.last("thawed")) for story in own]
        if (launch.released or cut_off) and not any(faults) and window.holds(launch.ended_unix_s or until):
            found.incidents += 1
            found.unrecorded += launch.released or launch.joined_unix_s > 0  # before that no step is made
        for story, is_fault in zip(own, faults, strict=True):
            saved = max(saved, story.version or 0)
            if not window.holds(story.opened_unix_s):
                continue
            if not is_fault:
                found.false_alarms += story.last("thawed") is not None and not _asked_for(story)
                continue
            found.incidents += 1
            found.lost_steps += max(0, _newest(story) - saved)
            if until <= now_s:
                mended.append(until - story.opened_unix_s)
    found.mttr = sum(mended) / len(mended) if mended else None
    return found


def _ends(launches: Sequence[Launch]) -> list[float]:
    """Return when the next launch began, for each launch; after the last one infinity.

    If the clock was set back between the two, it is when the launch ended by its own record.
    """
    following = [
        launch.ended_unix_s or launch.began_unix_s if after.began_unix_s < launch.began_unix_s else after.began_unix_s
        for launch, after in pairwise(launches)
    ]
    return [*following, float("inf")]


def _went_back(launch: Launch) -> bool:
    times = (launch.began_unix_s, launch.joined_unix_s, launch.restored_unix_s, launch.ended_unix_s)
    return any(later < earlier - CLOCKS_S for earlier, later in pairwise(filter(None, times)))


def _add_times(
    found: Goodput, launch: Launch, own: Sequence[IncidentLog], until: float, now_s: float, window: Window
) -> None:
    """Add how one launch spent its time, until the next one began at ``until`` (infinite: there is none)."""
    began_s = launch.began_unix_s
    last_s = max((line.unix_s for story in own for line in story.lines), default=began_s)
    ended_s = launch.ended_unix_s or (now_s if until > now_s and now_s - last_s < RUNS_S else last_s)
    ended_s = max(began_s, min(ended_s, until))
    joined_s = max(began_s, min(launch.joined_unix_s, ended_s))
    restored_s = max(joined_s, min(launch.restored_unix_s, ended_s))
    found.joining += window.part(began_s, joined_s)
    found.restoring += window.part(joined_s, restored_s)
    spent = 0.0
    for story in own:
        opened_s, planned_s = story.opened_unix_s, story.opened_unix_s + _freezing(story)
        frozen, lasted = window.part(opened_s, planned_s), window.part(opened_s, opened_s + _lasted(story))
        found.freezing += frozen
        found.saving += lasted - frozen
        spent += lasted
    found.training += max(0.0, window.part(restored_s, ended_s) - spent)
    if until <= now_s:
        found.down += window.part(ended_s, until)


def _lasted(story: IncidentLog) -> float:
    end = story.last("released", "thawed") or story.lines[-1]
    return max(0.0, end.at_ms / 1e3)


def _freezing(story: IncidentLog) -> float:
    plan = next(story.of("plan"), None)
    return min(_lasted(story), max(0.0, plan.at_ms / 1e3)) if plan is not None else _lasted(story)


def _asked_for(story: IncidentLog) -> bool:
    opened = story.last("opened")
    return opened is not None and bool(opened.facts.get("snapshot"))


def _newest(story: IncidentLog) -> int:
    """Return the newest version that any rank reported as finished, in its answer or before the incident."""
    told = story.of("opened", "answer", "acknowledged")
    versions = (line.facts.get("newest" if line.kind == "opened" else "version") for line in told)
    return max((version for version in versions if isinstance(version, int)), default=0)
