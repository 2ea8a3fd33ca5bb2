"""Decides when forking a worker is equivalent to starting it. Pure; in doubt it is started."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOADING_PREFIXES = (
    *("ATEN_", "GLOG_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "MS_DEV_", "NUMEXPR_", "OMP_", "OPENBLAS_"),
    "PYTORCH_",
)
"""Prefixes of variables that compiled code reads while it is loaded, unseen by Python."""

LIBRARY_PREFIXES = (
    *LOADING_PREFIXES,
    *("CUBLAS_", "CUDA_", "GLOO_", "HCCL_", "NCCL_", "NVIDIA_", "PYTHON", "TORCH_", "TORCHINDUCTOR_"),
)
"""Those prefixes, and prefixes of variables that compiled code reads at its first use, which may have been then."""

PER_WORKER = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE"}
    | {"ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"}
    | {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TTP_TOKEN"}
    | {"RANK_ID", "MS_NODE_ID", "MS_ROLE", "MS_SCHED_PORT", "DEVICE_ID", "RANK_TABLE_FILE"}
)
"""Variables of a worker's launcher, which have no meaning to a module that reads the whole environment."""

MODULE_BYTES = 256 << 10
"""Upper limit of the bytes per imported module, on average: torch, MindSpore and their imports take half of it."""
MARGIN_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Program:
    """What a worker's interpreter is told to run: a script, or with ``module`` what ``-m`` names."""

    interpreter: str
    options: tuple[str, ...]
    name: str
    module: bool
    arguments: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """The first folder where its imports are searched."""
        return Path.cwd() if self.module else Path(self.name).resolve().parent


def program(command: Sequence[str], interpreter: str) -> Program | str:
    """Return the program of a worker's command line, or why it is not known.

    Args:
        command: command line of the worker.
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
    if not module and not _is_source(Path(rest[0])):
        return f"{rest[0]} is no script"
    return Program(interpreter, tuple(options), rest[0], module, tuple(rest[1:]))


def _is_source(path: Path) -> bool:
    """Return whether Python reads the file as text: archives and compiled files have null bytes."""
    try:
        return b"\0" not in path.read_bytes()
    except OSError:
        return False


def differing(mine: Mapping[str, str], theirs: Mapping[str, str]) -> set[str]:
    """Return the names of variables that one environment lacks or has with another value."""
    return {name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name)}


def why_not(
    started_with: Mapping[str, str], worker: Mapping[str, str], read: Collection[str], read_all: str
) -> str | None:
    """Return why a worker with that environment is not forked; None: no import can tell the difference.

    Args:
        started_with: environment of the process that has imported.
        worker: environment of the worker.
        read: names of variables that were read during the imports.
        read_all: a module that looked through all variables; empty: none.
    """
    other = differing(started_with, worker)
    if seen := sorted(other & set(read)):
        return f"{seen[0]} differs between workers and was read while modules were imported"
    if known := sorted(name for name in other if name.startswith(LIBRARY_PREFIXES)):
        return f"{known[0]} differs between workers, and libraries read it while they are loaded"
    if read_all and (rest := sorted(other - PER_WORKER)):
        return f"{rest[0]} differs between workers, and {read_all} reads all variables while it is imported"
    return None


def digest(value: str) -> str:
    """Return a digest that tells values of variables apart without showing them."""
    return hashlib.blake2b(value.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def set_by_program(rank: Mapping[str, str], here: Mapping[str, str], read: Collection[str]) -> str | None:
    """Return why a module may differ in the ranks, whose program sets a variable; None: none does.

    A module that looks through all variables is no reason here: one in every torch job does, for those of its own.

    Args:
        rank: digests of the variables of a rank that trains.
        here: the variables after all modules have been imported, which may set some themselves.
        read: names of variables that were read meanwhile.
    """
    other = differing(rank, {name: digest(value) for name, value in here.items()}) - PER_WORKER
    found = sorted(name for name in other if name in read or name.startswith(LOADING_PREFIXES))
    return f"the program sets {found[0]}, which is read while modules are imported" if found else None


def no_room(modules: int, rank: int, left: int | None) -> str | None:
    """Return why there is too little memory for one more process with a rank's imports; None: there is enough.

    As much as it takes, and a margin, has to be left for the ranks.

    Args:
        modules: number of imported modules.
        rank: bytes of anonymous memory of a rank, its weights too; 0: not known.
        left: bytes left on the host; None: not known.
    """
    needed = min(modules * MODULE_BYTES, rank or modules * MODULE_BYTES)
    if left is None or left >= 2 * needed + MARGIN_BYTES:
        return None
    return f"the imports may take {needed >> 20} MiB of memory, and {max(left, 0) >> 20} MiB are left on this host"
