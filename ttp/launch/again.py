"""Files in the run directory by which a launcher and its ranks agree on a restart that keeps living processes.

After a failure with ``TTP_CONTINUITY=keep``, surviving ranks go on: they call the training function again in the same
process. Only dead ranks are started anew; such a rank takes the *seat* of the dead one.

    run_dir/again/<pid>   this process was released to go on, or was started to take a seat. It may be killed without
                          loss until it begins an update. Contents: its deadline (``time.monotonic()`` of this host),
                          and the number of the launch that it goes on to.
    run_dir/again/next    the next launch: its number, the ranks that are started for it, where its ranks meet
    run_dir/again/launchers/<pid>   this launcher starts dead ranks alone. Contents: what tells it from other processes
                          with this pid. Only ranks that it has started itself may go on: it knows no others by pid.

As for leases, nothing here raises. If a file cannot be written, all ranks are started anew.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ttp.launch.leases import entries, exists, remove, write_whole
from ttp.launch.proc_files import identity

NEXT = "next"


@dataclass(frozen=True, slots=True)
class NextLaunch:
    """What the launcher tells ranks that go on, and ranks that it starts in place of dead ones.

    Args:
        launch: number of the launch, as torchelastic counts them (``TORCHELASTIC_RESTART_COUNT``).
        seats: ranks that are started.
        address: host of a new ``TCPStore`` where the ranks of this launch meet.
        port: port of that store.
        released: True: the surviving ranks go on; False: they still save, and the started ranks wait for them.
        kept: ``host:port`` of the store where the surviving ranks have met; empty if it is not known.
    """

    launch: int
    seats: tuple[int, ...]
    address: str
    port: int
    released: bool
    kept: str = ""

    def as_environment(self) -> dict[str, str]:
        """Return the variables for torch, in a process that goes on or is started."""
        return {
            "TORCHELASTIC_RESTART_COUNT": str(self.launch),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


class Again:
    """Reads and writes these files. Any process of the job may make its own instance.

    Args:
        run_dir: run directory of the job on this host.
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory = Path(run_dir) / "again"
        self._launchers = self._directory / "launchers"

    def serve(self, launcher: int) -> None:
        """Announce the launcher with this pid, which starts dead ranks alone. Call it before it starts any rank."""
        write_whole(self._launchers / str(launcher), json.dumps(identity(launcher)))

    def is_served_by(self, pid: int) -> bool:
        """Return whether this process is a launcher that has announced itself."""
        try:
            return bool(json.loads((self._launchers / str(pid)).read_text()) == identity(pid))
        except (OSError, ValueError):
            return False

    def mark(self, pid: int, deadline_s: float, launch: int = 0) -> None:
        """Mark a process that goes on to ``launch`` (0: the next) by ``deadline_s`` of ``time.monotonic()``."""
        write_whole(self._directory / str(pid), f"{float(deadline_s)!r} {launch}")

    def unmark(self, pid: int) -> bool:
        """Remove the mark of a process that is about to begin an update: killing it now would lose that update.

        Returns:
            False if it has the mark still, so that its launcher may kill it.
        """
        return remove(self._directory / str(pid))

    def marks(self, launch: int | None = None) -> dict[int, float]:
        """Return the deadlines of marked processes by pid. Some of the processes may be dead.

        Args:
            launch: return only processes that go on to this launch; None: all.
        """
        found = {}
        for path in entries(self._directory):
            with contextlib.suppress(OSError, ValueError):
                deadline_s, its_launch = path.read_text().split()
                if launch is None or int(its_launch) in (0, launch):
                    found[int(path.name)] = float(deadline_s)
        return found

    def announce(self, next_launch: NextLaunch) -> None:
        """Write ``next``: tell the ranks about the next launch."""
        write_whole(self._directory / NEXT, json.dumps(asdict(next_launch)))

    def next(self) -> NextLaunch | None:
        """Return the launch that was announced last; None: no launch was announced, or the file cannot be read."""
        try:
            record = json.loads((self._directory / NEXT).read_text())
            place = str(record["address"]), int(record["port"])
            released, kept = record["released"] is True, str(record["kept"])
            return NextLaunch(int(record["launch"]), tuple(record["seats"]), *place, released=released, kept=kept)
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def clear(self) -> None:
        """Remove all files of this launcher, whose process calls it: all ranks are started anew."""
        for path in (*entries(self._directory), self._directory / NEXT):
            remove(path)
        for path in entries(self._launchers):
            if (pid := int(path.name)) == os.getpid() or not exists(pid):
                remove(path)
