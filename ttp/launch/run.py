"""``ttp run``: torchrun that also runs the controller, waits for ranks that save, and lets restarted jobs resume.

``ttp run --mindspore`` does the same for jobs that msrun would launch, see ``ttp.launch.mindspore``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import signal
import socket
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ttp.config import MINDIO_FORCE, MINDIO_SWITCH, Config
from ttp.errors import EXIT_BAD_CONFIG, EXIT_NOT_SAVED, EXIT_SAVED, EXIT_TRAINED, ConfigError
from ttp.launch.preparation import (
    EXIT_CODES,
    EXIT_FAILED,
    Launch,
    add_flags,
    forget_run_dir,
    refuse,
    settled,
    show_log,
)
from ttp.launch.presence import is_local

logger = logging.getLogger("ttp.launch")

EPILOG = f"""
ttp run takes every flag of torchrun and launches in the same way. In addition: it starts the job's controller on the
first node (on TTP_PORT; one node: a free port when unset); when a rank dies, the healthy ones get up to TTP_OT seconds
(default 360) to save before they are stopped; and a restart (--max-restarts) works and resumes from what they saved,
with any rendezvous. {EXIT_CODES} For MindSpore jobs see ttp run --mindspore --help.
"""

WITHOUT_TORCH = "torch is missing here, so these are only the flags that ttp run adds to those of torchrun."

MINDSPORE = "--mindspore"
ALONE = ("-m", "--module", "--no-python", "--no_python", "--standalone", "--stand-by", "--elastic", "--mindio")
"""Flags after which comes no value of theirs."""
ELASTIC_HELP = (
    "when a host is lost and none takes its place, go on with the remaining hosts (--nnodes 1:N), and with more again "
    "when one joins; the checkpoint is then read by another number of ranks"
)
UNKNOWN_NAME = (
    "{}: this host does not know its own name, {}. Add it to /etc/hosts; or give --rdzv-conf is_host=1 on the host of "
    "--rdzv-endpoint {}, is_host=0 on the others, and on each host its address as --local-addr"
)
LETS_IN = ("c10d", "etcd-v2")
"""Backends of torch's dynamic rendezvous."""
FEW_NODES = 64
"""Maximum number of hosts with which ttp shortens the rendezvous' heartbeat."""
STAND_BY_HELP = (
    "wait until a host of the job is lost, and take its place; for a host in addition to those of --nnodes, with the "
    "same flags as on the others, which need --rdzv-backend c10d"
)


def run(argv: list[str]) -> int:
    """Run ``ttp run``: launch a job as ``torchrun`` would with ``argv`` (``msrun`` with ``--mindspore``), under ttp.

    Args:
        argv: the arguments after ``ttp run``.

    Returns:
        The exit code, see ``--help``. Wrong settings are printed to stderr as one message.
    """
    launch: Launch | None = None
    if os.getpid() == 1:  # of a container: the kernel drops signals that it does not handle. Launchers set their own
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        launch = _launch(argv)
        if launch.continuity is not None:
            os.environ["TTP_CONTINUITY"] = launch.continuity  # for the workers, too
        if launch.elastic:
            os.environ["TTP_ELASTIC"] = "on"
        config = Config.from_env()
        show_log(config)
        if launch.mindio or config.mindio:
            _put_mindio_into_place(config)
        with settled(config, launch.several_nodes) as job:
            code = launch.run(job)
        if code == EXIT_TRAINED:
            forget_run_dir(config, job)
        if code == EXIT_SAVED:
            code = launch.saved_exit_code or config.saved_exit_code
            what_next = "unless other hosts go on with it, start it again with the same command"
            logger.warning("leaving with %d: the job is saved; %s", code, what_next)
        if code == EXIT_NOT_SAVED:
            logger.error(
                "leaving with %d: no newer version was saved: remove the cause (above), then start again", code
            )
        return code
    except ConfigError as problem:
        code = refuse(str(problem))
        if launch is not None:
            launch.tell_others(str(problem))
        return code
    except SystemExit as leaving:  # argparse has printed its error or its help
        return EXIT_TRAINED if leaving.code in (None, 0) else EXIT_BAD_CONFIG


def _launch(argv: list[str]) -> Launch:
    if asks_for_mindspore(argv):
        from ttp.launch.mindspore.launch import MindSporeLaunch

        return MindSporeLaunch(argv)
    return _TorchLaunch(argv)


def asks_for_mindspore(argv: list[str]) -> bool:
    """Return whether ``--mindspore`` is among ttp's flags. After the script's name it is an argument of the script."""
    before = ""
    for word in argv:
        if word == MINDSPORE:
            return True
        value = before.startswith("-") and "=" not in before and before not in ALONE
        if word.endswith(".py") or not (word.startswith("-") or value):
            return False
        before = "" if value and not word.startswith("-") else word
    return False


def _parse(argv: list[str]) -> Any:
    try:
        from torch.distributed.run import get_args_parser
    except ImportError as problem:
        if argv[:1] in (["-h"], ["--help"]):
            _with_ours(argparse.ArgumentParser(description=WITHOUT_TORCH)).parse_args(argv[:1])
        raise ConfigError(
            f"ttp run launches torch jobs, and torch is missing: {problem}. For MindSpore: ttp run {MINDSPORE} ..."
        ) from None
    parser = _with_ours(get_args_parser())
    arguments = parser.parse_args(argv)
    if arguments.stand_by and _nodes(arguments.nnodes) < 2:
        raise ConfigError(
            "--stand-by takes the place of a lost host in a job of several, but --nnodes says one host: give the same "
            "--nnodes, --rdzv-endpoint and --rdzv-id as on the hosts of the job"
        )
    if arguments.elastic:
        _let_hosts_go(arguments)
    arguments.rdzv_conf = _rendezvous_settings(arguments)
    handled = getattr(arguments, "signals_to_handle", None)
    if handled and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # torch would undo what ``nohup`` has done
        arguments.signals_to_handle = ",".join(name for name in handled.split(",") if name.strip() != "SIGHUP")
    return arguments


def _check_program(arguments: Any) -> None:
    """Raise ``ConfigError`` if workers cannot find their program here, or its top-level package with ``-m``."""
    program = str(arguments.training_script)
    if arguments.no_python:
        return  # a command, which the operating system looks up
    if not arguments.module:
        if not Path(program).exists():
            raise ConfigError(f"the training script {program} does not exist on this host (in {Path.cwd()})")
    elif "PYTHON_EXEC" not in os.environ:  # else an interpreter with packages of its own
        top = program.partition(".")[0]
        here = [] if os.environ.get("PYTHONSAFEPATH") else [str(Path.cwd())]  # Python -m looks there first
        if not top or (PathFinder.find_spec(top, here) is None and importlib.util.find_spec(top) is None):
            raise ConfigError(f"there is no module {top or program} for -m {program}, in {Path.cwd()} or installed")


def _with_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.prog, parser.epilog = "ttp run", EPILOG
    add_flags(parser)
    parser.add_argument("--stand-by", action="store_true", help=STAND_BY_HELP)
    parser.add_argument("--elastic", action="store_true", help=ELASTIC_HELP)
    return parser


def _let_hosts_go(arguments: Any) -> None:
    if _nodes(arguments.nnodes) > 1 and arguments.rdzv_backend not in LETS_IN:
        raise ConfigError(
            "--elastic goes on with fewer hosts, and this job's rendezvous waits for all: use --rdzv-backend c10d with "
            "--rdzv-endpoint and --rdzv-id"
        )
    if ":" not in arguments.nnodes:
        arguments.nnodes = f"1:{arguments.nnodes}"


def _rendezvous_settings(arguments: Any) -> str:
    """Return the user's settings, completed for a dynamic rendezvous.

    A heartbeat with which a silent host counts as gone after 10 s instead of 15 matters only while hosts meet. It is
    not less, because a busy host may be late. In jobs of more than ``FEW_NODES`` hosts it is left out, because each
    beat rewrites the state of all hosts, which is one value in torch's store.
    """
    given = [str(arguments.rdzv_conf)]
    if "keep_alive" not in given[0] and arguments.rdzv_backend in LETS_IN and _nodes(arguments.nnodes) <= FEW_NODES:
        given.append("keep_alive_interval=1,keep_alive_max_attempt=10")
    if "is_host" not in given[0] and arguments.rdzv_backend == "c10d" and _is_own_name(arguments.rdzv_endpoint):
        given.append("is_host=1")
    return ",".join(filter(None, given))


def _is_own_name(endpoint: str) -> bool:
    """Return whether an endpoint has a name of this host that the name service does not know yet.

    A pod knows its full name when it starts; a record of the name, or of the new pod's address, may come later. Torch
    compares addresses, once: then no host would keep the rendezvous, and all would wait for it in vain.
    """
    name = endpoint.rpartition(":")[0] or endpoint
    return "." in name and socket.getfqdn().lower().startswith(f"{name.lower()}.") and not is_local(name)


def _put_mindio_into_place(config: Config) -> None:
    from ttp.compat.mindio.placing import find_original, tell_children

    original = find_original()
    if original is not None and config.mindio != MINDIO_FORCE:
        logger.warning(
            "the original mindio_ttp is installed and is used; %s=force puts ttp's in its place", MINDIO_SWITCH
        )
    tell_children(os.environ)


def _nodes(nnodes: str) -> int:
    """Return the largest number of hosts that ``--nnodes`` allows."""
    from torch.distributed.run import parse_min_max_nnodes

    try:
        return int(parse_min_max_nnodes(nnodes)[1])
    except (RuntimeError, ValueError):
        raise ConfigError(f"--nnodes {nnodes!r} is neither a number nor MIN:MAX") from None


def _show(what: object) -> None:
    """Print to stderr, if anybody reads it: an error would take the place of the job's exit code."""
    with contextlib.suppress(OSError):
        print(what, file=sys.stderr)


def _of_meeting(problem: Exception) -> str:
    """Return the message for hosts that cannot meet: torch raises the same for a lost host and a wrong address."""
    from ttp.launch.stand_by import SPARE

    reason = (str(problem.__cause__ or problem) or type(problem).__name__).partition("\nException raised from")[0]
    if reason == SPARE:
        return f"ttp run: {SPARE}"
    return (
        f"ttp run: the hosts of the job cannot meet: {reason}\nProbably the launcher on another host has left, such as "
        "after SIGTERM: its log says why; or that host is lost. Start the job again on all hosts; what was saved stays"
    )


class _TorchLaunch(Launch):
    """One call of torch's launcher with ttp's agent."""

    def __init__(self, argv: list[str]) -> None:
        self._arguments = _parse(argv)
        super().__init__(self._arguments, several_nodes=_nodes(self._arguments.nnodes) > 1)
        self.elastic = self._arguments.elastic
        self._agent: Any = None

    def run(self, config: Config) -> int:
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
        from torch.distributed.elastic.rendezvous.api import RendezvousError
        from torch.distributed.run import run as torchrun

        from ttp.launch.stand_by import HostMissingError

        _check_program(self._arguments)
        try:
            with self._our_agent(config):
                record(torchrun)(self._arguments)
        except ConfigError as problem:
            if self._agent is None or not self._agent.exit_codes():
                raise
            logger.error("the job is not started again here: %s", problem)
        except SignalException as problem:
            _show(problem)
            return self._unless_saved(128 + problem.sigval)
        except ChildFailedError as problem:
            _show(problem)
        except (RendezvousError, DistError) as problem:
            if not isinstance(problem, HostMissingError):  # else the log has said it
                _show(_of_meeting(problem))
            return self._unless_saved(EXIT_FAILED)
        except Exception as problem:
            if self._agent is None and isinstance(problem, socket.gaierror):
                endpoint = self._arguments.rdzv_endpoint
                return refuse(UNKNOWN_NAME.format(problem.strerror, socket.gethostname(), endpoint))
            if self._agent is None and isinstance(problem, (ValueError, AssertionError, RuntimeError, OSError)):
                return refuse(str(problem) or f"torch's launcher does not accept these flags: {problem!r}")
            _show(traceback.format_exc())
        else:
            return self._code(EXIT_TRAINED)
        return self._code(EXIT_FAILED)

    def _unless_saved(self, code: int) -> int:
        """Return the job's exit code; if it is 1, ``code``, or 75 when the job was being started again after a save."""
        found = self._code(EXIT_FAILED)
        if found != EXIT_FAILED or self._agent is None or not self._agent.saved_before:
            return code if found == EXIT_FAILED else found
        logger.warning("no rank had joined the job again: nothing is lost since it was saved")
        return EXIT_SAVED

    def _code(self, without_agent: int) -> int:
        return without_agent if self._agent is None else int(self._agent.job_code)

    def tell_others(self, text: str) -> None:
        """Tell the other hosts, if the job can form neither with another host nor with fewer hosts."""
        from torch.distributed.run import parse_min_max_nnodes

        from ttp.launch.refusal import tell

        fewest, hosts = parse_min_max_nnodes(self._arguments.nnodes)
        if self.several_nodes and fewest == hosts and not self._arguments.stand_by:
            name = os.environ.get("TTP_HOST") or socket.gethostname()
            tell(self._arguments, hosts, f"host {name} is refused: {text}")

    def _our_agent(self, config: Config) -> AbstractContextManager[None]:
        from ttp.launch.install import agent_maker, installed
        from ttp.launch.torch_compat import differences

        unknown = differences()
        if unknown:
            logger.warning("ttp does not know this version of torch; ranks may be stopped while they save: %s", unknown)
            return nullcontext()
        return installed(agent_maker(config, self._remember, stand_by=self._arguments.stand_by))

    def _remember(self, agent: Any) -> None:
        self._agent = agent


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
