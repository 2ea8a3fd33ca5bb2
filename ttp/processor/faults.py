"""Classifies exceptions of a training loop: the death of another rank, lack of device memory, or the rank's own."""

from __future__ import annotations

import re
from pathlib import Path

_COLLECTIVE = re.compile(
    r"gloo|nccl|hccl|mccl|ProcessGroup|Connection (closed|reset) by peer|connectFullMesh|DistStoreError|"
    r"DistNetworkError|DistBackendError|TCPStore|AllReduce|Broken pipe|Socket Timeout|Timed out waiting \d+ms|"
    r"caused pair closure|the barrier before the update broke|"
    r"kernel failed[^:]*: ?\S*\b(All(Gather|toAll)V?C?|Reduce(ScatterV?)?|Broadcast|Barrier|Send|Receive)-op",
    re.IGNORECASE,
)
_LIBRARIES = ("torch", "ttp")
_WRAPPERS = ("contextlib", "functools", "typing_extensions")  # through which torch calls its own functions
_SIGNED = re.compile(r"gloo/transport|ProcessGroup(Gloo|NCCL)|NCCL error")  # by torch's C++ code
_STAGE = re.compile(r"\s*(\[Stage \d+\] failed to run forward|Failed to run stage backward)")
_KINDS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "ConnectionError")


def is_collective_error(problem: BaseException) -> bool:
    """Return whether an exception is an error of a collective, as the death of another rank causes it here.

    So is one that the program has made of such an error (``raise TrainingError() from error``, ``sys.exit(1)``).
    """
    behind: BaseException | None = problem
    seen: list[int] = []
    while behind is not None and id(behind) not in seen:
        inside = _inside(behind)
        named = any(kind.__name__ in _KINDS for kind in type(inside).__mro__)
        if named and _COLLECTIVE.search(f"{type(inside).__name__}: {_text(inside)}"):
            return True
        seen.append(id(behind))
        behind = behind.__cause__ or behind.__context__
    return False


def errors_of(problem: BaseException) -> list[BaseException]:
    """Return an exception, and the one behind it if it is of a collective that a ``finally`` or ``except`` called."""
    behind: BaseException | None = problem
    seen: list[int] = []  # a program may raise an error from itself
    while behind is not None and id(behind) not in seen and is_collective_error(behind):
        seen.append(id(behind))
        behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)
    return [problem] if behind is None or id(behind) in seen or behind is problem else [problem, behind]


def is_out_of_device_memory(problem: BaseException) -> bool:
    """Return whether a device ran out of memory, for a tensor or for the process's own device context."""
    problem = _inside(problem)
    out = any(kind.__name__ == "OutOfMemoryError" for kind in type(problem).__mro__)
    return out or (isinstance(problem, RuntimeError) and "CUDA error: out of memory" in _text(problem))


def describe(problem: BaseException) -> str:
    """Return an exception as one line of at most 500 characters: the first that says something. MindSpore frames it."""
    inside = _inside(problem)
    kind, lines = type(inside).__name__, _text(inside).splitlines()
    first = next((line for line in lines if any(map(str.isalnum, line))), "")
    text = (f"{kind}: {first}" if first else kind) + (" (in a pipeline stage)" if inside is not problem else "")
    return text if len(text) <= 500 else text[:497] + "..."


def called_torch_at(problem: BaseException) -> str:
    """Return the line of the program (``train.py:57``) whose call of torch has raised; empty: torch has not raised."""
    found, within, trace = "", "", problem.__traceback__
    while trace is not None:
        within = str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if within not in (*_LIBRARIES, *_WRAPPERS):
            found = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found if within in _LIBRARIES or _SIGNED.search(_text(problem)) else ""


def _inside(problem: BaseException) -> BaseException:
    """Return the error inside the one that a pipeline stage of torch raises, which tells only the stage's arguments."""
    return problem.__cause__ if problem.__cause__ is not None and _STAGE.match(_text(problem)) else problem


def _text(problem: BaseException) -> str:
    """Return the text of an exception, whose class may belong to the program and fail to make one."""
    try:
        return str(problem)
    except Exception:
        return "<exception str() failed>"  # as in a traceback
