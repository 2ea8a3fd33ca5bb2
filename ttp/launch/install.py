"""Makes torch's launcher use ttp's agent, for ``ttp run`` and for the plug-in of stock torchrun."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ttp.config import Config
from ttp.launch import nccl
from ttp.launch.host import Host
from ttp.launch.run_dir import prepare_run_dir
from ttp.launch.shared_token import SharedToken

logger = logging.getLogger("ttp.launch")


def agent_maker(
    config: Config, made: Callable[[Any], None] = lambda agent: None, *, stand_by: bool = False
) -> Callable[..., Any]:
    """Return a function that torch's launcher calls in place of ``LocalElasticAgent`` to make its agent.

    Also sets the environment variables that workers and torch's rendezvous read, in this process.

    Args:
        config: settings; ``config.port`` is set.
        made: called with each agent that is made.
        stand_by: see ``TtpAgent``.

    Raises:
        ConfigError: the run directory cannot be used.
    """
    from ttp.launch.agent import TtpAgent

    run_dir = prepare_run_dir(config.resolved_run_dir())
    os.environ["TTP_RUN_DIR"] = str(run_dir)
    # Otherwise a restarted gloo job finds the addresses of its dead predecessor in the store that the rendezvous shares
    # with the workers, and hangs or fails.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.update(nccl.settings(os.environ, config))

    def make(*args: Any, **kwargs: Any) -> TtpAgent:
        agent = TtpAgent(*args, host=Host(config, run_dir), token=SharedToken(config), stand_by=stand_by, **kwargs)
        made(agent)
        return agent

    make.of_ttp = True  # type: ignore[attr-defined]
    return make


def replaceable(launcher_api: Any) -> bool:
    """Return whether torch's launcher still makes torch's own agent. Warns if another package has replaced it."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    current = launcher_api.LocalElasticAgent
    if current is LocalElasticAgent:
        return True
    if not getattr(current, "of_ttp", False):
        logger.warning(
            "another package has replaced torch's agent by %r: ranks may be stopped while they save", current
        )
    return False


@contextmanager
def installed(maker: Callable[..., Any]) -> Iterator[None]:
    """Let torch's launcher make its agents with ``maker`` while the block runs."""
    from torch.distributed.launcher import api

    launcher_api: Any = api
    stock = launcher_api.LocalElasticAgent
    launcher_api.LocalElasticAgent = maker
    try:
        yield
    finally:
        launcher_api.LocalElasticAgent = stock
