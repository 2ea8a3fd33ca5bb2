"""Reads the health of this host from a check command or MindCluster's ``reset.json``; decides when to report it.

``reset.json`` (Ascend Device Plugin, ``-hotReset``): ``{"RankList": [{"RankId": 0, "Status": "unrecovered", "Policy":
"reset", "ErrorCodeHex": ["0x80C98000"]}], "GracefulExit": 0, "RetryTime": 0, ...}``. The plugin replaces the file by
moving a link. A reader may still see an incomplete file; the next read then finds a complete one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ttp.aside import aside
from ttp.core.layout import WORLD_SIZE_MAX
from ttp.launch.memory_file import memory_file

OUTPUT_MAX = 300
"""Maximum number of characters of a check's last line that are reported."""
RESET_BYTES_MAX = 1 << 20
NOTHING_TO_DO = frozenset({"", "empty", "ignore"})
"""Values of ``Policy`` with which a device needs no action of the job."""


class Health(Enum):
    """Health of a node. The values are the exit codes of a check."""

    HEALTHY = 0
    SUB_HEALTHY = 1
    FAULTY = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Args:
        health: health of the node.
        text: the reason: the check's last line of output.
        ranks: affected ranks; empty: every rank of the host.
    """

    health: Health
    text: str = ""
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.health.name.lower().replace('_', '-')}: {self.text}"


class ReportPolicy:
    """Decides when to report to the job, from one finding after the other.

    Args:
        strikes: number of bad findings in a row before the node is reported: a check may be wrong once.
        report_sub_healthy: True: report a sub-healthy node, too; False: it is only printed.
    """

    def __init__(self, strikes: int, *, report_sub_healthy: bool) -> None:
        self._strikes, self._report_sub_healthy = strikes, report_sub_healthy
        self._bad = 0
        self.reported: Finding | None = None
        """The finding that was reported to the job and not taken back; None: there is none."""

    def report(self, finding: Finding) -> bool:
        """Return whether to report a finding to the job. Call ``told`` only once the job has accepted the report."""
        wanted = finding.health is Health.FAULTY or (finding.health is Health.SUB_HEALTHY and self._report_sub_healthy)
        self._bad = self._bad + 1 if wanted else 0
        return wanted and self._bad >= self._strikes and self._is_news(finding)

    def _is_news(self, finding: Finding) -> bool:
        """Return whether a finding is worse than the one that was reported, or names further ranks."""
        told = self.reported
        if told is None or finding.health.value > told.health.value:
            return True
        covered = not told.ranks or (bool(finding.ranks) and set(finding.ranks) <= set(told.ranks))
        return finding.health is told.health and not covered

    def take_back(self, finding: Finding) -> bool:
        """Return whether to tell the job that the node is well again."""
        return finding.health is Health.HEALTHY and self.reported is not None

    def told(self, finding: Finding | None) -> None:
        """Note that the job knows of ``finding``; None: it knows that the node is well again."""
        self.reported, self._bad = finding, 0


def run_check(command: Sequence[str], timeout_s: float) -> Finding | str:
    """Run a check command, whose exit code is a ``Health``.

    Args:
        command: program and arguments.
        timeout_s: seconds after which a check that still runs counts as ``FAULTY``.

    Returns:
        The finding, or the reason (a text) why the check gave none.
    """
    with contextlib.ExitStack() as files:
        try:
            output = files.enter_context(memory_file())  # a pipe would stay open as long as its children run
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as problem:
            return f"the check {command[0]} cannot be run: {problem.strerror or problem}"
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Finding(Health.FAULTY, f"the check {command[0]} did not end within {timeout_s:g} s")
        finally:
            _stop(process)
        output.seek(0)
        said = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    text = (said[-1] if said else f"the check {command[0]} printed no reason")[:OUTPUT_MAX]
    try:
        return Finding(Health(code), text)
    except ValueError:
        return f"the check {command[0]} exited with {code}, but it has to exit with 0, 1 or 2: {text}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Kill a check that still runs, with its children. Does not wait: a broken device may hold it in a system call."""
    if process.poll() is None:
        with contextlib.suppress(PermissionError):  # it runs as root
            os.killpg(process.pid, signal.SIGKILL)
        aside("ttp-check", process.wait)


def rank_list(path: Path) -> list[Any]:
    """Return the ``RankList`` of ``reset.json``.

    Raises:
        OSError: it cannot be read.
        ValueError: it is incomplete, or no JSON.
        LookupError: it has no ``RankList``.
    """
    from ttp.store.json_text import parse_json
    from ttp.store.plain_file import read_plain

    said = parse_json(read_plain(path, RESET_BYTES_MAX))
    entries = said.get("RankList") if isinstance(said, dict) else None
    if not isinstance(entries, list):
        raise LookupError(f"{path} has no RankList")
    return entries


def read_reset(path: Path) -> Finding | str:
    """Read ``reset.json``. Returns a finding, or the reason (a text) why the file cannot be read."""
    try:
        entries = rank_list(path)
    except FileNotFoundError:
        return Finding(Health.HEALTHY, f"there is no {path}")
    except OSError as problem:
        return f"{path} cannot be read: {problem.strerror or problem}"
    except ValueError as problem:
        return f"{path} is incomplete, or not JSON: {problem!s:.200}"
    except LookupError as problem:
        return str(problem)
    broken = [entry for entry in entries if isinstance(entry, dict) and _is_broken(entry)]
    if not broken:
        return Finding(Health.HEALTHY, f"{path} names no broken device")
    ranks = sorted(
        {rank for entry in broken if type(rank := entry.get("RankId")) is int and 0 <= rank < WORLD_SIZE_MAX}
    )
    words = ", ".join(
        f"rank {e.get('RankId')!s:.20}: {e.get('Policy')!s:.40} {e.get('ErrorCodeHex')!s:.80}" for e in broken[:8]
    )
    return Finding(Health.FAULTY, f"{path.name} says {words}", tuple(ranks))


def _is_broken(entry: dict[str, object]) -> bool:
    return entry.get("Status") != "recovered" and str(entry.get("Policy", "")).lower() not in NOTHING_TO_DO
