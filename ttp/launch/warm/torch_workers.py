"""Forked workers under torch's elastic agent."""

from __future__ import annotations

import inspect
import logging
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from ttp.launch.held_signals import signals_held
from ttp.launch.warm.starter import WarmStarter

logger = logging.getLogger("ttp.launch")

KILLED_S = 1.0
"""Seconds to wait for the end of a worker that was killed."""


@contextmanager
def forking(warm: WarmStarter, go_on: tuple[str, str] = ("", ""), *, together: bool = False) -> Iterator[None]:
    """Fork workers that torch starts while the block runs, where that is equivalent.

    Args:
        warm: forks them.
        go_on: files with the output and error of a worker's seat so far, to which this worker's are appended: torch
            would empty them. Empty: as torch is told.
        together: the block starts all workers of a launch. A signal that comes after the first one has started is
            handled after the block, when torch knows all of them and can let them save.
    """
    place: Any = api
    stock = getattr(place, "get_subprocess_handler", None)
    if not _known(stock):
        warm.refuse("this version of torch starts its workers in a way that ttp does not know")
        yield
        return

    made: list[SubprocessHandler] = []

    class Handler(SubprocessHandler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if together and not made:  # not before the block: torch puts its handlers into place first
                held.enter_context(signals_held())
            with signals_held():
                super().__init__(*args, **kwargs)
                made.append(self)

        def _popen(self, args: Any, env: Any) -> Any:
            out, err = (Path(path).open("a") if path else None for path in go_on)  # noqa: SIM115 # torch closes them
            self._stdout, self._stderr = out or self._stdout, err or self._stderr
            return warm.worker(list(args), env, self._stdout, self._stderr) or super()._popen(args, env)

    place.get_subprocess_handler = Handler
    with ExitStack() as held:
        try:
            yield
        except BaseException:  # such as a signal: torch does not know the workers that it has started so far
            with signals_held():
                for handler in made:
                    with suppress(ProcessLookupError):
                        handler.close(signal.SIGKILL)
                for handler in made:
                    with suppress(subprocess.TimeoutExpired):
                        handler.proc.wait(KILLED_S)
            raise
        finally:
            place.get_subprocess_handler = stock


def start_worker(
    entrypoint: str, args: tuple[str, ...], env: dict[str, str], local_rank: int, numa_options: Any = None
) -> Any:
    """Start a worker as torch's agent does, and return torch's handler of it. Call it in a block of ``forking``."""
    place: Any = api
    newer = "numa_options" in inspect.signature(SubprocessHandler).parameters  # than torch 2.7
    return place.get_subprocess_handler(
        entrypoint=entrypoint, args=args, env=env, stdout=None, stderr=None, local_rank_id=local_rank,
        **({"numa_options": numa_options} if newer else {}),
    )  # fmt: skip


def _known(maker: Any) -> bool:
    """Return whether torch makes its handlers and their processes as ``Handler`` above expects."""
    popen = getattr(SubprocessHandler, "_popen", None)
    if maker is None or popen is None:
        return False
    same = list(inspect.signature(maker).parameters) == list(inspect.signature(SubprocessHandler).parameters)
    made = set(inspect.unwrap(SubprocessHandler.__init__).__code__.co_names)
    given = list(inspect.signature(popen).parameters)
    return same and made >= {"_popen", "_stdout", "_stderr"} and given == ["self", "args", "env"]
