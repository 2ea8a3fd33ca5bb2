"""The command line of ``ttp run --mindspore``: flags of msrun and some of torchrun, parsed to a job's description."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.core.layout import WORLD_SIZE_MAX
from ttp.errors import ConfigError
from ttp.launch.preparation import EXIT_CODES, add_flags
from ttp.launch.presence import is_local
from ttp.launch.rank_table import RankTable, await_rank_table

LOOK_S = 0.05

MASTER_PORT = 8118
"""Default port of msrun's scheduler."""

RESTART_TYPE = "/user/restore/reset/config/restartType"
"""File in which MindCluster says how a job restarts: ``podReschedule`` brings a new rank table, ``hotReset`` none."""

RUNNERS = ("python", "python3", "pytest")
"""Programs that may stand in the place of the script, as for msrun."""

_AFFINITY = "call mindspore.runtime.set_cpu_affinity() in the program, which takes the same cores or the same file"
_DRY = "a dry run has no other ranks that could save: start it with msrun"
MSRUN_ONLY = {
    "bind_core": ("false", _AFFINITY),
    "bind_numa": ("false", _AFFINITY),
    "sim_level": ("-1", _DRY),
    "sim_rank_id": ("-1", _DRY),
    "worker_log_name": ("", "--log-dir has one worker_RANK.log for each worker: give each host a directory of its own"),
    "tail_worker_log": ("-1", "without --log-dir the terminal shows all workers; with it use tail -f DIR/worker_0.log"),
}
"""Flags of msrun that ttp run does not have: the value that switches each off, which is accepted, and what to do."""

EPILOG = f"""
Scheduler and workers are started as msrun does, on every host with the same flags but --node-rank. In addition: the
job's controller runs on the first node (on TTP_PORT; one node: a free port when unset); when a rank dies, the healthy
ones get up to TTP_OT seconds (default 360) to save before they are stopped; and the job is then started again up to
--max-restarts times. {EXIT_CODES}
"""


@dataclass(frozen=True, slots=True)
class Job:
    """The job to launch, on all hosts and on this one.

    Args:
        world_size: workers on all hosts.
        ranks: global ranks of this host, ascending.
        devices: device of each of these ranks; from the rank table, or counted from 0.
        node_rank: number of this host; the scheduler and the controller run on host 0.
        master_addr: address of host 0.
        master_port: port of the scheduler; None: a free one, new for each start.
        topology_s: seconds that workers wait for each other.
        max_restarts: number of restarts.
        log_dir: directory for the output of each worker; None: the launcher's output.
        rank_table: exported for the workers, as msrun does; empty: none.
        table_version: version of that table, see ``ttp.launch.rank_table.table_version``.
        restart_type: file in which MindCluster says whether a restart brings a new rank table.
        look_s: seconds between two checks of the workers.
        mindio: programs written for mindio_ttp are to run on ttp.
        continuity: how the job goes on after a failure; None: as the settings say.
        saved_exit_code: exit code instead of 75; None: as the settings say.
        command: command line of each process.
    """

    world_size: int
    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    node_rank: int
    master_addr: str
    master_port: int | None
    topology_s: int
    max_restarts: int
    log_dir: Path | None
    rank_table: str
    table_version: int
    restart_type: Path
    look_s: float
    mindio: bool
    continuity: str | None
    saved_exit_code: int | None
    command: tuple[str, ...]

    @property
    def several_nodes(self) -> bool:
        """True if other hosts take part."""
        return self.local_size < self.world_size

    @property
    def local_size(self) -> int:
        """Number of workers of this host."""
        return len(self.ranks)


def parse(argv: list[str], environ: Mapping[str, str] = os.environ, newer_than: int = -1) -> Job:
    """Parse ``argv``. Waits for the rank table, if there is to be one, as long as for other hosts.

    Args:
        argv: flags, script and its arguments.
        environ: may name the rank table.
        newer_than: the rank table has to be newer than this version of it.

    Raises:
        ConfigError: the flags contradict each other, there is no such script, or no rank table has been completed.
        SystemExit: argparse printed its help, or an error.
    """
    given = _parser().parse_args(argv)
    table_path = given.rank_table_file or environ.get("RANK_TABLE_FILE", "")
    table, version = None, -1
    if table_path:
        table, version = await_rank_table(table_path, _per_host(given), waiting_s(given.cluster_time_out), newer_than)
    node_rank = given.node_rank if given.node_rank is not None else _place(table)
    local, world = _sizes(given, table, node_rank)
    several = local < world
    _check_place(node_rank, local, world)
    node_rank = node_rank if several and node_rank is not None else 0
    ranks, devices = _workers(table, node_rank, local)
    return Job(
        world_size=world,
        ranks=ranks,
        devices=devices,
        node_rank=node_rank,
        master_addr=_address(given.master_addr, table, several),
        master_port=given.master_port or (MASTER_PORT if several else None),
        topology_s=given.cluster_time_out,
        max_restarts=given.max_restarts,
        log_dir=Path(given.log_dir) if given.log_dir else None,
        rank_table=table_path,
        table_version=version,
        restart_type=Path(given.restart_type_file),
        look_s=given.monitor_interval,
        mindio=given.mindio,
        continuity=given.continuity,
        saved_exit_code=given.saved_exit_code,
        command=_command(given.script, given.script_args),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ttp run --mindspore", epilog=EPILOG, allow_abbrev=False)
    add = parser.add_argument
    add("--mindspore", action="store_true", required=True, help="launch a MindSpore job")
    add("--worker-num", "--worker_num", type=_count, metavar="N", help="workers on all hosts together")
    add("--local-worker-num", "--local_worker_num", type=_count, metavar="N", help="workers on this host; equal on all")
    add("--nproc-per-node", "--nproc_per_node", type=_count, metavar="N", help="torchrun's name for --local-worker-num")
    add("--nnodes", type=_count, metavar="N", help="number of hosts, if --worker-num is not given [1]")
    add("--node-rank", "--node_rank", type=_node, metavar="I", help="which host this is, from 0; needed with several "
        "(msrun's -1 leaves it to MindSpore, which chooses too late for ttp)")  # fmt: skip
    add("--master-addr", "--master_addr", metavar="HOST", help="host 0 [127.0.0.1, or as the rank table says]")
    add("--master-port", "--master_port", type=_port, metavar="P", help=f"of the scheduler [free; {MASTER_PORT}]")
    add("--cluster-time-out", "--cluster_time_out", type=int, default=600, metavar="S", help="seconds to meet in, and "
        "to wait for the rank table; -1: no limit [600]")  # fmt: skip
    add("--max-restarts", "--max_restarts", type=_restarts, default=0, metavar="N", help="how often the job is started "
        "again [0]")  # fmt: skip
    add("--monitor-interval", "--monitor_interval", type=_interval, default=LOOK_S, metavar="S", help="seconds between "
        "two looks at the workers; ranks learn of deaths at once, whatever this is [%(default)s]")  # fmt: skip
    add("--log-dir", "--log_dir", metavar="DIR", help="worker_RANK.log and scheduler.log go there [the terminal]")
    add("--rank-table-file", "--rank_table_file", default="", metavar="F", help="rank table of an Ascend cluster")
    add("--restart-type-file", default=RESTART_TYPE, metavar="F", help="if it says podReschedule, a restart waits for "
        "a new rank table [%(default)s]")  # fmt: skip
    add("--join", choices=("True", "False"), default="True", help="no effect: ttp always waits for its workers")
    for flag, (off, instead) in MSRUN_ONLY.items():
        add(f"--{flag}", f"--{flag.replace('_', '-')}", type=_only(off, instead), help=argparse.SUPPRESS)
    add_flags(parser)
    add("script", help="the training script, or python, python3, pytest")
    add("script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _number(least: float, most: float, wanted: str, kind: type[int] | type[float] = int) -> Callable[[str], Any]:
    """Return a parser of a flag's number, with limits."""

    def parsed(text: str) -> int | float:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{wanted}, not {text}")
        return value

    return parsed


_count = _number(1, WORLD_SIZE_MAX, f"expected a number from 1 to {WORLD_SIZE_MAX}")
_restarts = _number(0, WORLD_SIZE_MAX, "expected a number of at least 0")
_interval = _number(0.01, 3600, "expected a number of seconds from 0.01 to 3600", float)
_port = _number(1, 65535, "expected a port number from 1 to 65535")


def _only(off: str, instead: str) -> Callable[[str], None]:
    """Return a parser of a flag that may only be switched off."""

    def parsed(text: str) -> None:
        if text.strip().lower() != off:
            raise argparse.ArgumentTypeError(f"ttp run does not have this flag of msrun: {instead}")

    return parsed


def waiting_s(given_s: int) -> float:
    """Return how many seconds ``--cluster-time-out`` allows; a negative number means without limit, as for msrun."""
    return given_s if given_s >= 0 else math.inf


def _node(text: str) -> int | None:
    """Parse a node's number. None: not given; msrun's default of -1, with which MindSpore chooses, means the same."""
    return None if text.strip() == "-1" else int(_restarts(text))


def _place(table: RankTable | None) -> int | None:
    """Return the number of this host in the rank table; None: not exactly one of its addresses is this machine's."""
    if table is None:
        return None
    mine = [place for place, server in enumerate(table.in_order) if server.address and is_local(server.address)]
    if len(table.servers) == 1 and not table.master:
        return 0
    return mine[0] if len(mine) == 1 else None


def _workers(table: RankTable | None, node_rank: int, local: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of this host and their devices: from the rank table, else counted.

    Raises:
        ConfigError: the table has another number of devices for this host.
    """
    if table is None:
        return tuple(range(node_rank * local, (node_rank + 1) * local)), tuple(range(local))
    server = table.in_order[node_rank]
    if len(server.ranks) != local:
        raise ConfigError(
            f"{local} workers on this host, but the rank table has {len(server.ranks)} devices for "
            f"{server.address or 'it'}: "
            "leave --local-worker-num and --nproc-per-node out"
        )
    workers = sorted(zip(server.ranks, server.devices, strict=True))
    return tuple(rank for rank, _ in workers), tuple(device for _, device in workers)


def _per_host(given: argparse.Namespace) -> int | None:
    """Return the number of workers per host, as far as flags say it; None: they do not."""
    local: int | None = given.local_worker_num or given.nproc_per_node
    return local or (given.worker_num // given.nnodes or None if given.worker_num and given.nnodes else None)


def _sizes(given: argparse.Namespace, table: RankTable | None, node_rank: int | None) -> tuple[int, int]:
    """Return the number of workers of this host, and of all."""
    local, world, nodes = given.local_worker_num, given.worker_num, given.nnodes
    if local is not None and given.nproc_per_node not in (None, local):
        raise ConfigError("--local-worker-num and --nproc-per-node mean the same: give one of them")
    local = local or given.nproc_per_node
    if table is not None:
        world = world or table.world_size
        local = local or len(table.in_order[min(node_rank or 0, len(table.servers) - 1)].ranks)
        if len({len(server.ranks) for server in table.servers}) > 1:
            raise ConfigError("the rank table's hosts have different numbers of devices: the number has to be the same")
        if world != table.world_size:
            raise ConfigError(f"--worker-num {world}, but the rank table has {table.world_size} devices")
    if nodes is not None and world is not None:
        if local is not None and local * nodes != world:
            raise ConfigError(f"--nnodes {nodes} of {local} workers each are not --worker-num {world}")
        if nodes > world:  # else every host would start the whole job
            raise ConfigError(f"--worker-num {world} is less than one worker on each of --nnodes {nodes} hosts")
        local = local or world // nodes
    if local is None and world is None:
        raise ConfigError(
            "the number of workers is missing: give --nproc-per-node N, or --worker-num and --local-worker-num"
        )
    local = local or world
    return local, world or local * (nodes or 1)


def _check_place(node_rank: int | None, local: int, world: int) -> None:
    if local > world:
        raise ConfigError(f"--local-worker-num {local} is more than --worker-num {world}")
    if world % local:
        raise ConfigError(f"{world} workers cannot be {local} on every host: the number has to be the same")
    nodes = world // local
    if nodes > 1 and node_rank is None:
        raise ConfigError(f"--node-rank is needed: {nodes} hosts of {local} workers, and the ranks follow from it")
    if nodes > 1 and node_rank is not None and node_rank >= nodes:
        raise ConfigError(f"--node-rank {node_rank}, but {world} workers of {local} on a host need {nodes} hosts only")


def _address(given: str | None, table: RankTable | None, several: bool) -> str:
    if given:
        return given
    if not several:
        return "127.0.0.1"
    if table is None or not table.master:
        raise ConfigError("--master-addr is needed for several hosts: the address of host 0, as all of them know it")
    return table.master


NAMES = ("-m", "ttp.compat.mindspore")
"""Arguments of Python that run a program with ttp's classes under the names of MindSpore's."""


def with_names(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``command`` with ttp's ``OptTFTWrapper``, ``TFTRegister`` and ``TrainFaultTolerance`` in ``mindspore``.

    Raises:
        ConfigError: the command runs neither a script nor a module.
    """
    program, *arguments = command
    if program == "pytest":
        return (sys.executable, *NAMES, "-m", *command)
    flags = 0
    while flags < len(arguments) and arguments[flags].startswith("-") and arguments[flags] not in ("-m", "-c", "-"):
        flags += 2 if arguments[flags] in ("-X", "-W") else 1
    if flags >= len(arguments) or arguments[flags] in ("-c", "-"):
        raise ConfigError("--mindio of a MindSpore job wants a script, or python -m and a module")
    return (program, *arguments[:flags], *NAMES, *arguments[flags:])


def _command(script: str, arguments: list[str]) -> tuple[str, ...]:
    if script in RUNNERS:
        return (sys.executable if script != "pytest" else script, *arguments)
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script}; flags of ttp run come before it")
    return (sys.executable, "-u", script, *arguments)
