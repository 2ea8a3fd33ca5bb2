"""``ttp verdict``: tells how a job ended, in one word, for scripts that decide whether to start it again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ttp.cli.connection import connected, find, known_ports
from ttp.cli.directories import SaveDir, existing, fallback_of, holds_ours, save_dir_of
from ttp.cli.incident_reader import IncidentLog, incident_files, readable
from ttp.cli.output import Json, complain, print_json, say, seconds, unread
from ttp.config import Config
from ttp.core.controller.job_verdict import FRUITLESS_MAX, Verdict
from ttp.errors import (
    EXIT_BAD_CONFIG,
    EXIT_NOT_SAVED,
    EXIT_SAVED,
    EXIT_TRAINED,
    CheckpointError,
    ConfigError,
    TtpError,
    UsageError,
)
from ttp.launch.token_file import read_token
from ttp.polling import poll
from ttp.store.history import Launch, WrongConfig, fruitless, read_launches, read_word
from ttp.store.names import INCIDENTS

EXIT_RUNNING = 1
"""Exit code for a job that still runs, so that a script neither restarts it nor raises an alarm."""
NOT_ASKED = (
    "a controller listens at {0}, where that of the last launch was, and requires a token that this command does not "
    "have: the job may be running. Set TTP_TOKEN_FILE (or TTP_TOKEN) as the job has it, and ask again"
)
ENDS = {EXIT_TRAINED: "trained", EXIT_BAD_CONFIG: "wrong", EXIT_NOT_SAVED: "lost", EXIT_SAVED: "saved"}
WORDS = ENDS | {EXIT_RUNNING: "running"}
NO_END = (
    "the last launch has not recorded its end, and its controller does not answer here: it was killed, or it runs on "
    "other hosts, where `ttp status` shows it"
)
MOVED = (
    ". It saves to {0}, where the record of this launch is missing: was that directory moved, removed or unmounted? "
    "Move or mount it back; `ttp save` shows whether a checkpoint can be written"
)
BETWEEN = (
    "the job is between two launches: a launcher starts its ranks again, or waits for those of other hosts, as its log "
    "says. The last launch {0}"
)
PATIENCE_S = 15.0
"""Seconds to wait for launchers that are ending, and for a controller that has yet to record the end of a launch."""
INCIDENTS_READ = 50
"""Maximum number of incidents that are read to find the last one with a fault."""

RunId = Annotated[str | None, typer.Option("--run-id", help="Only launches of this job (TORCHELASTIC_RUN_ID).")]
Since = Annotated[
    float | None,
    seconds(
        "--since",
        least=0,
        most=1e12,
        about="Only launches that began at this time or later (seconds since 1970, as `date +%s`).",
    ),
]
LauncherCode = Annotated[
    int | None,
    typer.Option("--launcher-code", help="Exit code of `ttp run` or srun: 143 and 64 count if no launch is recorded."),
]
TERMINATED = 128 + signal.SIGTERM


def verdict(
    directory: SaveDir,
    *,
    run_id: RunId = None,
    since: Since = None,
    launcher_code: LauncherCode = None,
    json: Json = False,
) -> None:
    """Say what became of the last launch of a job, in one word, and exit with its exit code.

    trained (0): to the end. saved (75): start it again, and it goes on. lost (70): nothing consistent could be saved,
    Ctrl-C ended the launch or it was cut off without a word, or three launches in a row brought no new version: look
    before you start it again. wrong (64): the configuration or the program is wrong, and no restart mends it. running
    (1): the job trains and has no verdict yet, or its launchers start it again, or wait for lost hosts; this is known
    only where `ttp status` finds the job, that is on its hosts. Launchers that are ending are waited for, up to 15 s.

    With wrong arguments, or a directory to which ttp has written nothing, it exits with 64 as well, and prints no word.

    The command reads what the job left in its save_dir, needs no running job, and gives the same answer on every host.
    Batch scripts decide by it: `srun` returns only the largest of many exit codes. The reason is printed on stderr.

    A job that is preempted before its ranks have joined leaves no verdict. With --launcher-code 143 (SIGTERM) the
    verdict is "saved", because nothing is lost.

    JSON keys: word, exit_code, text (why), run_id (empty: not known), launches (how many are known), fruitless (the
    last ones in a row that brought no new version).
    """
    directory = save_dir_of(directory)
    try:
        asked = (directory, run_id, since, launcher_code)
        result = poll(lambda: _found(*asked, patient=True), PATIENCE_S, 0.5) or _found(*asked, patient=False)
    except (CheckpointError, OSError, UsageError) as problem:  # a script must not take this for a job that runs
        running = _no_longer_waited(_running(directory, [], run_id))
        if running is None and isinstance(problem, UsageError):
            raise
        text = f"what the job left cannot be read: {problem}"
        result = running or Verdict(EXIT_NOT_SAVED, text), []
    assert result
    found, launches = result
    assert found.code is not None
    code, text = found.code, found.text
    if code in (EXIT_NOT_SAVED, EXIT_BAD_CONFIG, EXIT_SAVED):
        text += _storage(directory)
    if json:
        job = run_id or (launches[-1].run_id if launches else "")
        facts = {"word": WORDS[code], "exit_code": code, "text": text, "run_id": job}
        over = launches[:-1] if code == EXIT_RUNNING and launches and launches[-1].code is None else launches
        with unread():
            print_json(facts | {"launches": len(launches), "fruitless": fruitless(over)})
    else:
        with unread():
            say(WORDS[code])
        complain(text)
    raise typer.Exit(code)


def _found(
    directory: Path, run_id: str | None, since: float | None, launcher_code: int | None, *, patient: bool
) -> tuple[Verdict, list[Launch]] | Literal[False]:
    """Return the verdict on the last launch, and all launches of the job that are known.

    False, only if ``patient``: the controller still answers, and has yet to record the end of the launch; or the
    launcher has yet to end, or starts the job again.

    Raises:
        UsageError: the directory is not that of a job.
        CheckpointError: it cannot be read.
    """
    asked_to_leave = launcher_code == TERMINATED
    place, launches = _history(directory, run_id, must_exist=not asked_to_leave)
    recent = [launch for launch in launches if since is None or launch.began_unix_s >= since]
    incident = None if recent and recent[-1].code is not None else _last_fault(place, run_id, since)
    word = _word(place, run_id, since)
    if not (launches or incident or word or asked_to_leave or holds_ours(place)):  # a mistyped path is no lost job
        of_whom = f" of job {run_id!r}" if run_id is not None else ""
        raise UsageError(f"{place} holds nothing{of_whom} that ttp wrote: give the save_dir of the job")
    running = _running(directory, recent, run_id) if recent or not launches else None
    if patient and running is not None and running.code is None:
        return False
    return _no_longer_waited(running) or _judge(recent, incident, word, launcher_code), launches


def _no_longer_waited(running: Verdict | None) -> Verdict | None:
    """Return what ``_running`` says once nobody waits any longer: a launcher that lives may go on with the job."""
    if running is None or running.code is not None:
        return running
    return Verdict(EXIT_RUNNING, running.text) if running.text else None


def _history(place: Path, run_id: str | None, *, must_exist: bool) -> tuple[Path, list[Launch]]:
    """Return the directory with the newest record of launches, and the launches of the job in it.

    A ``save_dir`` that is broken lacks the newest launches; TTP_FALLBACK_DIR may have them.

    Raises:
        UsageError: ``place`` must exist and does not, and the other one has no launch.
        CheckpointError: a directory cannot be read, and the other one has no launch.
    """
    best: tuple[Path, list[Launch]] = place, []
    broken: CheckpointError | None = None
    fallback = fallback_of(place)
    for each in (place, *([fallback] if fallback else [])):
        try:
            found = [launch for launch in read_launches(each) if run_id is None or launch.run_id == run_id]
        except CheckpointError as problem:
            broken, found = problem, []
        if found and (not best[1] or _newness(found[-1]) > _newness(best[1][-1])):
            best = each, found
    if must_exist and not best[1]:
        existing(place)
    if broken is not None and not best[1]:
        raise broken
    return best


def _newness(launch: Launch) -> tuple[float, bool]:
    return launch.began_unix_s, launch.code is not None


def _storage(place: Path) -> str:
    """Return, as a sentence to append, what is wrong with the storage; empty: nothing was found."""
    try:
        now = os.statvfs(place)
    except OSError as problem:
        return f". {place} cannot be read: {problem.strerror}"
    full = "full" if now.f_blocks and not now.f_bavail else "out of inodes" if now.f_files and not now.f_favail else ""
    state = "mounted read-only" if now.f_flag & os.ST_RDONLY else full
    told = "what could not be recorded there is in the launcher's log, and in incidents/ of the run directory"
    told += ". As long as it takes no files a start is refused (64)"
    return f". The file system of {place} is {state}: {told}" if state else ""


def _running(place: Path, launches: list[Launch], run_id: str | None) -> Verdict | None:
    """Ask the controllers about a launch that has recorded no end, or one that may be followed by another.

    Without a launch, ask about any job that saves to ``place``, as its records may have been moved away.

    Returns:
        None: no controller knows more than the records. No code: no rank lives; with a text, a launcher does.
    """
    from ttp.launch.other_jobs import OPEN, TRAINS, refuses_to_say
    from ttp.launch.presence import LIVES

    last = launches[-1] if launches else None
    if last is not None and last.code not in OPEN:
        return None
    try:
        config = Config.from_env()
    except ConfigError as problem:  # bad usage would exit with 64, which is a verdict
        complain(f"the controller of the last launch was not asked: {problem}")
        return None
    waits: Verdict | None = None
    for now in _statuses(launches, config):
        if now is None or now.run_id != (last.run_id if last else run_id or now.run_id):
            continue
        alive = [rank.version for rank in now.ranks if rank.state in LIVES]
        here = _same(Path(now.save_dir), place)
        goes_on = last is None or last.code is None or now.stage in TRAINS  # else its ranks are leaving
        if alive and goes_on and (here or (last and _moved_from(Path(now.save_dir), last))):
            text = f"the job runs: {len(alive)} of {now.world_size} ranks live, the newest version is {max(alive)}"
            moved = "" if here and last else MOVED.format(now.save_dir)
            return Verdict(EXIT_RUNNING, text + moved)
        if here and (now.between_launches or last is None or last.code is None):
            waits = Verdict(None, _between(last) if now.between_launches else "")
    if last and (waits is None or not waits.text) and _has_launcher(last, place):
        waits = Verdict(None, _between(last))
    if waits is None and last and last.code is None and refuses_to_say(last, config):
        return Verdict(EXIT_RUNNING, NOT_ASKED.format(last.controller))
    return waits


def _between(last: Launch | None) -> str:
    if last is None or last.code is None:
        return BETWEEN.format("has recorded no end")
    return BETWEEN.format(f"is {WORDS[last.code]}: {last.text}")


def _has_launcher(launch: Launch, place: Path) -> bool:
    """Return whether a launcher of this job runs on this host: it may wait where no controller is left to be asked."""
    from ttp.launch.ring import read_ring
    from ttp.launch.run_dir import journals_allowed, launcher_lives

    for port in _named() or known_ports():
        with contextlib.suppress(TtpError):
            run_dir = find(None, port, None).run_dir
            if run_dir is None or not launcher_lives(run_dir):
                continue
            ring = read_ring(run_dir)
            same = ring is not None and (ring.run_id, ring.incarnation) == (launch.run_id, launch.incarnation)
            if same and any(_same(Path(saves_to), place) for saves_to in journals_allowed(run_dir)):
                return True
    return False


def _named() -> tuple[None, ...]:
    """Return the job that the environment names, as a port for ``find``; empty: it names none."""
    return (None,) if os.environ.get("TTP_PORT") or os.environ.get("TTP_RUN_DIR") else ()


def _statuses(launches: list[Launch], config: Config) -> Iterator[Any]:
    """Yield what controllers answer: those of this host's jobs, and the one that led the last launch.

    If that has an end, the others know no more of it, and one that hangs takes seconds.
    """
    from ttp.launch.other_jobs import status_of_launch

    has_end = bool(launches) and launches[-1].code is not None
    for port in _named() or (known_ports() if not has_end else ()):
        yield _status(port)
    with contextlib.suppress(TtpError, ValueError):
        yield status_of_launch(launches[-1], config)[0] if launches else None


def _status(port: int | None) -> Any:
    """Return the status that a controller of this host's job gives; None: none answers.

    A secret that was replaced in the file since the job began is wrong, and that in the run directory is right.
    """
    with contextlib.suppress(TtpError):
        where = find(None, port, None)
        with contextlib.suppress(TtpError), connected(where) as client:
            return client.status()
        left = read_token(where.run_dir) if where.run_dir is not None else None
        if left and left != where.token:
            with connected(replace(where, token=left)) as client:
                return client.status()
    return None


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # neither a link nor its target is there if the directory is away
        return one == other.absolute()


def _moved_from(save_dir: Path, launch: Launch) -> bool:
    """Return whether the record of a running launch was moved: its ``save_dir`` has neither it nor one as new.

    A copy leaves it there. Another job may have the same id ("none" if its launcher was given none), but has a record.
    """
    with contextlib.suppress(CheckpointError):
        recorded = [known for known in read_launches(save_dir) if known.run_id == launch.run_id]
        return all(known.code is not None and known.began_unix_s < launch.began_unix_s for known in recorded)
    return False


def _judge(
    launches: list[Launch], incident: IncidentLog | None, word: WrongConfig | None, launcher_code: int | None
) -> Verdict:
    """Return the verdict on the last launch. Where its end was not recorded, the newest incident decides."""
    if word is not None and word.holds(launches) and (incident is None or word.unix_s >= incident.opened_unix_s):
        return Verdict(EXIT_BAD_CONFIG, word.text)
    last = launches[-1] if launches else None
    if last is None and incident is None:
        if launcher_code == TERMINATED:
            return Verdict(EXIT_SAVED, "the launch was told to stop before its ranks had joined: no step is lost")
        if launcher_code == EXIT_BAD_CONFIG:
            return Verdict(
                EXIT_BAD_CONFIG, "the launcher refused to start before the ranks had joined; its log says why"
            )
        text = "no launch of this job is recorded here: it ended before its ranks had joined, or could not be recorded"
        return Verdict(EXIT_NOT_SAVED, text)
    if last is not None and last.code is not None and last.code in ENDS:
        found = Verdict(last.code, last.text)
    elif incident is not None and (last is None or incident.opened_unix_s >= last.began_unix_s):
        found = Verdict(EXIT_SAVED if incident.saved else EXIT_NOT_SAVED, incident.outcome)
    else:
        found = Verdict(EXIT_NOT_SAVED, NO_END)
    in_vain = fruitless(launches)
    if found.code == EXIT_SAVED and in_vain >= FRUITLESS_MAX:
        return Verdict(EXIT_NOT_SAVED, f"no progress: {in_vain} launches in a row brought no new version. {found.text}")
    return found


def _last_fault(place: Path, run_id: str | None, since: float | None) -> IncidentLog | None:
    """Return the newest incident that was neither a checkpoint on request nor a false alarm; None: there is none."""
    files = incident_files(place)[:INCIDENTS_READ] if (place / INCIDENTS).is_dir() else []
    for log in readable(files, complain):
        opened = next(log.of("opened"), None)
        other = run_id is not None and opened is not None and opened.facts.get("run_id", run_id) != run_id
        if other or opened is None or log.last("thawed") is not None:
            continue
        return log if since is None or log.opened_unix_s >= since else None
    return None


def _word(place: Path, run_id: str | None, since: float | None) -> WrongConfig | None:
    """Return the message of a rank that exited with 64, which no controller or launcher may have recorded; or None."""
    word = read_word(place)
    if word is None or (run_id is not None and word.run_id != run_id) or (since is not None and word.unix_s < since):
        return None
    return word
