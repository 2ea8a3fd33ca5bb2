"""Checks, at the start of a job, the constraints under which its last step can be saved."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, context, ops
from mindspore.communication import GlobalComm, get_group_size

from ttp.errors import ConfigError

SLICING = ("semi_auto_parallel", "auto_parallel")
"""Parallel modes in which the compilation of the network cuts its parameters into slices."""

SHARD_SIZE = 2
"""The only ``optimizer_weight_shard_size`` with which every part of the optimizer's state keeps a replica."""


def parallel_mode() -> str:
    """Return ``stand_alone``, ``data_parallel``, ``hybrid_parallel``, ``semi_auto_parallel`` or ``auto_parallel``."""
    return str(context.get_auto_parallel_context("parallel_mode"))


def world_size() -> int:
    """Return MindSpore's number of ranks of this job; 1 before ``init()``."""
    return int(get_group_size()) if GlobalComm.INITED else 1


def gather(record: bytes) -> list[bytes]:
    """Return the records of all ranks, in the order of the ranks.

    A collective call: all ranks make it, with records of the same length.
    """
    mine = Tensor(np.frombuffer(record, np.uint8).astype(np.float32))  # every device's collectives take float32
    found = ops.AllGather()(mine).asnumpy().reshape(world_size(), -1)
    return [row.astype(np.uint8).tobytes() for row in found]


def check_world(ranks: int) -> None:
    """Check that several ranks train one model.

    Args:
        ranks: number of ranks that the launcher started.

    Raises:
        ConfigError: there is one rank, ``init()`` was not called, MindSpore and the launcher disagree on the number of
            ranks, or the parallel mode is ``stand_alone``.
    """
    if ranks < 2 and world_size() < 2:
        raise ConfigError(
            "the power-off checkpoint needs a data parallelism of at least 2: with one rank, no other rank holds a "
            "copy of its state. Start the job with two or more workers, or without TFTRegister"
        )
    if not GlobalComm.INITED:
        raise ConfigError(
            "mindspore.communication.init() was not called: call it before Model.train, and set "
            "parallel_mode=ParallelMode.DATA_PARALLEL, so that the ranks train one model"
        )
    if world_size() != ranks:
        raise ConfigError(
            f"the launcher started {ranks} ranks, and MindSpore has {world_size()}: let one launcher start the job"
        )
    if parallel_mode() == "stand_alone":
        raise ConfigError(
            "parallel_mode is stand_alone: each rank trains a model of its own, and no rank holds a copy of another's. "
            "Call set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL) (or another parallel mode), also "
            "if the program's own loop sums the gradients"
        )


def check_sink(sink_size: int | None) -> None:
    """Check that there is a callback after every step.

    Args:
        sink_size: steps between two callbacks; None: one step.

    Raises:
        ConfigError: several steps are made between two callbacks.
    """
    if sink_size is not None and sink_size > 1:
        raise ConfigError(
            f"sink_size is {sink_size}: only sink_size=1 tells ttp after each step which step was the last. Call "
            "Model.train(..., dataset_sink_mode=False), or Model.train(..., sink_size=1)"
        )


def check_optimizer_parallel() -> None:
    """Check that optimizer parallelism, if it is on, leaves replicas.

    Raises:
        ConfigError: some parts of the optimizer's state have no replica: in ``data_parallel``, or because
            ``optimizer_weight_shard_size`` is not 2.
    """
    if not context.get_auto_parallel_context("enable_parallel_optimizer"):
        return
    if parallel_mode() == "data_parallel":  # MindSpore ignores optimizer_weight_shard_size there
        raise ConfigError(
            "optimizer parallelism is on, and parallel_mode is data_parallel: each rank updates parameters of its own "
            "and sends them to the others, so no other rank has their moments. Call "
            "set_auto_parallel_context(enable_parallel_optimizer=False), or use semi_auto_parallel with "
            f"parallel_optimizer_config={{'optimizer_weight_shard_size': {SHARD_SIZE}}}"
        )
    size = _shard_size()
    if size != SHARD_SIZE:
        raise ConfigError(
            f"optimizer parallelism is on with optimizer_weight_shard_size={size}: parts of the optimizer's state "
            "would have no replica. Call set_auto_parallel_context(enable_parallel_optimizer=True, "
            f"parallel_optimizer_config={{'optimizer_weight_shard_size': {SHARD_SIZE}}})"
        )


def _shard_size() -> Any:
    try:
        return context.get_auto_parallel_context("optimizer_weight_shard_size")
    except ValueError:
        return None
