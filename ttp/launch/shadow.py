"""Copies a held checkpoint from the memory of this host to the storage, while the job trains on.

``python -m ttp.launch.shadow`` runs this *writer* in a process and session of its own, which outlives ranks, launcher
and controller. A rank that begins to write a checkpoint to memory starts the writer. The launcher restarts a writer
that was killed, and waits for the writer before it ends itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ttp.aside import aside
from ttp.core import messages as m
from ttp.core.layout import Rank, Version
from ttp.errors import CheckpointError
from ttp.launch.own_module import own_module
from ttp.polling import poll
from ttp.store import catalog, names
from ttp.store.commit import NewCheckpoint
from ttp.store.disk import Disk
from ttp.store.durable import make_directory
from ttp.store.held import PREFIX, Held, Order, State
from ttp.store.manifest import Manifest
from ttp.store.mounts import Mounts
from ttp.store.piece_file import copy_piece
from ttp.store.verify import verify_checkpoint

log = logging.getLogger("ttp.launch")

LOOK_S, LOOK_MAX_S, LOOK_PART = 0.02, 1.0, 0.05
"""Least and most seconds between two looks at the files in memory, and the part of the time waited so far in between.

Ranks may never write the checkpoint, as the alarm was false, and each look reads the slow storage, too.
"""
RETRY_MIN_S, RETRY_MAX_S = 0.1, 5.0
"""Shortest and longest pause in seconds after a copy has failed; the pause is doubled each time."""
START_S = 10.0
"""Seconds that the writer may take to start."""
AGAIN_S = 1.0
"""Seconds between two checks of a launcher whether the writer runs."""
THREADS = 4
FOLDER = "held"
"""Folder in the run directory with one file for each directory in memory; the file contains that directory's path."""


class Writer:
    """Copies checkpoints from one directory in memory to the storage.

    Args:
        held: the directory in memory.
        order: the order that names the checkpoint and the directories that receive it.
    """

    def __init__(self, held: Held, order: Order) -> None:
        self._held, self._order = held, order
        self._places = [Path(place) for place in (order.save_dir, order.fallback_dir) if place]
        self._mounts = Mounts(*self._places)
        self._state = held.state()
        self._damaged = set[tuple[Path, str]]()
        self._said_s = 0.0
        self._lock = threading.Lock()

    def run(self) -> bool:
        """Copy until the ordered checkpoint is durable, or the order's ``patience_s`` is over.

        Returns:
            False if a checkpoint is still in memory only.
        """
        began, pause_s, tries = time.monotonic(), RETRY_MIN_S, 0
        until, there = began + self._order.patience_s, self._held.names()
        if not self._held.unfinished():
            self._drop(there)
        while time.monotonic() < until and self._held.usable:
            found = self._held.checkpoint()
            if found is None:
                if self._is_late():
                    break
                time.sleep(min(LOOK_MAX_S, max(LOOK_S, LOOK_PART * (time.monotonic() - began))))
                continue
            if self._state.incident != found[1].incident:
                self._state = State(found[1].incident)
            try:
                self._done(*self._make_durable(*found, self._places[tries % len(self._places)]))
                if found[1].incident == self._order.incident:
                    return True
            except (OSError, CheckpointError) as problem:
                level = logging.WARNING if str(problem) != self._state.problem else logging.DEBUG
                log.log(level, "step %s is still held in memory only: %s", found[1].version, problem)
                self._say(problem=str(problem))
            tries += 1
            time.sleep(pause_s)
            pause_s = min(RETRY_MAX_S, 2 * pause_s)
        there = self._held.names()
        if self._held.checkpoint() is None:
            self._drop(there, self._order.incident)  # the checkpoint in memory was given up
            return True
        return False

    def _drop(self, there: list[str], over: str = "") -> None:
        """Remove what was ``there``, but not what ranks may be writing.

        Args:
            there: the names in memory before the last look showed that nothing there is needed.
            over: the incident whose checkpoint is durable, or was given up; empty: none is.
        """
        newest = self._held.order() or self._order
        kept = newest.draft if newest.incident != over else ""
        self._held.drop(name for name in there if not (kept and name.startswith(kept)))

    def _is_late(self) -> bool:
        """Return whether the storage already has a whole checkpoint of the ordered version or a newer one."""
        draft = names.parse_draft_name(self._order.draft)
        with contextlib.suppress(CheckpointError, OSError):
            return draft is not None and any(self._sound(place, draft[0]) for place in self._places)
        return False

    def _sound(self, place: Path, version: Version) -> Path | None:
        """Return the newest checkpoint in ``place`` that is of ``version`` or newer and not damaged; None: none is.

        No damaged one is read twice.

        Raises:
            CheckpointError: ``place`` cannot be listed.
        """
        for entry in catalog.restorable(catalog.scan(place)):
            if (entry.version or 0) < version or (entry.path, entry.manifest_digest) in self._damaged:
                continue
            try:
                catalog.sound(entry, fresh=True)
            except CheckpointError as problem:
                self._damaged.add((entry.path, entry.manifest_digest))
                log.warning("a checkpoint is held in memory until it is durable: it does not count that %s", problem)
            else:
                return entry.path
        return None

    def _make_durable(self, held: Path, manifest: Manifest, place: Path) -> tuple[Path, int]:
        """Copy a checkpoint to ``place``, unless a checkpoint there is as new and not damaged.

        Returns:
            Path and size in bytes of the checkpoint there, which was verified.

        Raises:
            CheckpointError: the checkpoint was damaged in memory or on the storage.
            OSError: the storage refused a read or a write.
        """
        self._mounts.check(place)
        make_directory(place)
        path = self._sound(place, manifest.version)
        if path is None:
            self._write(held, manifest, place)
            path = place / names.checkpoint_name(manifest.version)
            if wrong := verify_checkpoint(path, fresh=True):
                self._set_aside(path, manifest)
                raise CheckpointError(f"{path} differs from what was written: {'; '.join(wrong[:3])}")
        return path, Manifest.load(path).size

    def _write(self, held: Path, manifest: Manifest, place: Path) -> None:
        draft, disk, began = names.draft_name(manifest.version, f"{manifest.incident}-held"), Disk(), time.monotonic()
        disk.make_directory(place / draft)
        copy = functools.partial(self._copy, held, place / draft)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(copy, manifest.pieces))
        for directory in disk.tree(place / draft)[0]:
            disk.sync_directory(directory)
        order = m.Commit(
            Rank(0), 0, manifest.incident, 0, manifest.version, manifest.incarnation, draft, manifest.cause,
            manifest.reason, self._order.keep, manifest.pieces, manifest.missing_pages,
        )  # fmt: skip
        facts = manifest.run_id, manifest.world_size, manifest.groups, manifest.framework
        NewCheckpoint(place, order, *facts, finalise=lambda _: (), manifest=manifest).commit()
        if place == self._places[0]:
            self._held.note_speed(manifest.size, time.monotonic() - began)

    def _copy(self, held: Path, draft: Path, piece: m.Piece) -> None:
        target = draft / piece.file
        if target.parent != draft:
            Disk().make_directory(target.parent)
        copy_piece(piece, held / piece.file, target, self._wrote)

    def _set_aside(self, path: Path, manifest: Manifest) -> None:
        """Rename a checkpoint that was damaged on the storage, so that it can be written again under its name."""
        with contextlib.suppress(OSError):
            path.rename(path.with_name(names.removed_name(manifest.version, time.time_ns())))

    def _wrote(self, count: int) -> None:
        with self._lock:
            self._state = replace(self._state, written=self._state.written + count)
            if time.monotonic() > self._said_s + AGAIN_S / 10:
                self._said_s = time.monotonic()
                self._say()

    def _say(self, **changes: object) -> None:
        self._state = replace(self._state, **changes)  # type: ignore[arg-type]
        with contextlib.suppress(OSError):
            self._held.say(self._state)

    def _done(self, path: Path, size: int) -> None:
        after_s, there = time.time() - self._order.began_unix_s, self._held.names()
        self._say(path=str(path), size=size, problem="")  # from now on ranks may write the next one to memory
        log.info("%s is durable and verified, %.1f s after it was held in memory", path, after_s)
        with contextlib.suppress(OSError):
            self._note(path, size, after_s)
        catalog.tidy(path.parent, self._order.keep, path.name, verified=True)
        self._drop(there, self._state.incident)

    def _note(self, path: Path, size: int, after_s: float) -> None:
        """Add a record that the checkpoint is durable to the journal of its incident."""
        facts: dict[str, object] = {
            "sequence": 0,
            "unix_s": round(time.time(), 6),
            "monotonic_s": round(time.monotonic(), 6),
            "kind": "durable",
            "incident": self._state.incident,
            "version": names.parse_checkpoint_name(path.name),
            "path": str(path),
            "size": size,
            "after_ms": round(after_s * 1e3, 3),
        }
        file = path.parent / names.INCIDENTS / f"{self._state.incident}.jsonl"
        with file.open("a") as log_file:
            log_file.write(f"{json.dumps(facts)}\n")
            log_file.flush()
            os.fsync(log_file.fileno())


def serve(held: Held, done: Callable[[], bool] = lambda: False) -> None:
    """Start a writer process for a directory in memory, unless one is running, and wait until it runs.

    Args:
        held: the directory in memory.
        done: returns whether no writer is needed any more: one that has little to do may have ended already.

    Raises:
        OSError: the writer did not start within ``START_S``.
    """
    if held.is_served() or done():
        return
    command = [*own_module("ttp.launch.shadow"), str(held.root)]
    nothing = subprocess.DEVNULL
    with contextlib.suppress(subprocess.TimeoutExpired):  # the process forks the writer and ends
        subprocess.Popen(command, stdin=nothing, stdout=nothing, start_new_session=True).wait(START_S)
    if not poll(lambda: held.is_served() or done(), START_S, LOOK_S / 4):
        raise OSError("the process that copies a checkpoint from memory to the storage did not start")


def _restart(lost: list[Held]) -> None:
    for held in lost:
        _serve_again(held)


def _serve_again(held: Held) -> None:
    try:
        serve(held, lambda: not held.unfinished())
    except OSError as problem:
        log.warning("%s: %s", held.root, problem)


class Shadows:
    """Looks after the writers of a job, on behalf of its launcher on this host.

    Args:
        run_dir: run directory of the job on this host.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._looked_s = 0.0
        self._starts: threading.Thread | None = None

    def look(self) -> None:
        """Restart writers that were killed, on a thread. Call it often: it checks once in ``AGAIN_S`` seconds."""
        busy = self._starts is not None and self._starts.is_alive()
        if not busy and time.monotonic() > self._looked_s + AGAIN_S:
            self._looked_s = time.monotonic()
            lost = [held for held in self._unfinished() if not held.is_served()]
            if lost:
                with contextlib.suppress(RuntimeError):  # no room for another thread: the next look comes soon
                    self._starts = aside("ttp-shadows", functools.partial(_restart, lost))

    def wait(self, patience_s: float) -> bool:
        """Wait until all checkpoints in memory are durable, then remove them. Call it before the launcher ends.

        Args:
            patience_s: seconds to wait at most.

        Returns:
            True if all checkpoints are durable.
        """
        until, warned = time.monotonic() + patience_s, False
        while open_ones := self._unfinished():
            if time.monotonic() > until:
                where = ", ".join(str(held.root) for held in open_ones)
                log.error(
                    "a checkpoint in memory (%s) could not be copied to the storage: restart the job on this host",
                    where,
                )
                return False
            if not warned:
                log.warning("waiting until the checkpoint in memory is copied to the storage")
                warned = True
            self.look()
            time.sleep(LOOK_S)
        for held in self._known():
            shutil.rmtree(held.root, ignore_errors=True)
        return True

    def _unfinished(self) -> list[Held]:
        return [held for held in self._known() if held.unfinished() or (held.checkpoint() and held.is_served())]

    def _known(self) -> list[Held]:
        with contextlib.suppress(OSError):
            found = [Held(Path(path.read_text())) for path in self._folder.iterdir()]
            return [held for held in found if held.usable and held.root.name.startswith(PREFIX)]
        return []


def main(root: Path) -> int:
    """Run the writer for the directory ``root`` in memory, in a child process.

    Returns:
        The exit code: 1 if a checkpoint is still in memory only.
    """
    if os.fork():
        return 0  # the parent ends, so that no process of the job has to wait for the writer
    os.setsid()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s [ttp] %(message)s")
    held = Held(root)
    with held.serving() as mine:
        while mine and (order := held.order()) is not None:
            if not Writer(held, order).run():
                return 1
            newest = held.order()
            if newest is None or newest.draft == order.draft:  # the ranks' orders differ in their times
                break
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
