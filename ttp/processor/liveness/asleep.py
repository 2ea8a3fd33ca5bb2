"""Tells whether a thread sleeps in a call of torch that does not return although the connections of groups are broken.

gloo does not wake a thread whose message was on its way when the connection broke: one that was sent or received in
part, or one that was given to a socket whose other end had just closed. That thread waits until the timeout of the
group. The same holds for a thread that waits in a store for a dead rank, in order to make a group with it.
"""

from __future__ import annotations

import linecache
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ttp.aside import aside

LOOK_S = 2.0
"""Seconds that the thread has to sleep without a break. A thread that computes, or waits for a CPU, does not sleep."""
_POLL_S = 0.05


def watch(thread: tuple[int, int], awaited: Callable[[], bool], found: Callable[[], object]) -> None:
    """Watch ``thread`` on a thread of its own, and call ``found`` if it sleeps in torch.

    Args:
        thread: ``threading.get_ident()`` and ``get_native_id()`` of the thread.
        awaited: returns whether to go on watching.
        found: ends the process.
    """

    def look() -> None:
        looked_s, before = time.monotonic(), ""
        while awaited():
            time.sleep(_POLL_S)
            if time.monotonic() >= looked_s + LOOK_S:
                now = _sleep(*thread)
                if now and now == before:
                    found()
                looked_s, before = time.monotonic(), now

    aside("ttp-asleep", look)


def _sleep(ident: int, native_id: int) -> str:
    """Return the thread's count of sleeps, as text, if it sleeps in torch now; else, or if that is not known, empty.

    If two results are equal, the thread has slept in between without a break.
    """
    frame = sys._current_frames().get(ident)
    if frame is None or not _in_torch(frame):
        return ""
    try:
        said = Path(f"/proc/self/task/{native_id}/status").read_text()
    except OSError:
        return ""
    return said.partition("\nvoluntary_ctxt_switches:")[2] if "\nState:\tS" in said else ""


def _in_torch(frame: FrameType) -> bool:
    """Return whether the innermost Python code of a thread is in torch, or calls ``wait()`` of an object in C.

    Waiting for data (``torch.utils.data``) may take long.
    """
    module = str(frame.f_globals.get("__name__"))
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
    return ".wait(" in line or (module.startswith("torch.") and not module.startswith("torch.utils.data."))
