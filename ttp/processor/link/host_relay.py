"""Decides whether a rank uses the relay of its host. The first rank of a host without a launcher starts one."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ttp.config import Config, RankEnv
from ttp.launch.relay import RELAYED, RelayServer, port_of_relay, wanted
from ttp.processor.liveness.forks import close_sockets_of_in_children

log = logging.getLogger("ttp.processor")

COMES_S = 2.0
"""How long a rank waits for the relay of its host when it joins; afterwards it asks the controller itself."""
LOOK_S = 0.02


class Shortcut:
    """See the module.

    Args:
        config: the job's settings.
        env: who this rank is.
        run_dir: where processes of this host leave files for one another.
    """

    def __init__(self, config: Config, env: RankEnv, run_dir: Path) -> None:
        self._config, self._env, self._run_dir = config, env, run_dir
        self._wanted = wanted(config, env.world_size)
        self._waited = False
        self._gone: set[int] = set()
        self._own: RelayServer | None = None

    def port(self) -> int | None:
        """The relay's port on loopback; None: there is none, or none that can be trusted any more."""
        if not self._wanted:
            return None
        found = port_of_relay(self._config, self._run_dir)
        if found is None and not self._waited:
            found = self._start() if self._env.local_rank == 0 else self._await()
        self._waited = True
        return None if found in self._gone else found

    def ended(self, port: int, reason: str) -> None:
        """A stream through the relay at ``port`` has ended: by the relay's own end, or by what is behind it."""
        if RELAYED not in reason and not reason.startswith("the controller"):
            log.warning("the relay of this host does not answer any more (%s): connecting without it", reason)
            self._gone.add(port)

    def close(self) -> None:
        """This rank leaves; those that went through it connect by themselves."""
        if self._own is not None:
            self._own.close()

    def _start(self) -> int | None:
        try:
            self._own = RelayServer(self._config, self._run_dir, close_sockets_of_in_children)
        except Exception as problem:
            log.warning("this host has no relay, its ranks connect by themselves: %s", problem)
            return None
        return self._own.port

    def _await(self) -> int | None:
        until = time.monotonic() + COMES_S
        while (found := port_of_relay(self._config, self._run_dir)) is None and time.monotonic() < until:
            time.sleep(LOOK_S)
        return found
