"""The messages between a rank and the launcher of its host while new processes replace lost ranks.

They are files, see ``ttp.launch.again``. A rank with a mark may be killed without a loss, because the job is saved and
the rank makes no update. When all live ranks of a host have a mark, the launcher starts only the dead ones again. When
one more fails, or the time limit has passed, it kills them and starts all ranks from the checkpoint.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ttp.config import RankEnv
from ttp.launch.again import Again, NextLaunch
from ttp.polling import poll
from ttp.wire.address import split

LOOK_S = 0.002


class Seat:
    """The mark of this process, and what the launcher wrote about the next launch.

    Args:
        run_dir: run directory of the job on this host.
    """

    def __init__(self, run_dir: Path) -> None:
        self._files, self._pid = Again(run_dir), os.getpid()
        self.gives_way = False
        """Whether this process has a mark."""

    def give_way(self, within_s: float) -> None:
        """Set the mark of this process. It has to begin an update within ``within_s`` seconds."""
        self.gives_way = True
        self._files.mark(self._pid, time.monotonic() + within_s)

    def take(self, env: RankEnv, within_s: float) -> None:
        """In a new process: wait until the launcher has released its launch to train, then set the mark.

        Until ``enter_launch`` the environment refers to the store of the surviving ranks: their default process group,
        if they keep it, stays in that store.

        Args:
            env: identity of this rank.
            within_s: time limit in seconds for this and everything until the first update.
        """
        deadline_s = time.monotonic() + within_s
        poll(lambda: not self._is_awaited(env), within_s, LOOK_S)
        following = self._files.next()
        if following is not None and following.kept:
            os.environ["MASTER_ADDR"], port = split(following.kept)
            os.environ["MASTER_PORT"] = str(port)
        self.give_way(deadline_s - time.monotonic())

    def _is_awaited(self, env: RankEnv) -> bool:
        following = self._files.next()
        return following is not None and (following.launch, following.released) == (env.launch, False)

    def enter_launch(self, store: str) -> None:
        """Set the environment variables of the launch of the new processes, from which process groups are made.

        Args:
            store: ``host:port`` of the store where all ranks meet; empty if this host's launcher has written it.
        """
        if store:
            address, port = split(store)
            os.environ.update(NextLaunch(0, (), address, port, released=True).as_environment())
        elif (following := self._files.next()) is not None and following.released:
            os.environ.update(following.as_environment())

    def keep(self) -> None:
        """Remove the mark, because this process begins an update or ends in order."""
        self.gives_way = False
        self._files.unmark(self._pid)
