"""Translates the environment variables of msrun and mpirun, and rank tables, into torchrun's variables."""

from __future__ import annotations

from collections.abc import Mapping

from ttp.errors import ConfigError
from ttp.launch.rank_table import RankTable, read_rank_table


def in_torchruns_names(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``MASTER_ADDR``, as far as they are known.

    A MindSpore worker (``MS_ROLE``) has the rank that MindSpore gives it; the pod's own ``RANK`` is ignored. Otherwise
    the first of these sources counts: ``RANK``, Open MPI's variables, ``RANK_ID`` with ``RANK_TABLE_FILE`` or
    ``RANK_SIZE``. For a process without a launcher nothing is added.

    Raises:
        ConfigError: the process is MindSpore's scheduler, or its rank is not known yet; or the rank table is wrong.
    """
    role = environ.get("MS_ROLE")
    if role == "MS_SCHED":
        raise ConfigError(
            "this process is MindSpore's scheduler (MS_ROLE=MS_SCHED), which is not a rank: call "
            "mindspore.communication.init() before ttp; in the scheduler it does not return before the job is over"
        )
    if role == "MS_WORKER":
        return _of_mindspore(environ)
    if "RANK" in environ:
        return dict(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _of_open_mpi(environ)
    if "RANK_ID" in environ:
        return _of_rank_id(environ)
    return dict(environ)


def _of_mindspore(environ: Mapping[str, str]) -> dict[str, str]:
    if "MS_NODE_ID" not in environ:
        raise ConfigError(
            "MindSpore has not chosen the rank of this process yet: give msrun --node_rank on every host, or start the "
            "job with `ttp run --mindspore`"
        )
    told = {"RANK": environ["MS_NODE_ID"], "WORLD_SIZE": environ.get("MS_WORKER_NUM", "")}
    defaults = _given(LOCAL_RANK=environ.get("DEVICE_ID"), MASTER_ADDR=environ.get("MS_SCHED_HOST"))
    return {**defaults, **environ, **told}


def _of_open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    size = environ.get("OMPI_COMM_WORLD_SIZE")
    alone = size is not None and environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size
    told = _given(
        RANK=environ["OMPI_COMM_WORLD_RANK"],
        WORLD_SIZE=size,
        LOCAL_RANK=environ.get("OMPI_COMM_WORLD_LOCAL_RANK"),
        MASTER_ADDR="127.0.0.1" if alone else None,
    )
    if not alone and "MASTER_ADDR" not in environ and "RANK_TABLE_FILE" in environ:
        told |= _given(MASTER_ADDR=read_rank_table(environ["RANK_TABLE_FILE"]).master or None)
    return {**told, **environ}


def _of_rank_id(environ: Mapping[str, str]) -> dict[str, str]:
    rank = environ["RANK_ID"]
    table = read_rank_table(environ["RANK_TABLE_FILE"]) if environ.get("RANK_TABLE_FILE") else None
    told = _given(RANK=rank, WORLD_SIZE=environ.get("RANK_SIZE"))
    if table is not None and rank.isascii() and rank.isdigit():
        told |= _in_table(table, int(rank), environ.get("RANK_SIZE"))
    return {**told, **environ}


def _in_table(table: RankTable, rank: int, size: str | None) -> dict[str, str]:
    if size is not None and size != str(table.world_size):
        raise ConfigError(f"RANK_SIZE={size!r:.40}, but the rank table has {table.world_size} devices: make them agree")
    return {
        "WORLD_SIZE": str(table.world_size),
        "LOCAL_RANK": str(table.local_rank(rank)),
        **_given(MASTER_ADDR=table.master or None),
    }


def _given(**names: str | None) -> dict[str, str]:
    return {name: value for name, value in names.items() if value is not None}
