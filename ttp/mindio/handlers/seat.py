"""What a rank and the launcher of its host tell each other while new processes take the seats of lost ranks.

The files are those of ``ttp.launch.again``: a rank with a mark has nothing to lose, as the job is saved and it makes no
update. When all live ranks of a host have a mark, the launcher starts the dead ones alone. When one more fails, or the
time is over, it kills them and starts all ranks from the checkpoint.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ttp.config import RankEnv
from ttp.launch.again import Again, NextLaunch
from ttp.wire.address import split

LOOK_S = 0.002


class Seat:
    """The seat of this process.

    Args:
        run_dir: run directory of the job on this host.
    """

    def __init__(self, run_dir: Path) -> None:
        self._files, self._pid = Again(run_dir), os.getpid()
        self.gives_way = False
        """True while this process has a mark."""

    def give_way(self, within_s: float) -> None:
        """Tell the launcher that this process has nothing to lose, for up to ``within_s`` seconds, until its update."""
        self.gives_way = True
        self._files.mark(self._pid, time.monotonic() + within_s)

    def take(self, env: RankEnv, within_s: float) -> None:
        """Wait as a new process until the launcher that started it knows its seat as taken, then make way.

        Args:
            env: identity of this rank.
            within_s: seconds that this, and everything until the first update, may take.
        """
        deadline_s = time.monotonic() + within_s
        while self._is_awaited(env) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        self.give_way(deadline_s - time.monotonic())

    def _is_awaited(self, env: RankEnv) -> bool:
        told = self._files.next()
        return told is not None and (told.launch, told.released) == (env.launch, False)

    def enter_launch(self, store: str) -> None:
        """Become a rank of the launch of the new processes, for code that makes process groups from the environment.

        Args:
            store: ``host:port`` of the store where all ranks meet; empty: this host's launcher has named it.
        """
        if store:
            address, port = split(store)
            os.environ.update(NextLaunch(0, (), address, port, released=True).as_environment())
        elif (told := self._files.next()) is not None and told.released:
            os.environ.update(told.as_environment())

    def keep(self) -> None:
        """Tell the launcher that this process has something to lose again: it begins an update, or ends in order."""
        self.gives_way = False
        self._files.unmark(self._pid)
