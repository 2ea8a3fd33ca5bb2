"""Entry point ``torchrun.handlers``: makes stock torchrun let healthy ranks save.

Torch loads this entry point in the agent and not in workers. It does nothing unless ``TTP_PORT`` is set. Torch calls it
while ``torch.distributed.launcher.api`` is half imported, so the agent is replaced later: when torch creates the
rendezvous handler, just before it makes the agent.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("ttp.launch")


def handler() -> Callable[..., Any]:
    """Arrange that torch's agent is replaced by ttp's; torch calls this at start.

    Returns:
        A creator of a rendezvous backend, as torch expects of this entry point. It raises: ttp is no such backend.
    """
    if os.environ.get("TTP_PORT"):
        try:
            _wrap_registry()
        except Exception as problem:
            _stay_stock(problem)
    return _no_backend


def _wrap_registry() -> None:
    from torch.distributed.elastic.rendezvous import api

    registry: Any = api.rendezvous_handler_registry
    create = registry.create_handler
    if getattr(create, "of_ttp", False):
        return

    def create_handler(*args: Any, **kwargs: Any) -> Any:
        try:
            _replace_agent()
        except Exception as problem:
            _stay_stock(problem)
        return create(*args, **kwargs)

    create_handler.of_ttp = True  # type: ignore[attr-defined]
    registry.create_handler = create_handler


def _replace_agent() -> None:
    """Replace torch's agent by ttp's, unless it has been replaced already."""
    from ttp.config import Config
    from ttp.launch.install import agent_maker, replaceable
    from ttp.launch.torch_compat import differences

    launcher_api: Any = sys.modules.get("torch.distributed.launcher.api")
    if launcher_api is None or not replaceable(launcher_api):
        return
    unknown = differences()
    if unknown:
        raise RuntimeError(f"ttp does not know this version of torch, which lacks: {'; '.join(unknown)}")
    launcher_api.LocalElasticAgent = agent_maker(Config.from_env())


def _stay_stock(problem: Exception) -> None:
    logger.warning("ttp could not extend torchrun, which may now stop ranks while they save: %s", problem)


def _no_backend(*_: Any, **__: Any) -> Any:
    raise ValueError("ttp is not a rendezvous backend; choose another --rdzv-backend (ttp works with any)")
