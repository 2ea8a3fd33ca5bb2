"""Starts ranks that move to a host that stands by, while the other ranks train; see ``ttp.mindio.protocol.switching``.

Only programs that register handlers of their own can be moved, under ``ttp run --mindio``. The launcher that stands by
offers its host to the controller once a second. When an operator drains another host, the controller answers with the
ranks to start here. The launcher watches them, as torch's agent watches its workers, until they have ended. If the job
has to be started again, the launcher takes the drained host's place in the rendezvous, like any host that stands by.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from subprocess import Popen
from typing import Any

import grpc
from torch.distributed.elastic.utils.api import macros

from ttp.config import MINDIO_SWITCH, Config
from ttp.errors import ConfigError
from ttp.launch.host import Host
from ttp.launch.presence import CHANNEL_OPTIONS
from ttp.launch.rendezvous import serve_store
from ttp.launch.standby import own_address
from ttp.launch.warm.torch_workers import forking, start_worker
from ttp.launch.worker_stops import GRACE_S
from ttp.wire.address import target
from ttp.wire.channel import metadata, open_channel

logger = logging.getLogger("ttp.launch")

ANSWER_S = 1.0
"""Seconds that the controller may take to answer an offer; also the seconds between two offers."""
LOOK_S = 0.5


class MovedRanks:
    """Starts and watches ranks that move to this host. A launcher that stands by has one object.

    Args:
        spec: torch's worker spec.
        host: ttp's services for this host.
    """

    def __init__(self, spec: Any, host: Host) -> None:
        self._spec, self._host = spec, host
        self._store: Any = None  # kept, because the server ends with its last reference

    def look(self, job: Config, address: str) -> None:
        """Offer this host to the controller. Start the ranks that move here, if any, and return when they have ended.

        Args:
            job: the job's settings, as the launchers have agreed on them.
            address: address of the job's first node.
        """
        ranks, world_size = self._offer(job, address)
        if not ranks:
            return
        logger.warning("ranks %s are moved to this host", ", ".join(map(str, ranks)))
        self._host.use(job)
        self._host.before_workers(address, first_node=False, world_size=world_size, here=len(ranks))
        workers: dict[int, Popen[Any]] = {}
        try:
            with forking(self._host.warm):
                for local_rank, rank in enumerate(ranks):
                    workers[rank] = self._start(rank, local_rank, ranks, world_size, job)
            self._host.watch(workers)
            self._look_after(workers, lambda: self._offer(job, address))
        finally:
            self._host.stops.expect(workers)
            for worker in workers.values():
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
            self._store = None

    def _offer(self, job: Config, address: str) -> tuple[Sequence[int], int]:
        """Offer this host to the controller. Returns the ranks to start (empty: none) and the job's world size."""
        from ttp.wire.v1.rounds_pb2 import PlaceOffered
        from ttp.wire.v1.rounds_pb2_grpc import ManagerStub

        if self._store is None:
            self._store = serve_store("127.0.0.1")
        own = target(own_address(job, address), self._store.port)
        offered = PlaceOffered(host=job.host or socket.gethostname(), store=own)
        try:
            with open_channel(address, job.port or 0, CHANNEL_OPTIONS) as channel:
                taken = ManagerStub(channel).Offer(offered, timeout=ANSWER_S, metadata=metadata(job.token))
        except (grpc.RpcError, ConfigError) as problem:  # also while the files of a certificate are being renewed
            logger.debug("cannot offer this host to the controller: %s", problem)
            return (), 0
        return list(taken.ranks), int(taken.world_size)

    def _start(self, rank: int, local_rank: int, ranks: Sequence[int], world_size: int, job: Config) -> Any:
        """Start the process of one rank in the environment that torch's agent would give it, and return it."""
        variables: dict[str, Any] = {
            "RANK": rank,
            "ROLE_RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": world_size,
            "ROLE_WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": len(ranks),
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "ROLE_NAME": self._spec.role,
            "MASTER_ADDR": own_address(job, "127.0.0.1"),
            "MASTER_PORT": self._store.port,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": self._spec.max_restarts,
            "TORCHELASTIC_RUN_ID": self._spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TTP_TOKEN": job.token,
        }
        args = tuple(str(each) for each in macros.substitute(list(self._spec.args), str(local_rank)))
        environ = {name: str(value) for name, value in variables.items()}
        return start_worker(str(self._spec.entrypoint), args, environ, local_rank).proc

    def _look_after(self, workers: dict[int, Popen[Any]], offer: Callable[[], object]) -> None:
        """Wait until all workers have ended. If one fails, the others may save before they are stopped."""
        offered = time.monotonic()
        while any(worker.poll() is None for worker in workers.values()):
            self._host.wait_for_a_death(LOOK_S)
            if any(worker.poll() not in (None, 0) for worker in workers.values()):
                self._host.stops.hold(workers)
                self._host.stops.expect(workers)
                self._host.stops.stop(workers, signal.SIGTERM, GRACE_S)
                break
            # The offer may still be needed: this launcher does not know whether the ranks have taken their seats.
            if time.monotonic() > offered + ANSWER_S:
                offer()
                offered = time.monotonic()
        codes = {rank: worker.poll() for rank, worker in workers.items()}
        logger.info("ranks that were moved to this host have ended: %s", codes)


def job_address(store: Any) -> str:
    """Return the first node's address, which its launcher writes to the rendezvous store; empty: not yet written."""
    return str(store.get("MASTER_ADDR").decode()) if store.check(["MASTER_ADDR"]) else ""


def may_move() -> bool:
    """Return whether the ranks of this job may have handlers of their own (``--mindio``), so that they can be moved."""
    return os.environ.get(MINDIO_SWITCH, "") not in ("", "0", "off")
