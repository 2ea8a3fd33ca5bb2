"""The history of launches: what each launch of the jobs that save to one directory saved, and how it ended.

``save_dir/incidents/launches.log`` has a line of JSON for each of these events: a launch begins (``incarnation``), all
ranks have joined (``formed``), have agreed on a checkpoint (``restore``), and have read it (``restored``), a checkpoint
was ``committed``, all ranks have trained to the end (``finished``), were told to exit with a code (``released``), a
rank has exited with 64 (``wrong``), hosts must start no ranks again (``drained``), or no rank moved for so long that a
later wait of that length is no hang (``stood_still``); or another controller has taken over (``leads``), and learns
from here what that one knew. A launch without an end still runs, or ended together with its controller. A line belongs
to the launch that it names by ``run_id`` and ``incarnation``; one that names none, to the launch before it. Lines that
cannot be parsed, such as half a line, are skipped.

If a rank exits with 64 before any rank has joined, no controller knows of it. The rank then writes a file itself,
``save_dir/incidents/wrong.json``. If several ranks do, the last file is kept.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.aside import aside
from ttp.core.layout import Rank, Version, parse_ranks
from ttp.errors import EXIT_BAD_CONFIG, EXIT_NOT_SAVED, EXIT_SAVED, EXIT_TRAINED, CheckpointError
from ttp.store.durable import make_directory, write_durably
from ttp.store.json_text import parse_json
from ttp.store.names import INCIDENTS
from ttp.store.plain_file import open_plain, read_plain

log = logging.getLogger("ttp.store")

FILE = "launches.log"
WORD = "wrong.json"
WORD_BYTES_MAX = 1 << 16
WORD_S = 3.0
"""Seconds for which an exiting rank waits until the file ``WORD`` is written."""
FORMING_S = 600.0
"""Seconds by which the file of a rank that exited with 64 may be older than the first line of its launch, because the
other ranks may have joined later.
"""
TAIL_BYTES = 4 << 20
"""Bytes of the newest lines that are read."""
TEXT_MAX = 2000
HOSTS_MAX = 1 << 17
"""Most characters of the hosts of a job in a line; else it has none. 10,000 ranks on 1,250 hosts take a third of it."""
HISTORY_KINDS = (
    "formed", "restore", "restored", "committed", "finished", "released", "wrong", "drained", "stood_still",
)  # fmt: skip
BEGINS = "incarnation"
LEADS = "leads"

_FACTS = (
    "run_id", "incarnation", "world_size", "version", "path", "exit_code", "text", "progress", "size", "controller",
    "hosts", "preempted", "run_dir", "stood_s",
)  # fmt: skip


@dataclass(slots=True)
class Launch:
    """One launch of a job.

    Args:
        run_id: the job.
        incarnation: number of the launch within the job, as its controller counted.
        began_unix_s: when its first rank joined.
        progress: whether it saved a new version, or trained to the end.
        code: exit code of the job: 64, 70, 75 or 0; None if it was cut off.
        released: whether its ranks were told to exit, which is the end of an incident.
        preempted: whether SIGTERM was the cause of that.
        text: reason of the exit code.
        version: the newest version that it saved; None if it saved none.
        path: the checkpoint of that version.
        drained: hosts that must start no ranks again after it.
        hosts: a host and its ranks (``0-7``), as often as they were recorded; what comes later is newer.
        ended_unix_s: when its end was recorded; 0 if it was not.
        joined_unix_s: when all ranks had joined; 0 if they have not.
        restored_unix_s: when all ranks had read the checkpoint that they begin with; 0 if that was not recorded.
        restored: the version that they began with.
        restored_bytes: size of that checkpoint; 0 if not known.
        controller: ``host:port`` of the controller that has led it last; empty if not known.
        run_dir: the run directory of that controller, which has the incidents that ``save_dir`` did not take.
        stood_s: seconds of the last long wait without a move of any rank (``stood_still``); 0: there was none.
        stood_unix_s: when that was recorded.
    """

    run_id: str
    incarnation: int
    began_unix_s: float
    progress: bool = False
    code: int | None = None
    released: bool = False
    preempted: bool = False
    text: str = ""
    version: int | None = None
    path: str = ""
    drained: frozenset[str] = frozenset()
    hosts: tuple[tuple[str, str], ...] = ()
    ended_unix_s: float = 0.0
    joined_unix_s: float = 0.0
    restored_unix_s: float = 0.0
    restored: int = 0
    restored_bytes: int = 0
    controller: str = ""
    run_dir: str = ""
    stood_s: float = 0.0
    stood_unix_s: float = 0.0

    def hosts_of_ranks(self) -> dict[Rank, str]:
        """Return the host of each rank, as far as it is recorded."""
        found: dict[Rank, str] = {}
        for host, ranks in self.hosts:
            with contextlib.suppress(ValueError):
                found |= dict.fromkeys(map(Rank, parse_ranks(ranks)), host)
        return found


@dataclass(frozen=True, slots=True)
class WrongConfig:
    """The file that a rank wrote before it exited with 64 (bad configuration).

    Args:
        run_id: the job of the rank.
        unix_s: when the file was written.
        text: why the rank exited.
        after: ``began_unix_s`` of the last launch in the log at that time; 0: there was none, or it is unknown.
        after_its_end: whether that launch had ended, or saved a new version, by then.
    """

    run_id: str
    unix_s: float
    text: str
    after: float = 0.0
    after_its_end: bool = False

    def holds(self, launches: Sequence[Launch]) -> bool:
        """Return whether this file is newer than everything that the log says of the job.

        Args:
            launches: the launches in the log, the oldest first.

        Returns:
            False if a launch began, or ended, later.
        """
        if not launches:
            return True
        last = launches[-1]
        known = [number for number, launch in enumerate(launches) if launch.began_unix_s == self.after]
        if known and (self.after_its_end or last is not launches[known[-1]]):  # by order in the log, not by clocks
            newer = launches[known[-1] + 1 :]
            if not newer:
                return True
            if any(launch.code is not None or launch.progress for launch in newer):
                return False
        if last.code is not None or last.progress:
            return self.unix_s >= max(last.began_unix_s, last.ended_unix_s)
        return self.unix_s >= last.began_unix_s - FORMING_S


def was_launched(save_dir: Path) -> bool:
    """Return whether a job has been launched with this directory; also True if it cannot be looked at."""
    try:
        (save_dir / INCIDENTS / FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):  # ValueError: a name that no directory can have
        pass
    return True


def leave_word(save_dir: Path, run_id: str, text: str) -> None:
    """Record in a file that a rank exits with 64. Waits at most ``WORD_S`` for the storage. Never raises.

    Args:
        save_dir: the directory that holds the job's checkpoints.
        run_id: the job.
        text: why the rank exits.
    """

    def write() -> None:
        facts = {"kind": "wrong", "run_id": run_id, "unix_s": round(time.time(), 3), "text": text[:TEXT_MAX]}
        try:
            if launches := _readable(save_dir):
                last = launches[-1]
                facts |= {"after": last.began_unix_s, "after_its_end": last.code is not None or last.progress}
            make_directory(save_dir / INCIDENTS)
            write_durably(save_dir / INCIDENTS / WORD, json.dumps(facts).encode())
        except (OSError, ValueError) as problem:
            log.error("`ttp verdict` will not know of this: cannot write to %s: %s", save_dir, problem)

    with contextlib.suppress(RuntimeError):  # no thread can be started, and the exit code must not hang with a disk
        aside("ttp-word", write).join(WORD_S)


def read_word(save_dir: Path) -> WrongConfig | None:
    """Read the last file that ``leave_word`` wrote; return None if there is none or it cannot be read."""
    try:
        found = parse_json(read_plain(save_dir / INCIDENTS / WORD, WORD_BYTES_MAX))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not (at_s := _seconds(found.get("unix_s"))):
        return None
    after_s, ended = _seconds(found.get("after")), found.get("after_its_end") is True
    return WrongConfig(str(found.get("run_id", "")), at_s, str(found.get("text", ""))[:TEXT_MAX], after_s, ended)


def line_of(kind: str, unix_s: float, facts: Mapping[str, Any]) -> str:
    """Return a line of ``launches.log``.

    Args:
        kind: ``incarnation``, or one of ``HISTORY_KINDS``.
        unix_s: time of the event, in seconds since 1970.
        facts: facts of the event; those in ``_FACTS`` are written.

    Returns:
        The line. It begins with a newline, so that it is not appended to a line that a crash has cut off.
    """
    kept = {name: facts[name] for name in _FACTS if name in facts}
    if isinstance(kept.get("text"), str):
        kept["text"] = kept["text"][:TEXT_MAX]
    if kind == "formed" and len(json.dumps(kept.get("hosts"))) > HOSTS_MAX:
        del kept["hosts"]
    return "\n" + json.dumps({"kind": kind, "unix_s": round(unix_s, 3), **kept}) + "\n"


def read_launches(save_dir: Path) -> list[Launch]:
    """Return the launches that ``launches.log`` records, the oldest first; only the newest ones of a long file.

    Raises:
        CheckpointError: the file exists and cannot be read.
    """
    return read_history(save_dir)[0]


def read_history(save_dir: Path) -> tuple[list[Launch], int]:
    """Return what ``read_launches`` returns, and the number of lines that could not be read.

    Raises:
        CheckpointError: the file exists and cannot be read.
    """
    path = save_dir / INCIDENTS / FILE
    try:
        with open_plain(path) as file:
            if file.seek(max(0, path.stat().st_size - TAIL_BYTES)):
                file.readline()  # the rest of a line
            data = file.read(TAIL_BYTES) or b""
    except (FileNotFoundError, NotADirectoryError):
        return [], 0
    except OSError as problem:
        raise CheckpointError(f"cannot read {path}: {problem.strerror or problem}") from None
    records = list(_records(data))
    return _launches(records), records.count(None)


def _readable(save_dir: Path) -> list[Launch]:
    try:
        return read_launches(save_dir)
    except CheckpointError:
        return []


def parse_launches(data: bytes) -> list[Launch]:
    """Return the launches that the lines in ``data`` record, the oldest first."""
    return _launches(_records(data))


def behind(save_dir: Path, resumed: tuple[str, int] | None, lately_s: float) -> tuple[int, Launch | None, float]:
    """Return what the controller of the present launch has to know of the history.

    Args:
        save_dir: the directory that holds the job's checkpoints.
        resumed: run id and incarnation of the present launch, which was led by another controller before; None: it
            begins now.
        lately_s: seconds that count as lately.

    Returns:
        The number of launches in a row before the present one that saved no new version; what is recorded of the
        present one (None: nothing is); and the longest ``stood_s`` that was recorded lately.
    """
    launches = _readable(save_dir)
    lately = (launch.stood_s for launch in launches if time.time() - launch.stood_unix_s <= lately_s)
    stood_s = max(lately, default=0.0)
    known = bool(launches) and (launches[-1].run_id, launches[-1].incarnation) == resumed
    present = launches.pop() if known else None
    return fruitless(launches), present, stood_s


def sound_versions(save_dir: Path) -> set[Version]:
    """Return the versions that launches have restored, and so verified; of a later one that went back, none above."""
    known: set[Version] = set()
    for launch in _readable(save_dir):
        if launch.restored_unix_s:
            known = {v for v in known if v < launch.restored} | {Version(max(launch.restored, 0))}
    return known


def fruitless(launches: Sequence[Launch]) -> int:
    """Return how many of the last launches, in a row, saved no new version.

    One that ended with 64 ends the row. One that ended with SIGTERM does not count: a preemption is no lasting fault.
    """
    count = 0
    for launch in reversed(launches):
        if launch.progress or launch.code == EXIT_BAD_CONFIG:
            break
        count += not launch.preempted
    return count


def _records(data: bytes) -> Iterable[dict[str, Any] | None]:
    """Yield the record of each line that is not empty; None for a line without one."""
    for line in filter(None, data.split(b"\n")):
        try:
            record = parse_json(line.decode("utf-8", errors="replace"))
        except ValueError:
            record = None
        yield record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def _launches(records: Iterable[Mapping[str, Any] | None]) -> list[Launch]:
    found: list[Launch] = []
    for record in records:
        if record is None:
            continue
        at_s = _seconds(record.get("unix_s"))
        if record["kind"] == BEGINS:
            found.append(Launch(str(record.get("run_id", "")), _whole(record.get("incarnation")) or 0, at_s))
        if found:
            name = record.get("run_id"), record.get("incarnation")
            named = (launch for launch in reversed(found) if (launch.run_id, launch.incarnation) == name)
            _take(next(named, found[-1]), record, at_s)  # a controller may have been stopped since an earlier launch
    return found


def _take(launch: Launch, record: Mapping[str, Any], at_s: float) -> None:
    text = str(record.get("text", ""))[:TEXT_MAX]
    match record["kind"]:
        case "incarnation" | "leads":
            launch.controller, launch.run_dir = (str(record.get(name, "")) for name in ("controller", "run_dir"))
        case "formed" | "restore":
            launch.joined_unix_s = launch.joined_unix_s or at_s
            if isinstance(hosts := record.get("hosts"), dict):
                launch.hosts += tuple((host, str(ranks)) for host, ranks in hosts.items())
        case "restored" if not launch.restored_unix_s:
            launch.restored_unix_s, launch.restored = at_s, _whole(record.get("version")) or 0
            launch.restored_bytes = _whole(record.get("size")) or 0
        case "committed":
            launch.progress, launch.version = True, _whole(record.get("version"))
            launch.path = str(record.get("path", ""))
        case "drained" if isinstance(record.get("hosts"), list):
            launch.drained = frozenset(map(str, record["hosts"]))
        case "stood_still":
            launch.stood_s, launch.stood_unix_s = _seconds(record.get("stood_s")), at_s
        case "finished":
            launch.progress, launch.ended_unix_s = True, at_s
            launch.code, launch.text = _whole(record.get("exit_code")) or EXIT_TRAINED, text or "trained to the end"
        case "released" if not _overruled(launch, record):
            launch.released, launch.preempted = True, record.get("preempted") is True
            if launch.code == EXIT_BAD_CONFIG:
                return
            launch.progress |= record.get("progress") is True
            launch.code, launch.text, launch.ended_unix_s = _whole(record.get("exit_code")), text, at_s
        case "wrong":
            launch.code, launch.text, launch.ended_unix_s = EXIT_BAD_CONFIG, text, at_s


def _overruled(launch: Launch, record: Mapping[str, Any]) -> bool:
    """Return whether a controller that saved nothing did not lead the launch, or led only ranks that another left.

    A controller that was stopped finds all streams ended when it goes on: the ranks have another one. A rank that
    reaches only another controller is alone there, while the rest of the job is saved.
    """
    replaced = record.get("controller", launch.controller) != launch.controller
    return _whole(record.get("exit_code")) == EXIT_NOT_SAVED and (replaced or launch.code == EXIT_SAVED)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e12 else 0.0  # false for NaN
