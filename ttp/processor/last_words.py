"""Says why a rank exits: on stderr, and in files for ``ttp verdict`` and torchelastic."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import textwrap
import time
import traceback
from pathlib import Path

from ttp.errors import EXIT_BAD_CONFIG, ConfigError, DirectoryInUseError, SeatTakenError
from ttp.launch.rank_names import in_torchruns_names
from ttp.processor.faults import called_torch_at, describe, errors_of, is_collective_error
from ttp.store.durable import replace_file

log = logging.getLogger("ttp")

SHOWN = 200
"""Characters of a failed collective's text in the log: it follows from the fault, and the incident has the rest."""

_asked_dir = ""
"""The save_dir that the program has named last, even if it could not be used."""


def asked_for(save_dir: str) -> None:
    """Remember the save_dir that the program asks for: where a relative path is now, as it may change directory."""
    global _asked_dir
    from ttp.store.writable import as_path

    _asked_dir = ""
    with contextlib.suppress(ConfigError, OSError):
        _asked_dir = str(as_path(os.environ.get("TTP_SAVE_DIR") or save_dir))


def leave_word(why: object) -> None:
    """Record for ``ttp verdict`` that this rank exits with 64, and why. Never raises.

    In a directory that another job uses, or the job whose rank another process is, nothing is recorded: it would be
    taken for the end of that job.
    """
    directory = _asked_dir or os.environ.get("TTP_SAVE_DIR")
    if not os.environ.get("TTP_PORT") or not directory or isinstance(why, (DirectoryInUseError, SeatTakenError)):
        return
    from ttp.store import history
    from ttp.store.writable import as_path

    with contextlib.suppress(ConfigError, OSError):
        environ = in_torchruns_names(os.environ)
        rank = f"rank {environ.get('RANK', '?')}"
        text = str(why).removeprefix(f"{rank} exits with {EXIT_BAD_CONFIG}: ")  # as the log says it
        text = f"{rank} exited with {EXIT_BAD_CONFIG}: {text}"
        history.leave_word(as_path(directory), environ.get("TORCHELASTIC_RUN_ID", "none"), text)


def complain(text: str, trace: str = "") -> None:
    """Log an error for which this process exits, and print it if the log does not show it on stderr. Never raises.

    Args:
        text: the error.
        trace: its traceback, where that helps the user; or empty.
    """
    handlers = (*log.handlers, *(logging.getLogger().handlers if log.propagate else ()))
    handlers = tuple(h for h in handlers if log.isEnabledFor(logging.ERROR) and h.level <= logging.ERROR)
    if handlers:  # else Python would print it
        log.error("%s", f"{text}\n{trace}".rstrip())
    if not any(getattr(each, "stream", None) is sys.stderr for each in handlers):
        with contextlib.suppress(OSError, ValueError):  # nobody may read it any more, or the program has closed it
            print(f"{trace}ttp: {text}", file=sys.stderr)


def log_error(rank: int, problem: BaseException) -> str:
    """Log an exception of ``train()`` and return its traceback.

    A failed collective is one line, a warning: when a rank dies, all others raise one, and their tracebacks would hide
    the reason.
    It is not if the program called it because of another error, which the traceback shows.

    Args:
        rank: this rank.
        problem: the exception.
    """
    detail = "".join(traceback.format_exception(problem))
    line = called_torch_at(problem) if is_collective_error(problem) and len(errors_of(problem)) == 1 else ""
    if line:
        log.warning(  # it comes before the cause, which the controller tells when the state is saved
            "rank %s: a collective failed at %s, as it does when another rank is lost; asking the controller why: %s "
            "(`ttp incidents DIR --last --detail` shows the traceback)",
            rank,
            line,
            textwrap.shorten(describe(problem), SHOWN, placeholder="..."),
        )
    else:
        log.error("rank %s: %s\n%s", rank, describe(problem), detail)
    return detail


def write_error_file(problem: BaseException) -> None:
    """Tell torchelastic what happened, so that its report does not say ``error_file: <N/A>``.

    The file appears whole or not at all: another thread may end this process at any moment.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    trace = "".join(traceback.format_exception(problem))
    content = {
        "message": {
            "message": describe(problem),
            "extraInfo": {"py_callstack": trace, "timestamp": str(int(time.time()))},
        }
    }
    with contextlib.suppress(OSError):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(Path(path), json.dumps(content).encode())
