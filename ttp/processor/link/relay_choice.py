"""Decides whether a rank goes through the relay of its host.

Without ttp's launcher, the first rank of a host starts the relay.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from ttp.config import Config, RankEnv
from ttp.launch.admission import ranks_here
from ttp.launch.proc_files import stat_of
from ttp.launch.relay_file import RELAYED, relay_of, wanted
from ttp.polling import poll
from ttp.processor.liveness.forks import close_in_children

if TYPE_CHECKING:
    from ttp.launch.relay import RelayServer

log = logging.getLogger("ttp.processor")

COMES_S = 2.0
"""Seconds that a rank waits for the relay of its host when it joins; then it connects to the controller directly."""
LOOK_S = 0.02
STILL_BEATS = 2
"""Number of heartbeats in a row that find the relay stopped after which the rank leaves the relay."""


class RelayChoice:
    """Decides whether this rank goes through the relay of its host.

    Args:
        config: the job's settings.
        env: identity of this rank.
    """

    def __init__(self, config: Config, env: RankEnv) -> None:
        self._config, self._env, self._run_dir = config, env, config.resolved_run_dir()
        self._wanted = wanted(config, env.world_size, ranks_here(os.environ))
        self._waited = False
        self._gone: set[int] = set()
        self._pid = 0
        self._still = 0
        self._own: RelayServer | None = None

    def port(self) -> int | None:
        """Return the relay's port on loopback; None: there is no relay, or it is not trusted any more."""
        if not self._wanted:
            return None
        found = relay_of(self._config, self._run_dir)
        if found is None and not self._waited:
            found = self._start() if self._env.local_rank == 0 else self._await()
        self._waited = True
        if found is None or found[0] in self._gone:
            return None
        self._pid, self._still = found[1], 0
        return found[0]

    def stands_still(self) -> bool:
        """Return True once, when ``STILL_BEATS`` calls in a row have found the relay's process stopped (SIGSTOP).

        Called at every heartbeat. The kernel keeps the streams of a stopped process alive, so that they end much later.
        A relay that is only slow does not count.
        """
        try:
            state = stat_of(self._pid)[0]
        except OSError:
            return False  # it is gone, and its streams will end; or this system has no /proc
        self._still = self._still + 1 if state in "tT" else 0
        return self._still == STILL_BEATS

    def ended(self, port: int, reason: str) -> None:
        """Note that a stream through the relay has ended. If the relay itself failed, it is not used again."""
        if RELAYED not in reason and not reason.startswith("the controller"):
            log.warning(
                "the relay of this host has stopped answering (%s): connecting to the controller directly", reason
            )
            self._gone.add(port)

    def close(self) -> None:
        """Close the relay if this rank runs it. Ranks that used it connect to the controller directly."""
        if self._own is not None:
            self._own.close()

    def _start(self) -> tuple[int, int] | None:
        from ttp.launch.relay import RelayServer  # when this rank joins, and few ranks run a relay

        try:
            self._own = RelayServer(self._config, self._run_dir, close_in_children)
        except Exception as problem:
            log.warning("this host has no relay, its ranks connect to the controller directly: %s", problem)
            return None
        return self._own.port, os.getpid()

    def _await(self) -> tuple[int, int] | None:
        return poll(lambda: relay_of(self._config, self._run_dir), COMES_S, LOOK_S)
