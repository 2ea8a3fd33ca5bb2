"""The command line and the environment of the launchers of a job under test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ttp.chaos.rank_connection import LAUNCH, SOCKET
from ttp.chaos.script import Script

MASTER_PORT = 29500
CONTROLLER_PORT = 23456
MAX_RESTARTS = 1000
FALLBACK = "fallback"
"""Name of the directory for ``TTP_FALLBACK_DIR`` in the job's folder, if the script has one."""
_FOREIGN = ("TTP_", "TORCHELASTIC", "PET_", "CHAOS_")
_FOREIGN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

PATIENCE = {"TTP_OT": "60", "TTP_ANSWER_S": "2"}
"""Settings with shorter timeouts than the defaults, so that runs end sooner."""


def clean_environment() -> dict[str, str]:
    """Return the environment of this process without the variables of ttp, torchrun and chaos."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN) and k not in _FOREIGN_NAMES}


def environment(
    script: Script, folder: Path, save_dir: Path, socket_path: Path, launch: int, *, port: int, token: str
) -> dict[str, str]:
    """Return the environment of the launchers, without the variables that differ between hosts.

    Args:
        script: the script of the job.
        folder: the job's folder.
        save_dir: directory for checkpoints.
        socket_path: the socket to which ranks connect.
        launch: number of launches before this one.
        port: the controller's port.
        token: the controller's token.
    """
    fallback = {"TTP_FALLBACK_DIR": str(folder / FALLBACK)} if script.fallback else {}
    return {
        **clean_environment(),
        **PATIENCE,
        **fallback,
        **dict(script.env),
        **_of_job(script, folder, save_dir),
        "CHAOS_STEP_MS": str(script.step_ms),
        SOCKET: str(socket_path),
        LAUNCH: str(launch),
        "PYTHONUNBUFFERED": "1",
        "GRPC_VERBOSITY": "NONE",
        "TTP_PORT": str(port),
        "TTP_TOKEN": token,
    }


def command(script: Script, host: int, address: str) -> list[str]:
    """Return the command line of the launcher on one host.

    Args:
        script: the script of the job.
        host: number of the host.
        address: address of the first host.
    """
    program = ["-m", "ttp", "run"] if script.launcher == "ttp" else ["-m", "torch.distributed.run"]
    flags = ["--standalone"]
    if script.hosts > 1:
        flags = ["--nnodes", str(script.hosts), "--node-rank", str(host)]
        flags += ["--master-addr", address, "--master-port", str(MASTER_PORT)]
    restarts = MAX_RESTARTS if script.restart == "agent" else 0
    flags += ["--nproc-per-node", str(script.ranks_per_host), "--max-restarts", str(restarts)]
    return [sys.executable, *program, *flags, "-m", "ttp.chaos.job"]


def unbroken(script: Script, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of the same training on one host, without ttp and without faults."""
    plain = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(script.world_size)]
    env = clean_environment() | _of_job(script, folder, folder / "checkpoints")
    return [sys.executable, *plain, "-m", "ttp.chaos.job"], env


def _of_job(script: Script, folder: Path, save_dir: Path) -> dict[str, str]:
    """Return the variables that ``ttp.chaos.job`` reads with and without ttp."""
    return {
        "CHAOS_DIR": str(folder),
        "CHAOS_SAVE_DIR": str(save_dir),
        "CHAOS_STEPS": str(script.steps),
        "CHAOS_WIDTH": str(script.width),
        "OMP_NUM_THREADS": "1",
    }
