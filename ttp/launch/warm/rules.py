"""When a worker that is forked is the same as one that is started. Pure; in doubt it is started."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LIBRARY_PREFIXES = (
    *("ATEN_", "CUBLAS_", "CUDA_", "GLOG_", "GLOO_", "GOMP_", "HCCL_", "KMP_", "LD_", "MALLOC_", "MKL_", "MS_DEV_"),
    *("NCCL_", "NUMEXPR_", "NVIDIA_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_"),
)
"""Variables that compiled code may have read while it was loaded, which nobody sees."""

PER_WORKER = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE"}
    | {"ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"}
    | {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TTP_TOKEN"}
    | {"RANK_ID", "MS_NODE_ID", "MS_ROLE", "MS_SCHED_PORT", "DEVICE_ID", "RANK_TABLE_FILE"}
)
"""What launchers tell each worker: nothing that somebody looks for who reads all of the environment."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a worker's interpreter is told to run: a script, or with ``module`` what ``-m`` names."""

    interpreter: str
    options: tuple[str, ...]
    name: str
    module: bool
    arguments: tuple[str, ...]


def program(command: Sequence[str], interpreter: str) -> Program | str:
    """The program of a worker's command line, or why that cannot be told.

    Args:
        command: of the worker.
        interpreter: path of this Python.
    """
    if not command or command[0] != interpreter:
        return f"workers are started by {command[0] if command else 'nothing'}, not by {interpreter}"
    rest = list(command[1:])
    options = []
    while rest and rest[0] == "-u":
        options.append(rest.pop(0))
    module = rest[:1] == ["-m"]
    rest = rest[1:] if module else rest
    if not rest or rest[0].startswith("-"):
        return f"workers have options of Python that ttp does not know: {' '.join(command[1:4])}"
    if not module and not Path(rest[0]).is_file():
        return f"{rest[0]} is no script"
    return Program(interpreter, tuple(options), rest[0], module, tuple(rest[1:]))


def differing(mine: Mapping[str, str], theirs: Mapping[str, str]) -> set[str]:
    """Names of variables that one environment lacks or has with another value."""
    return {name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name)}


def why_not(
    started_with: Mapping[str, str], worker: Mapping[str, str], read: Collection[str], read_all: str
) -> str | None:
    """Why a worker with that environment is not forked; None: nothing that was imported can tell the difference.

    Args:
        started_with: environment of the process that has imported.
        worker: environment of the worker.
        read: names that were asked for while it imported.
        read_all: a module that looked through all of them; empty: none.
    """
    other = differing(started_with, worker)
    if seen := sorted(other & set(read)):
        return f"{seen[0]} differs between workers and was read while modules were imported"
    if known := sorted(name for name in other if name.startswith(LIBRARY_PREFIXES)):
        return f"{known[0]} differs between workers, and libraries read it while they are loaded"
    if read_all and (rest := sorted(other - PER_WORKER)):
        return f"{rest[0]} differs between workers, and {read_all} reads all variables while it is imported"
    return None
