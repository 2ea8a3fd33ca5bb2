"""Checks that the installed torch has the private names of torch's elastic agent that ttp uses.

If this version of torch differs, its launcher is left as it is: the job runs as under the stock launcher, with one
warning.
"""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any

logger = logging.getLogger("ttp.launch")


def differences() -> list[str]:
    """Return the expectations of ttp that this torch does not meet; empty: the agent can be extended."""
    try:
        return [text for text, holds in _expectations() if not holds]
    except Exception as problem:
        return [f"{type(problem).__name__}: {problem}"]


def _expectations() -> list[tuple[str, bool]]:
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import SubprocessContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.launcher import api

    return [
        ("launcher.api.launch_agent makes a LocalElasticAgent", "LocalElasticAgent" in _names(api.launch_agent)),
        ("LocalElasticAgent keeps its workers in _pcontext", "_pcontext" in _names(LocalElasticAgent._start_workers)),
        ("_monitor_workers(worker_group)", _accepts(LocalElasticAgent._monitor_workers, "worker_group")),
        ("_start_workers(worker_group)", _accepts(LocalElasticAgent._start_workers, "worker_group")),
        ("_restart_workers(worker_group)", _accepts(LocalElasticAgent._restart_workers, "worker_group")),
        ("_shutdown(death_sig)", _accepts(LocalElasticAgent._shutdown, "death_sig")),
        ("_stop_workers calls _shutdown", "_shutdown" in _names(LocalElasticAgent._stop_workers)),
        ("_invoke_run calls _exit_barrier", "_exit_barrier" in _names(SimpleElasticAgent._invoke_run)),
        ("run calls _shutdown", "_shutdown" in _names(SimpleElasticAgent.run)),
        ("SubprocessContext.subprocess_handlers", "subprocess_handlers" in _names(SubprocessContext.__init__)),
        ("SubprocessHandler.proc", "proc" in _names(SubprocessHandler.__init__)),
        ("WorkerGroup.master_addr", "master_addr" in _names(WorkerGroup.__init__)),
        ("WorkerGroup.group_rank", "group_rank" in _names(WorkerGroup.__init__)),
    ]


def _names(function: Any) -> tuple[str, ...]:
    """Return all global and attribute names in the code of a function, without its decorators."""
    code = inspect.unwrap(function).__code__
    return code.co_names


def _accepts(function: Any, parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


def forgive_replies() -> None:
    """Make torch ignore a rank's error report that cannot be read, from now on.

    A rank that is killed while it writes its report, or that runs out of disk space, leaves an incomplete file. Torch's
    launcher would end with an error when it reads that file, and not start the job again.
    """
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    kind: Any = ProcessFailure
    stock = kind.__post_init__
    if stock.__module__ == __name__:
        return

    def read(failure: Any) -> None:
        try:
            stock(failure)
        except (ValueError, TypeError, LookupError, OSError):
            failure.error_file = ""
            stock(failure)

    kind.__post_init__ = read


def name_methods_quickly() -> None:
    """Make torch find the name of the method that records an event of the rendezvous quickly, from now on.

    It calls ``inspect.stack``, which goes through all modules for many frames, about forty times for each restart.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    place: Any = dynamic_rendezvous
    place.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
