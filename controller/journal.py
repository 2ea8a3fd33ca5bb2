"""Incident files: one JSON-lines file each under ``save_dir/incidents/``.

Written by a thread of its own: a slow or hanging disk delays the story, never the rescue.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttp.controller.driver import Happening

log = logging.getLogger("ttp.controller")

FOLDER = "incidents"
LINES_MAX = 100_000
_FSYNC_AFTER = {"committed", "released", "closed", "thawed"}


class Journal:
    """Appends happenings to the file of their incident; falls back to ``run_dir`` where save_dir cannot be written."""

    def __init__(self, run_dir: Path) -> None:
        self._fallback = run_dir
        self._inbox: queue.SimpleQueue[tuple[str, Happening] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ttp-journal", daemon=True)
        self._thread.start()

    def write(self, save_dir: str, happening: Happening) -> None:
        """Queue one line; never blocks. What a disk that hangs has not taken for so long is lost."""
        if self._inbox.qsize() < LINES_MAX:
            self._inbox.put((save_dir, happening))

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for at most ``timeout_s``."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            save_dir, happening = item
            line = _line(happening)
            for base in (Path(save_dir) if save_dir else None, self._fallback):
                if base is not None and _append(base, happening, line):
                    break


def _line(happening: Happening) -> str:
    head = {
        "sequence": happening.sequence,
        "unix_s": round(happening.unix_s, 6),
        "monotonic_s": round(happening.monotonic_s, 6),
        "kind": happening.kind,
        "incident": happening.incident,
    }
    return json.dumps({**head, **json.loads(happening.facts)}) + "\n"


def _append(base: Path, happening: Happening, line: str) -> bool:
    try:
        folder = base / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{happening.incident}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            if happening.kind in _FSYNC_AFTER:
                os.fsync(file.fileno())
    except (OSError, ValueError) as problem:  # ValueError: no path that can be
        log.warning("cannot write the incident under %s: %s", base, problem)
        return False
    return True
