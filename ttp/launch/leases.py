"""Leases: how a rank tells the launcher on its host "I am saving, do not stop me before this time".

A launcher that sees one worker die stops the others. Files tell it which of them it must wait for::

    run_dir/armed/<pid>    a processor runs in this process, so it may ask for a lease
    run_dir/leases/<pid>   the process saves, and must not be stopped before this ``time.monotonic()`` of this host;
                           or ``NO_LEASE``, which keeps room for that time
    run_dir/ended/<pid>    training and the program have ended here; only the interpreter still shuts down

The first two files are removed when the process ends well; ``sweep`` removes those of killed processes. Everything here
works if directories or files are missing, and never raises: a full disk must not stop a training job. So an armed
process has a file for its lease already, because the core dumps of a failure may have filled the disk.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Collection
from pathlib import Path

from ttp.launch.proc_files import is_ending, stat_of
from ttp.launch.run_dir import make_private
from ttp.store.durable import replace_file

logger = logging.getLogger("ttp.launch.leases")

FRESH_S = 3600.0
"""Seconds between two touches of all files in the run directory."""
ROOM = 32
"""Characters of a lease: more than any number takes."""
NO_LEASE = "none".ljust(ROOM, "-")
"""Contents of the file of a process that has no lease. They are no number, even if a lease has replaced half of them.
"""


class Leases:
    """The leases of one job on one host. Any process of the job may make its own instance.

    Args:
        run_dir: run directory of the job on this host.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._touched_s = Path(run_dir), time.monotonic()
        self._armed, self._leases, self._ended = (self._run_dir / name for name in ("armed", "leases", "ended"))

    def arm(self, pid: int) -> None:
        """Note that a processor runs in ``pid``."""
        remove(self._ended / str(pid))
        write_whole(self._leases / str(pid), NO_LEASE)
        write_whole(self._armed / str(pid), "")

    def disarm(self, pid: int) -> None:
        """Undo ``arm`` and end any lease, so that the launcher no longer waits for this process."""
        remove(self._armed / str(pid))
        remove(self._leases / str(pid))

    def end(self, pid: int) -> None:
        """Note that the program of ``pid`` has ended. A later crash, of a library that is unloaded, is no failure."""
        write_whole(self._ended / str(pid), "")

    def grant(self, pid: int, deadline_s: float) -> None:
        """Ask the launcher not to stop ``pid`` before ``deadline_s``. Replaces an earlier lease.

        Args:
            pid: the process.
            deadline_s: in seconds of ``time.monotonic()``.
        """
        write_whole(self._leases / str(pid), repr(float(deadline_s)).ljust(ROOM))

    def revoke(self, pid: int) -> None:
        """End the lease: the process has finished saving."""
        path = self._leases / str(pid)
        if not _overwritten(path, NO_LEASE.encode()):
            remove(path)

    def armed(self) -> set[int]:
        """Return the processes that armed themselves, did not disarm, and have not begun to end. Some may be dead."""
        return {pid for path in entries(self._armed) if not is_ending(pid := int(path.name))}

    def used(self) -> bool:
        """Return whether a processor has run in any process since the last ``sweep``, as far as its files are left."""
        return any(map(entries, (self._armed, self._leases, self._ended)))

    def has_ended(self, pid: int) -> bool:
        """Return whether ``end`` was called for ``pid``."""
        return (self._ended / str(pid)).exists()

    def deadlines(self) -> dict[int, float]:
        """Return pid -> deadline, in seconds of ``time.monotonic()``, of leases that can be read."""
        found: dict[int, float] = {}
        for path in entries(self._leases):
            with contextlib.suppress(OSError, ValueError):
                deadline_s = float(path.read_text())
                if math.isfinite(deadline_s):
                    found[int(path.name)] = deadline_s
        return found

    def keep(self) -> None:
        """Touch all files in the run directory once an hour. For a launcher, which calls it often.

        By default they are in the directory for temporary files, from which cleaners remove what is some days old. A
        rank that seems not to be armed would not be waited for while it saves.
        """
        if time.monotonic() >= self._touched_s + FRESH_S:
            self._touched_s = time.monotonic()
            for path in self._run_dir.rglob("*"):
                with contextlib.suppress(OSError):
                    os.utime(path, follow_symlinks=False)

    def sweep(self) -> None:
        """Remove the files of processes that no longer exist."""
        for path in (*entries(self._armed), *entries(self._leases), *entries(self._ended)):
            if not exists(int(path.name)):
                remove(path)


def worker_of(pid: int, workers: Collection[int]) -> int:
    """Return which of these workers a process is or belongs to; the process itself if it belongs to none.

    The rank of a worker that is a shell script is a process below it. Each worker leads a session.
    """
    above = pid
    while above > 1 and above not in workers:
        try:
            _, parent, _, session, *_ = stat_of(above)
        except OSError:
            return pid
        above = int(session) if int(session) in workers else int(parent)
    return above if above in workers else pid


def entries(directory: Path) -> list[Path]:
    """Return the files in a directory whose names are pids; none if it cannot be read."""
    try:
        return [path for path in directory.iterdir() if path.name.isascii() and path.name.isdigit()]
    except OSError:
        return []


def write_whole(path: Path, text: str) -> None:
    """Write a file so that readers see the whole text or the old one. Never raises; logs a failure.

    If the disk takes no new file, the text is written into the old one, if that is as long.
    """
    try:
        make_private(path.parent)
        try:
            replace_file(path, text.encode())
        except OSError:
            if not _overwritten(path, text.encode()):
                raise
    except OSError as problem:
        logger.warning(
            "cannot write %s (%s): the launcher may not learn that this rank saves, or has ended", path, problem
        )


def _overwritten(path: Path, data: bytes) -> bool:
    """Write into a file that is exactly as long, which needs no space. Never raises; returns whether it was done."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return os.fstat(handle).st_size == len(data) and os.pwrite(handle, data, 0) == len(data)
        finally:
            os.close(handle)
    return False


def remove(path: Path) -> bool:
    """Remove a file if it exists. Never raises; returns whether there is none any more."""
    try:
        path.unlink(missing_ok=True)
    except OSError as problem:
        logger.debug("cannot remove %s: %s", path, problem)
        return False
    return True


def exists(pid: int) -> bool:
    """Return whether a process, of any user, has this pid."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it exists, but belongs to another user
        return True
    return True
