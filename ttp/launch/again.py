"""Files in the run directory by which ranks that go on in their processes and their launcher inform each other.

    run_dir/again/<pid>   this process was released to go on, or started to take a seat: it has nothing to lose until
                          it begins an update. Contents: its deadline (``time.monotonic()`` of this host), and the
                          number of the launch that it goes on to.
    run_dir/again/next    the next launch: its number, the ranks that are started for it, where its ranks meet

As for leases, nothing here raises: if a file cannot be written the job is started anew, as it would be without it.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ttp.launch.leases import entries, remove, write_whole

NEXT = "next"


@dataclass(frozen=True, slots=True)
class NextLaunch:
    """What the launcher tells ranks that go on, and ranks that it starts beside them.

    Args:
        launch: number of the launch, as torchelastic counts them.
        seats: ranks that are started.
        address: host of an unused store.
        port: port of that store.
        released: the others go on; False: they still save, and the started ranks wait already.
    """

    launch: int
    seats: tuple[int, ...]
    address: str
    port: int
    released: bool

    def as_environment(self) -> dict[str, str]:
        """Return the variables for torch, in a process that goes on or is started."""
        return {
            "TORCHELASTIC_RESTART_COUNT": str(self.launch),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


class Again:
    """Access to the files. Any process of the job may make its own instance.

    Args:
        run_dir: run directory of the job on this host.
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory = Path(run_dir) / "again"

    def mark(self, pid: int, deadline_s: float, launch: int = 0) -> None:
        """Mark a process that goes on to ``launch`` (0: the next) by ``deadline_s`` of ``time.monotonic()``."""
        write_whole(self._directory / str(pid), f"{float(deadline_s)!r} {launch}")

    def unmark(self, pid: int) -> None:
        """Remove the mark of a process: it is about to make an update, so it has something to lose."""
        remove(self._directory / str(pid))

    def marks(self, launch: int | None = None) -> dict[int, float]:
        """Return deadlines by process; some may be dead. ``launch``: only of those that go on to it; None: of all."""
        found = {}
        for path in entries(self._directory):
            with contextlib.suppress(OSError, ValueError):
                deadline_s, its_launch = path.read_text().split()
                if launch is None or int(its_launch) in (0, launch):
                    found[int(path.name)] = float(deadline_s)
        return found

    def announce(self, next_launch: NextLaunch) -> None:
        """Tell the ranks about the next launch."""
        write_whole(self._directory / NEXT, json.dumps(asdict(next_launch)))

    def next(self) -> NextLaunch | None:
        """Return what the launcher has announced last; None: nothing."""
        try:
            said = json.loads((self._directory / NEXT).read_text())
            place = str(said["address"]), int(said["port"])
            return NextLaunch(int(said["launch"]), tuple(said["seats"]), *place, released=said["released"] is True)
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def clear(self) -> None:
        """Remove all files: all ranks are started anew."""
        for path in (*entries(self._directory), self._directory / NEXT):
            remove(path)
