"""Registers a training once, whoever comes first: ``restore``, or the callback at the beginning of ``Model.train``."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttp import api, session
from ttp.adapters.mindspore.adapter import MindSporeAdapter
from ttp.adapters.mindspore.layouts import Groups
from ttp.errors import UsageError

log = logging.getLogger("ttp.adapters.mindspore")


def meet_at(address: str, port: int) -> None:
    """Where the controller listens, as the program says it. What the launcher has said (``TTP_PORT``) stays."""
    current = session.current()
    if current.config.port is None:
        current.config = replace(current.config, port=port)
        session.configure_logging(current.config)
        os.environ.setdefault("MASTER_ADDR", address)
    elif current.config.port != port:
        log.info("the controller listens on port %d (TTP_PORT), not on %d", current.config.port, port)


def join(
    network: Any,
    optimizer: Any,
    save_dir: str | Path,
    *,
    replicas: Groups | None = None,
    strategy: str | Path | None = None,
) -> MindSporeAdapter:
    """The adapter of this process, made and registered on the first call; joins the job where ttp is switched on.

    Raises:
        UsageError: the optimizer is not wrapped, or another training is registered.
        ConfigError, RefusedError: see ``ttp.wrap_optimizer``.
    """
    current = session.current()
    known = current.adapter
    if known is None:
        adapter = MindSporeAdapter(network, optimizer, replicas=replicas, strategy=strategy)
        api.register(adapter, save_dir)
        return adapter
    if not isinstance(known, MindSporeAdapter) or known.optimizer is not optimizer:
        raise UsageError("another optimizer is protected in this process already: one training at a time")
    known.says(replicas, strategy)
    if current.enabled and current.processor is None:
        current.join()
    return known
