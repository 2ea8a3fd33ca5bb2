"""``ttp run``: torchrun, with the controller, patience for ranks that save, and restarts that resume."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import shutil
import socket
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ttp.config import MINDIO_FORCE, MINDIO_SWITCH, Config
from ttp.errors import EXIT_BAD_CONFIG, EXIT_NOT_SAVED, EXIT_SAVED, EXIT_TRAINED, ConfigError
from ttp.launch.run_dir import TOKEN_FILE, prepare_run_dir, write_token

logger = logging.getLogger("ttp.launch")

EXIT_FAILED = 1

EPILOG = """
ttp run takes every flag of torchrun and launches in the same way. In addition: it starts the job's controller on the
first node (on TTP_PORT; one node: a free port when unset); when a rank dies, the healthy ones get up to TTP_OT seconds
(default 360) to save before they are stopped; and a restart (--max-restarts) works and resumes from what they saved,
with any rendezvous. A rank that exits with 64 is not restarted: its message says what to change. Exit code: 0 trained
to the end, 75 saved and wants to be started again, 70 could not save, 64 bad configuration or a call of ttp that is
wrong, 1 anything else.
"""


def run(argv: list[str]) -> int:
    """Launch a job as ``torchrun`` would with ``argv``, protected by ttp.

    Returns:
        The exit code, see ``--help``. Errors are printed to stderr as one clear message.
    """
    try:
        arguments = _parse(argv)
        several_nodes = _several_nodes(arguments.nnodes)
        config = Config.from_env()
        _show_log(config)
        if arguments.mindio or config.mindio:
            _put_mindio_into_place(config)
        job = _settle(config, several_nodes)
        try:
            code = _Launch(job).run(arguments)
        finally:
            if not config.token:
                (job.resolved_run_dir() / TOKEN_FILE).unlink(missing_ok=True)
        if code == EXIT_TRAINED and config.port is None and config.run_dir is None:
            shutil.rmtree(job.resolved_run_dir(), ignore_errors=True)  # nobody will look for that random port's log
        return code
    except ConfigError as problem:
        return _refuse(str(problem))
    except SystemExit as leaving:  # argparse has said what it does not like, or has printed the help
        return EXIT_TRAINED if leaving.code in (None, 0) else EXIT_BAD_CONFIG


def _show_log(config: Config) -> None:
    """Let operators see what the launcher waits for, unless the program that calls us logs already."""
    ours = logging.getLogger("ttp")
    try:
        ours.setLevel(config.log_level.upper())
    except ValueError:
        raise ConfigError(f"TTP_LOG={config.log_level!r} is no level: try INFO, WARNING or DEBUG") from None
    if not ours.hasHandlers():
        shown = logging.StreamHandler()
        shown.setFormatter(logging.Formatter("%(asctime)s ttp run: %(message)s", "%H:%M:%S"))
        ours.addHandler(shown)
        ours.propagate = False  # a library that logs on the root logger would make it say everything twice


def _parse(argv: list[str]) -> Any:
    try:
        from torch.distributed.run import get_args_parser
    except ImportError as problem:
        raise ConfigError(f"ttp run launches torch jobs, and torch is missing: {problem}") from None
    parser = get_args_parser()
    parser.prog, parser.epilog = "ttp run", EPILOG
    parser.add_argument("--mindio", action="store_true", help="let programs written for mindio_ttp run on ttp")
    return parser.parse_args(argv)


def _put_mindio_into_place(config: Config) -> None:
    from ttp.compat.mindio.placing import find_original, tell_children

    original = find_original()
    if original is not None and config.mindio != MINDIO_FORCE:
        logger.warning(
            "the original mindio_ttp is installed and is used; %s=force puts ttp's in its place", MINDIO_SWITCH
        )
    tell_children(os.environ)


def _several_nodes(nnodes: str) -> bool:
    from torch.distributed.run import parse_min_max_nnodes

    try:
        return bool(parse_min_max_nnodes(nnodes)[1] > 1)
    except (RuntimeError, ValueError):
        raise ConfigError(f"--nnodes {nnodes!r} is neither a number nor MIN:MAX") from None


def _settle(config: Config, several_nodes: bool) -> Config:
    """Complete the settings, and leave them in the environment for the workers."""
    if several_nodes and config.port is None:
        raise ConfigError(
            "a job of several nodes needs TTP_PORT, the same on all of them: where the first node's controller listens"
        )
    if config.port is None:
        config = dataclasses.replace(config, port=_free_port())
    if not config.token and not several_nodes:
        config = dataclasses.replace(config, token=secrets.token_hex(16))
    run_dir = prepare_run_dir(config.resolved_run_dir())
    if config.token:
        write_token(run_dir, config.token)
    os.environ.update(TTP_PORT=str(config.port), TTP_TOKEN=config.token, TTP_RUN_DIR=str(run_dir))
    return dataclasses.replace(config, run_dir=str(run_dir))


def _free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("", 0))
        return int(probing.getsockname()[1])


class _Launch:
    """One call of torch's launcher with our agent."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._agent: Any = None

    def run(self, arguments: Any) -> int:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
        from torch.distributed.run import run as torchrun

        try:
            with self._our_agent():
                record(torchrun)(arguments)
        except ConfigError:
            raise
        except (ChildFailedError, SignalException) as problem:
            print(problem, file=sys.stderr)
        except Exception as problem:
            if self._agent is None and isinstance(problem, (ValueError, AssertionError, RuntimeError, OSError)):
                return _refuse(str(problem))  # torch did not like the flags
            traceback.print_exc()
        else:
            return EXIT_TRAINED
        return self._verdict()

    def _verdict(self) -> int:
        """From how the workers of the last attempt ended; what a restart cannot mend comes first."""
        codes = [] if self._agent is None else self._agent.exit_codes()
        return next((code for code in (EXIT_BAD_CONFIG, EXIT_NOT_SAVED, EXIT_SAVED) if code in codes), EXIT_FAILED)

    def _our_agent(self) -> AbstractContextManager[None]:
        from ttp.launch.install import agent_maker, installed
        from ttp.launch.torch_compat import differences

        unknown = differences()
        if unknown:
            logger.warning("this torch is not as ttp knows it; ranks may be stopped while they save: %s", unknown)
            return nullcontext()
        return installed(agent_maker(self._config, self._remember))

    def _remember(self, agent: Any) -> None:
        self._agent = agent


def _refuse(text: str) -> int:
    print(f"ttp run: {text}", file=sys.stderr)
    return EXIT_BAD_CONFIG


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
