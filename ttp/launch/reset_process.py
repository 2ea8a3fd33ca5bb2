"""``ttp reset-process``: kills training processes while broken devices are reset, and starts them again in place.

For scripts that start MindSpore's ranks themselves. Replaces ``reset_process.py`` of MindCluster's samples::

    python train.py & pids="$pids $!" ...; ttp reset-process -p $pids -r & wait

The Ascend Device Plugin writes ``reset.json``: ``{"RankList": [{"RankId": 0, "Status": "unrecovered"}]}``. When this
file lists a rank of the job, on any host, with a status other than ``recovered``, the ranks of this host are ended so
that devices can be reset. When all listed ranks have ``recovered``, the ranks of this host are started again with the
same command lines and environments.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import queue
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ttp.errors import EXIT_BAD_CONFIG, EXIT_TRAINED, ConfigError, ToldAs
from ttp.inbox import Inbox
from ttp.launch.node_check import rank_list
from ttp.launch.preparation import EXIT_FAILED

logger = logging.getLogger("ttp.launch")

RESET_JSON = "/user/restore/reset/config/reset.json"
NEW_LOG = "newlog"
"""File in a process's working directory for its output after a restart."""
TIME_MAX_S = 3000
LAUNCH = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True, slots=True)
class Training:
    """A training process, and what is needed to start it again.

    Args:
        process: the process; psutil also compares start times, so a process that reuses its pid is not taken for it.
        rank: its rank; None: ranks are not used.
        command: its command line.
        environ: its environment at its start.
        directory: its working directory.
        child: the process, if this program started it; None: another program did.
    """

    process: psutil.Process
    rank: int | None
    command: list[str]
    environ: dict[str, str]
    directory: str
    child: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, pid: int, with_rank: bool) -> Training:
        """Make a ``Training`` of a running process.

        Raises:
            ConfigError: it does not run, belongs to another user, or has no ``RANK_ID`` although it should.
        """
        with ToldAs(ConfigError, f"process {pid} cannot be watched", psutil.Error, ValueError, OverflowError):
            process = psutil.Process(pid)
            command, environ, directory = process.cmdline(), process.environ(), process.cwd()
        rank = environ.get("RANK_ID", "")
        if with_rank and not (rank.isascii() and rank.isdigit()):
            raise ConfigError(f"process {pid} has no RANK_ID in its environment: -r is for ranks of a rank table")
        return cls(process, int(rank) if with_rank else None, command, environ, directory)

    def again(self) -> Training:
        """Start the process again, as the next launch (``TORCHELASTIC_RESTART_COUNT``). Returns the new process.

        Raises:
            OSError: it cannot be started.
        """
        launch = self.environ.get(LAUNCH, "0")
        environ = self.environ | {LAUNCH: str(int(launch) + 1 if launch.isdigit() else 1)}
        with Path(self.directory, NEW_LOG).open("ab") as log:
            child = subprocess.Popen(
                self.command, cwd=self.directory, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return replace(self, process=psutil.Process(child.pid), environ=environ, child=child)


def _runs(process: psutil.Process) -> bool:
    """Return whether a process still runs; a zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, how: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(how)


class ResetProcess:
    """Watches the training processes of this host. Call ``look`` again and again.

    Args:
        trainings: the running processes.
        reset_json: path of the plugin's file.
        elastic: True: healthy ranks get SIGTERM first, so that they save; False: all ranks are killed at once.
        faulty_s: seconds after which broken ranks are killed, if ``elastic``.
        healthy_s: seconds after which healthy ranks are killed, if ``elastic``.
    """

    def __init__(
        self, trainings: Sequence[Training], reset_json: Path, *, elastic: bool, faulty_s: float, healthy_s: float
    ) -> None:
        self._trainings, self._reset_json, self._elastic = list(trainings), reset_json, elastic
        self._faulty_s, self._healthy_s = faulty_s, healthy_s
        self._faulty: set[int] = set()
        self._began_s = 0.0
        self._others: list[psutil.Process] = []
        """Children of the training processes, which are killed with them."""
        self._said = ""

    def look(self) -> int | None:
        """Check the processes and ``reset.json`` once. Returns the exit code when the training is over, else None."""
        if not self._faulty and not any(_runs(training.process) for training in self._trainings):
            return self._end()
        statuses = self._statuses()
        if statuses is None:
            statuses = dict.fromkeys(self._faulty, "unknown")
        broken = {rank for rank, status in statuses.items() if status != "recovered"}
        if broken and not self._faulty:
            logger.warning("reset.json names rank %s: the ranks of this host are ended", _words(broken))
            self._began_s = time.monotonic()
            self._ask(broken)
        self._faulty |= broken
        if not self._faulty or self._still_run():
            return None
        failed = {rank for rank in broken if statuses[rank] == "failed"}
        if failed:
            logger.error("the devices of rank %s cannot be reset: the job has to be rescheduled", _words(failed))
            return EXIT_FAILED
        return None if broken else self._start()

    def _ask(self, broken: set[int]) -> None:
        """Ask the healthy ranks to save, if the mode is elastic."""
        for training in self._trainings if self._elastic else ():
            if training.rank not in broken:
                _signal(training.process, signal.SIGTERM)

    def _still_run(self) -> bool:
        """Kill processes whose time is up, with their children. Returns whether any process still runs."""
        since_s = time.monotonic() - self._began_s
        for training in self._trainings:
            limit_s = self._faulty_s if training.rank in self._faulty else self._healthy_s
            if _runs(training.process) and (not self._elastic or since_s >= limit_s):
                self._kill(training.process)
        for process in self._others:
            _signal(process, signal.SIGKILL)
        self._others = [process for process in self._others if _runs(process)]
        return bool(self._others) or any(_runs(training.process) for training in self._trainings)

    def _kill(self, process: psutil.Process) -> None:
        """Kill a process; its children are added to ``_others``."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._others += process.children(recursive=True)
        _signal(process, signal.SIGKILL)

    def _start(self) -> int | None:
        """Start all ranks again, or none. Returns the exit code if one cannot be started, else None."""
        for training in self._trainings:
            if training.child is not None:
                training.child.wait()
        started: list[Training] = []
        try:
            for training in self._trainings:
                started.append(training.again())
        except OSError as problem:
            logger.error("a rank of this host cannot be started again, so none is: %s", problem)
            for training in started:  # they would hold the devices, and wait for the rank that is missing
                self._kill(training.process)
            for process in self._others:
                _signal(process, signal.SIGKILL)
            return EXIT_FAILED
        self._trainings = started
        words = _words(training.process.pid for training in self._trainings)
        logger.warning("all devices have recovered: the ranks of this host are started again, as processes %s", words)
        self._faulty = set()
        return None

    def _end(self) -> int:
        """Return the exit code after all processes have ended by themselves.

        The exit codes of processes that another program started are not known, so they do not count as 0.
        """
        codes = [None if training.child is None else training.child.wait() for training in self._trainings]
        if all(code == EXIT_TRAINED for code in codes):
            return EXIT_TRAINED
        logger.error("all processes ended; exit codes: %s", ", ".join("?" if c is None else str(c) for c in codes))
        return EXIT_FAILED

    def _statuses(self) -> dict[int, str] | None:
        """Return the status of each rank in ``reset.json``; None: it cannot be read now, which is logged once."""
        try:
            return {int(entry["RankId"]): str(entry["Status"]) for entry in rank_list(self._reset_json)}
        except (OSError, ValueError, TypeError, LookupError, OverflowError) as problem:
            text = f"{self._reset_json} cannot be read, or is no reset.json: {problem!r:.200}"
            if text != self._said:
                logger.warning("%s", text)
            self._said = text
            return None


def _words(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def main(argv: list[str]) -> int:
    """Run ``ttp reset-process`` with ``argv``.

    Returns:
        0: the training is over: all processes ended with 0, or this program got SIGTERM. 1: it failed: a process ended
            with another code or cannot be started again, a device cannot be reset, or this program got SIGUSR2. 64: the
            command line is wrong.

    Raises:
        ConfigError: the options contradict each other, or a process cannot be watched.
    """
    try:
        given = _parser().parse_args(argv)
    except SystemExit as leaving:
        return EXIT_TRAINED if leaving.code in (None, 0) else EXIT_BAD_CONFIG
    if given.mode == "elastic" and not given.with_rank:
        raise ConfigError("-m elastic needs -r: reset.json names broken ranks by their RANK_ID")
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    told: Inbox[int] = Inbox()  # read between two looks: a signal must not leave only some of the ranks started
    for how, code in ((signal.SIGTERM, EXIT_TRAINED), (signal.SIGUSR2, EXIT_FAILED)):
        signal.signal(how, lambda *_, code=code: told.put(code))
    trainings = [Training.of(pid, given.with_rank) for pid in dict.fromkeys(given.pids)]
    seconds = {"faulty_s": given.faulty_after, "healthy_s": max(given.time, given.faulty_after)}
    managed = ResetProcess(trainings, given.reset_json, elastic=given.mode == "elastic", **seconds)
    while (ended := managed.look()) is None:
        with contextlib.suppress(queue.Empty):
            return told.get(timeout=given.every)
    return ended


def _parser() -> argparse.ArgumentParser:
    purpose = "Kill training processes while broken devices are reset, and start them again in place."
    parser = argparse.ArgumentParser(prog="ttp reset-process", description=purpose)
    add = parser.add_argument
    add("-p", "--pids", type=int, nargs="+", required=True, help="training processes of this host")
    add("-m", "--mode", choices=("common", "elastic"), default="common", help="common: all are killed at once; "
        "elastic: healthy ranks get SIGTERM first and save [common]")  # fmt: skip
    add("-f", "--frame", choices=("ms", "mindspore"), default="ms", help="framework [ms]")
    add("-r", "--with_rank", "--with-rank", action="store_true", help="each process is a rank, whose number is its "
        "RANK_ID; elastic needs this")  # fmt: skip
    add("-t", "--time", type=_seconds, default=50, metavar="S", help="elastic: healthy ranks are killed after S [50]")
    add("--faulty-after", type=_seconds, default=10, metavar="S", help="elastic: broken ranks are killed after S [10]")
    add("--reset-json", type=Path, default=RESET_JSON, metavar="F", help="the plugin's reset.json [%(default)s]")
    add("--every", type=_every, default=5, metavar="S", help="seconds between two checks [5]")
    return parser


def _seconds(text: str) -> float:
    if not 0 <= float(text) <= TIME_MAX_S:
        raise argparse.ArgumentTypeError(f"expected seconds from 0 to {TIME_MAX_S}, not {text}")
    return float(text)


def _every(text: str) -> float:
    return max(0.01, _seconds(text))
