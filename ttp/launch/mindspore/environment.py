"""The environment of scheduler and workers, and the settings that keep survivors alive while they save. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ttp.launch.mindspore.flags import Job

NODE_TIMEOUT = "MS_NODE_TIMEOUT"
"""Seconds after which the scheduler takes a node for dead; then every process ends itself with SIGTERM. Default 30."""

COLLECTIVE_TIMEOUT = "MS_CPU_COMM_OP_TIMEOUT"
"""Seconds that a collective on CPU waits for a peer before it raises. Default 30."""

NO_HEARTBEAT = "MS_DISABLE_HEARTBEAT"

MARGIN_S = 240
"""Seconds by which MindSpore's timeouts are longer than the rescue may take."""

SINGLE_THREADED = "OMP_NUM_THREADS"


def patience(environ: Mapping[str, str], rescue_s: float, local_size: int) -> tuple[dict[str, str], list[str]]:
    """Return variables that let survivors live until they have saved, and warnings for the user.

    Variables that the user has set stay as they are.

    Args:
        environ: the user's environment.
        rescue_s: seconds that ranks may take to save, ``TTP_OT``.
        local_size: workers on this host.
    """
    enough = str(math.ceil(rescue_s) + MARGIN_S)
    added: dict[str, str] = {}
    warnings = []
    for name, what in ((NODE_TIMEOUT, "end themselves"), (COLLECTIVE_TIMEOUT, "give up")):
        if name not in environ:
            added[name] = enough
        elif name == NODE_TIMEOUT and environ.get(NO_HEARTBEAT) == "1":
            continue  # no timeout applies then
        elif (seconds := _seconds(environ[name])) is None or seconds < rescue_s:
            warnings.append(
                f"{name}={environ[name]!r:.40} is shorter than TTP_OT={rescue_s:g}: after a failure the healthy ranks "
                f"would {what} before they have saved. Unset it, or set it to {enough}"
            )
    if SINGLE_THREADED not in environ and local_size > 1:
        added[SINGLE_THREADED] = "1"
    return added, warnings


def _seconds(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def common_environ(job: Job, scheduler: tuple[str, int]) -> dict[str, str]:
    """Return variables of scheduler and workers. ``scheduler``: its numeric address and its port."""
    shared = {
        "MS_WORKER_NUM": str(job.world_size),
        "MS_SCHED_HOST": scheduler[0],
        "MS_SCHED_PORT": str(scheduler[1]),
        "MS_TOPO_TIMEOUT": str(job.topology_s),
        "RANK_SIZE": str(job.world_size),
    }
    if job.rank_table:
        shared["RANK_TABLE_FILE"] = job.rank_table
    return shared


def scheduler_environ(job: Job, scheduler: tuple[str, int]) -> dict[str, str]:
    """Return further variables of the scheduler. It runs the user's script up to ``init()``, so ttp is off in it."""
    return {**common_environ(job, scheduler), "MS_ROLE": "MS_SCHED", "RANK_ID": "0", "TTP_PORT": ""}


def worker_environ(job: Job, scheduler: tuple[str, int], rank: int, run_id: str, launch: int) -> dict[str, str]:
    """Return further variables of the worker ``rank``, in MindSpore's names and in torchrun's."""
    local_rank = job.ranks.index(rank)
    return {
        **common_environ(job, scheduler),
        "MS_ROLE": "MS_WORKER",
        "MS_NODE_ID": str(rank),
        "RANK_ID": str(rank),
        "DEVICE_ID": str(job.devices[local_rank]),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.local_size),
        "GROUP_RANK": str(job.node_rank),
        "MASTER_ADDR": job.master_addr,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(launch),
    }
