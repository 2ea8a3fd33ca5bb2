"""Makes the ``Hello`` of a rank and its timeouts from the settings."""

from __future__ import annotations

import os
import socket
import uuid

from ttp._version import __version__
from ttp.config import Config, RankEnv
from ttp.core import messages as m
from ttp.core.layout import Rank
from ttp.core.rank.events import RankTimeouts
from ttp.core.stripes import WHOLE
from ttp.launch.standby import own_address
from ttp.processor.rank_job import RankJob


def hello(job: RankJob, *, copies_at: str, pages_at: str, can_continue: bool) -> m.Hello:
    """Return the ``Hello`` of this process, before its first update: its identity, and how its state is to be saved.

    Args:
        job: the rank and its job.
        copies_at: host:port at which this rank receives second copies; empty: it receives none.
        pages_at: host:port at which this rank receives pages of other hosts; empty: it receives none.
        can_continue: this process can go on after the death of another rank.
    """
    config, env = job.config, job.env
    return m.Hello(
        rank=Rank(env.rank),
        protocol_major=m.PROTOCOL_MAJOR,
        protocol_minor=m.PROTOCOL_MINOR,
        ttp_version=__version__,
        run_id=env.run_id,
        launch=env.launch,
        incarnation=0,
        nonce=uuid.uuid4().hex,
        world_size=env.world_size,
        layout_digest=job.layout.digest,
        host=config.host or socket.gethostname(),
        pid=os.getpid(),
        local_rank=env.local_rank,
        save_dir=str(job.save_dir),
        framework=job.source.framework,
        keep=config.keep,
        address=own_address(config, env.master_addr),
        fallback_dir=config.fallback_dir or "",
        stripes=config.stripes if job.source.writes_parts else WHOLE,
        copies_at=copies_at,
        pages_at=pages_at,
        can_continue=can_continue,
    )


def timeouts(config: Config, env: RankEnv) -> RankTimeouts:
    """Return the timeouts of this rank, from the settings."""
    # The first rank of a host starts a missing controller at once; the others later, in turn.
    return RankTimeouts(
        heartbeat_s=config.heartbeat_s,
        rescue_s=config.rescue_patience_s,
        start_controller_after=3 * env.local_rank,
    )
