"""What ``ttp run`` does for jobs of every framework: settings before workers start, and the exit code afterwards."""

from __future__ import annotations

import abc
import argparse
import contextlib
import dataclasses
import logging
import os
import shutil
import sys
from collections.abc import Collection, Iterator
from typing import Any

from ttp.config import CONTINUITY_MODES, Config, saved_exit_code
from ttp.errors import EXIT_BAD_CONFIG, EXIT_NOT_SAVED, EXIT_SAVED, ConfigError
from ttp.launch.log_format import formatter
from ttp.launch.other_jobs import is_of_another_job, warn_of_job_in
from ttp.launch.ports import hold_port
from ttp.launch.run_dir import note_port, prepare_run_dir
from ttp.launch.shared_token import new_token
from ttp.launch.token_file import forget_token, write_token

EXIT_FAILED = 1

EXIT_CODES = """A rank that exits with 64 is not restarted: its message says what to change. Exit code, the same on
every host: 0 trained to the end, 75 saved and wants to be started again, 70 could not save, or nothing new in three
launches in a row, 64 wrong configuration or wrong use of ttp, 1 anything else."""
"""What ``ttp run --help`` says about all launchers."""
CONTINUITY_HELP = (
    "how the job is started again after a failure. warm (default): workers are forked from a process that has imported "
    "their modules; off: each worker is a new interpreter; keep: like warm, but only dead workers are started, and the "
    "others call train() again in their processes, if possible. Same as TTP_CONTINUITY"
)
SAVED_CODE_HELP = (
    "exit with N instead of 75 when the job is saved and has to be started again, for launchers that treat 1 to 127 as "
    "permanent failures (default: TTP_SAVED_EXIT_CODE, else 75)"
)
MINDIO_HELP = "let programs written for mindio_ttp run on ttp"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``ttp run`` has for jobs of every framework."""
    parser.add_argument("--mindio", action="store_true", help=MINDIO_HELP)
    parser.add_argument("--continuity", choices=CONTINUITY_MODES, help=CONTINUITY_HELP)
    parser.add_argument("--saved-exit-code", type=_saved_code, metavar="N", help=SAVED_CODE_HELP)


class Launch(abc.ABC):
    """One job, as the command line describes it.

    Args:
        flags: those of ``add_flags``.
        several_nodes: other hosts take part.
    """

    elastic = False
    """Whether the job goes on with fewer hosts, and with more again."""

    def __init__(self, flags: Any, *, several_nodes: bool) -> None:
        self.mindio: bool = flags.mindio
        self.continuity: str | None = flags.continuity
        self.saved_exit_code: int | None = flags.saved_exit_code
        self.several_nodes = several_nodes

    @abc.abstractmethod
    def run(self, config: Config) -> int:
        """Launch the job with these settings and return the exit code."""

    def tell_others(self, text: str) -> None:  # noqa: B027 - most hosts can tell nobody
        """Tell the hosts that wait for this one that its settings are refused, where that is possible. Never raises."""


def show_log(config: Config) -> None:
    """Show the log of the launcher on stderr, unless the calling program has configured logging."""
    ours = logging.getLogger("ttp")
    ours.setLevel(config.log_level.upper())
    if not ours.hasHandlers():
        shown = logging.StreamHandler()
        shown.setFormatter(formatter(config.log_format, "%(asctime)s ttp run: %(message)s", "%H:%M:%S"))
        ours.addHandler(shown)
        ours.propagate = False  # a library that logs on the root logger would print everything twice


@contextlib.contextmanager
def settled(config: Config, several_nodes: bool) -> Iterator[Config]:
    """Complete the settings (port, token, run directory), export them to the workers, and yield them.

    While the block runs, a port that was chosen here stays reserved; afterwards a token that was made here is removed.

    Args:
        config: settings from the environment.
        several_nodes: True if other hosts take part.

    Raises:
        ConfigError: several nodes without a port, or the run directory cannot be used.
    """
    with _port_kept(config, several_nodes) as placed:
        job = _settle(placed, several_nodes)
        try:
            yield job
        finally:
            if not config.token:
                forget_token(job.resolved_run_dir(), job.token)


def forget_run_dir(asked: Config, job: Config) -> None:
    """Remove the run directory of a job that trained to its end, unless the user has chosen the port or the directory.

    Args:
        asked: settings as the user gave them.
        job: the same settings, completed by ``settled``.
    """
    if asked.port is None and asked.run_dir is None:
        shutil.rmtree(job.resolved_run_dir(), ignore_errors=True)


@contextlib.contextmanager
def _port_kept(config: Config, several_nodes: bool) -> Iterator[Config]:
    """Yield the settings with a port. If none was set, a free one is chosen and reserved while the block runs."""
    if config.port is not None:
        yield config
        return
    if several_nodes:
        raise ConfigError(
            "a job of several nodes needs TTP_PORT: set it to the same port on all nodes. The first node's controller "
            "listens there"
        )
    with hold_port() as holding:
        yield dataclasses.replace(config, port=holding.getsockname()[1])


def _settle(config: Config, several_nodes: bool) -> Config:
    if not config.token and not config.insecure and not several_nodes:
        config = dataclasses.replace(config, token=new_token())
    run_dir = prepare_run_dir(config.resolved_run_dir())
    warn_of_job_in(run_dir, config.port)
    if config.token and not is_of_another_job(run_dir, config.token, config.port or 0):
        write_token(run_dir, config.token)
    if config.run_dir and config.port:
        note_port(run_dir, config.port)
    os.environ.update(TTP_PORT=str(config.port), TTP_TOKEN=config.token, TTP_RUN_DIR=str(run_dir))
    return dataclasses.replace(config, run_dir=str(run_dir))


def _saved_code(text: str) -> int:
    """Parse the value of ``--saved-exit-code``, for argparse."""
    try:
        return saved_exit_code(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text!r:.100} is not valid: {problem!s:.200}") from None


def verdict(codes: Collection[int]) -> int:
    """Return the exit code of a failed job from those of its last workers: 64, 70 or 75, in this order, else 1."""
    return next((code for code in (EXIT_BAD_CONFIG, EXIT_NOT_SAVED, EXIT_SAVED) if code in codes), EXIT_FAILED)


def refuse(text: str) -> int:
    """Print what is wrong with the command or the settings to stderr, and return exit code 64."""
    with contextlib.suppress(OSError):  # nobody may read it any more
        print(f"ttp run: {text}", file=sys.stderr)
    return EXIT_BAD_CONFIG
