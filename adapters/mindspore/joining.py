"""Registers a training once, from ``restore`` or from the callback at the beginning of ``Model.train``."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspore import nn

from ttp import api, session
from ttp.adapters.mindspore.adapter import MindSporeAdapter
from ttp.adapters.mindspore.layouts import RankGroups
from ttp.errors import ConfigError, UsageError
from ttp.launch.log_format import configure_logging
from ttp.launch.presence import is_local
from ttp.launch.rank_names import in_torchruns_names

log = logging.getLogger("ttp.adapters.mindspore")


def meet_at(address: str, port: int, rank: int | None = None) -> None:
    """Set the controller's address and port to those of the program, unless the launcher has set ``TTP_PORT``.

    Args:
        address: address of the controller's host; empty: the program does not give it.
        port: port of the controller.
        rank: a worker on that host; None: the program does not give it.

    Raises:
        ConfigError: ``rank`` is on another host, or no rank of the job.
    """
    current = session.current()
    if current.config.port is None:
        # The first worker on that host that joins starts the controller; the others find it running.
        os.environ["MASTER_ADDR"] = _home(address, rank)
        current.config = replace(current.config, port=port)
        configure_logging(current.config)
    elif current.config.port != port:
        log.info("the controller listens on port %d (TTP_PORT), not on %d (program)", current.config.port, port)


def _home(address: str, rank: int | None) -> str:
    """Return the address that the program gives. For a loopback address, return the launcher's ``MASTER_ADDR``."""
    try:
        environ = in_torchruns_names(os.environ)
    except ConfigError:  # reported later, where the rank is needed
        environ = dict(os.environ)
    if rank is not None and environ.get("WORLD_SIZE", "").isdecimal() and rank >= int(environ["WORLD_SIZE"]):
        workers = environ["WORLD_SIZE"]
        raise ConfigError(f"ctrl_rank_id={rank} is no rank: the job has {workers} workers, counted from 0")
    if not address or address == "localhost" or address.startswith("127.") or address == "::1":
        return environ.get("MASTER_ADDR") or address or "127.0.0.1"
    if rank is not None and environ.get("RANK") == str(rank) and not is_local(address):
        raise ConfigError(
            f"ctrl_rank_id={rank} is this worker, and ctrl_ip={address!r:.100} is no address of this host: the "
            "controller would run nowhere. Give the address of this worker's host as ctrl_ip"
        )
    return address


def optimizer_of(optimizer: Any, network: Any) -> Any:
    """Return the optimizer of a ``Model``, or of its network if the network is a training step with an optimizer.

    Raises:
        UsageError: there is none, or it is of a kind that cannot be protected.
    """
    optimizer = optimizer or getattr(network, "optimizer", None)
    if optimizer is None:
        raise UsageError(
            "Model has no optimizer: give it one, Model(network, optimizer=OptTTPWrapper(optimizer)). In a training "
            "step of your own the wrapped optimizer has to be the attribute `optimizer` of the cell"
        )
    if not isinstance(optimizer, nn.Optimizer):
        raise UsageError(
            f"the optimizer is a {type(optimizer).__qualname__}: only optimizers derived from mindspore.nn.Optimizer "
            "can be protected"
        )
    return optimizer


def join(
    network: Any,
    optimizer: Any,
    save_dir: str | Path,
    *,
    replicas: RankGroups | None = None,
    strategy: str | Path | None = None,
    compiled: Mapping[str, Any] | None = None,
) -> MindSporeAdapter:
    """Return the adapter of this process. The first call makes and registers it, and joins the job if ttp is on.

    Args:
        network: see ``MindSporeAdapter``.
        optimizer: the wrapped optimizer.
        save_dir: directory of checkpoints.
        replicas: see ``layout_of``.
        strategy: see ``layout_of``.
        compiled: the ``parameter_layout_dict`` of the compiled network; see ``layout_of``.

    Raises:
        UsageError: the optimizer is not wrapped, or another training is registered.
        ConfigError, RefusedError: see ``ttp.wrap_optimizer``.
    """
    current = session.current()
    known = current.adapter
    if known is None:
        adapter = MindSporeAdapter(network, optimizer, replicas=replicas, strategy=strategy, compiled=compiled)
        api.register(adapter, save_dir)
        return adapter
    if not isinstance(known, MindSporeAdapter) or known.optimizer is not optimizer:
        raise UsageError(
            "another optimizer is protected in this process already: ttp protects one training at a time in a process"
        )
    known.says(replicas, strategy)
    if current.enabled and current.processor is None:
        current.join()
    return known
