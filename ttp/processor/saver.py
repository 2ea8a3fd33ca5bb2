"""Carries out a rank's slow disk work, writing pieces and committing, on a thread that is abandoned if it hangs."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ttp.core import messages as m
from ttp.core.layout import Version
from ttp.core.rank import events as ev
from ttp.processor.copies.copier import Copying
from ttp.processor.holding import Holding
from ttp.processor.local_state.local_piece import lent, not_kept
from ttp.processor.rank_job import RankJob
from ttp.processor.serial_worker import SerialWorker
from ttp.processor.source import Cancelled, MovedError
from ttp.store.catalog import drafts_left, remove_unchanged, tidy
from ttp.store.commit import NewCheckpoint
from ttp.store.digest import Progress
from ttp.store.disk import Disk
from ttp.store.durable import make_directory
from ttp.store.mounts import Mounts

log = logging.getLogger("ttp.processor")

KEEP_S = 1.0
"""Seconds that a save waits for pages of other hosts that have just arrived and are being stored."""
CACHES_S = 60.0
"""Seconds for which a host may show old sizes and times of files that another host writes (NFS)."""


class Saver:
    """Carries out orders to save and to commit.

    Args:
        job: the rank, the adapter that writes its state, and the directory of checkpoints; an order may name another.
        copying: second copies of shards of other ranks, which are saved like this rank's own; None: there are none.
        holding: keeps checkpoints in memory.
        version: returns the version of the state.
        wait_pages: waits at most so many seconds until pages that have arrived are stored.
        put: takes the result of an order; called on the saver's thread.
        wrote: called with the number of bytes written for copies and commits; the source counts its own.
        look_again: inspects and reports the state again; returns when that is done.
    """

    def __init__(
        self,
        job: RankJob,
        copying: Copying | None,
        holding: Holding,
        *,
        version: Callable[[], Version],
        wait_pages: Callable[[float], bool],
        put: Callable[[ev.Event], None],
        wrote: Callable[[int], None],
        look_again: Callable[[], None],
    ) -> None:
        self._job, self._source, self._copying, self._holding = job, job.source, copying, holding
        fallback = job.config.fallback_dir
        self._mounts = Mounts(job.save_dir, *([Path(fallback)] if fallback else []))
        self._version, self._wait_pages, self._put, self._wrote = version, wait_pages, put, wrote
        self._look_again = look_again
        self._worker, self._tidying = SerialWorker("ttp-saver", at_once=True), SerialWorker("ttp-tidy")
        self._cancel = threading.Event()
        self._refusals: set[tuple[str, int | None]] = set()

    @property
    def busy(self) -> bool:
        """True while a job runs or waits to be run."""
        return self._worker.busy

    def save(self, order: m.Save) -> None:
        """Write this rank's pieces of a checkpoint."""
        self._cancel = cancel = threading.Event()
        self._work(lambda: self._save_and_report(order, cancel))

    def cancel(self) -> None:
        """Cancel the running save."""
        self._cancel.set()

    def commit(self, order: m.Commit) -> None:
        """Commit a checkpoint from the pieces that all savers have written."""
        self._work(lambda: self._commit_and_tidy(order))

    def tidy(self, directory: Path, keep: int, newest: str, *, verified: bool) -> None:
        """Remove old checkpoints when there is time for it; see ``ttp.store.catalog.tidy``.

        At a restart (``verified``) also remove drafts newer than ``newest`` that do not change for longer than a save
        may take: they are left from saves that failed, and the next save may need their room.
        """

        def remove() -> None:
            tidy(directory, keep, newest, verified=verified)
            with contextlib.suppress(OSError, RuntimeError):  # the next restart tries again
                if verified and (left := drafts_left(directory)):
                    wait_s = self._job.config.rescue_patience_s + CACHES_S
                    later = threading.Timer(wait_s, self._tidying.submit, [lambda: remove_unchanged(directory, left)])
                    later.daemon = True
                    later.start()

        with contextlib.suppress(RuntimeError):  # no thread can be started: the next commit removes them
            self._tidying.submit(remove)

    def close(self) -> None:
        """Take no more orders."""
        self._worker.close()
        self._tidying.close()

    def _directory(self, order: m.Save | m.Commit) -> Path:
        """Return the directory of the checkpoint of this order.

        Raises:
            OSError: it is not mounted any more.
        """
        directory = Path(order.directory) if order.directory else self._job.save_dir
        self._mounts.check(directory)
        return directory

    def _work(self, job: Callable[[], None]) -> None:
        """Run a job on the saver thread. A thread that still blocks in a cancelled job is abandoned."""
        if self._worker.busy:
            self._worker.leave_behind()
        self._worker.submit(job)

    def _save_and_report(self, order: m.Save, cancel: threading.Event) -> None:
        if (done := self._save(order, cancel)) is not None:
            self._put(ev.Worked(done))

    def _save(self, order: m.Save, cancel: threading.Event) -> m.Saved | m.SaveFailed | None:
        work = order.rank, order.incident, order.generation
        try:
            if self._holding.holds(order):
                self._holding.begin(order, self._job.config.keep)
            draft = self._directory(order) / order.draft
            make_directory(draft.parent)  # it may have been removed since, or could not be made at the start
            draft.mkdir(exist_ok=True)
            self._wait_pages(KEEP_S)  # pages of dead ranks may have come a moment ago
            pieces = self.pieces(order, draft, cancel.is_set)
            return m.Saved(*work, tuple(pieces))
        except Cancelled:
            return None
        except MovedError as problem:
            log.warning("version %s was not saved: %s", order.version, problem)
            self._look_again()  # so that the controller knows the state before it hears that the save failed
            return m.SaveFailed(*work, _words(problem), may_pass=True)
        except BaseException as problem:
            self._log_failure(order, "was not saved", problem)
            return m.SaveFailed(*work, _words(problem), _of_storage(problem))

    def _log_failure(self, order: m.Save | m.Commit, what: str, problem: BaseException) -> None:
        """Log why an order failed; with a traceback, unless the storage refused: that is no fault of the code.

        The order is given again every few seconds until the storage is repaired, and the second line says no more.
        """
        if not _of_storage(problem):
            log.error("version %s %s: %s", order.version, what, _words(problem), exc_info=problem)
            return
        refusal = order.incident, getattr(problem, "errno", None)
        level = logging.DEBUG if refusal in self._refusals else logging.ERROR
        self._refusals.add(refusal)
        hint = "if a rank has failed, this is tried again until TTP_OT is over: repair the storage before"
        log.log(level, "version %s %s: %s; %s", order.version, what, _words(problem), hint)

    def pieces(self, order: m.Save, draft: Path, cancelled: Callable[[], bool]) -> list[m.Piece]:
        """Write the pieces of an order, from the live state and from kept copies."""
        write = functools.partial(
            self._source.write_pieces,
            version=order.version,
            draft=draft,
            generation=order.generation,
            cancelled=cancelled,
        )
        copying = self._copying
        if copying is None:
            return write(order=order.order)
        copying.quiesce()
        live, from_kept = copying.split(order, self._version())
        pieces = [*write(order=live)] if live.shards or live.pages or live.job_state else []
        if from_kept.kept or from_kept.pages:
            pieces += copying.write_kept(from_kept, order, draft, cancelled, self._wrote)
        return pieces

    def _commit_and_tidy(self, order: m.Commit) -> None:
        """Commit and report the result; then let ``tidy`` remove old checkpoints, as far as the new one allows it."""
        done = self._commit(order)
        self._put(ev.Worked(done))
        path = Path(done.path) if isinstance(done, m.Committed) else None
        if path is not None and path.is_dir() and not self._holding.holds(order):
            self.tidy(path.parent, order.keep, path.name, verified=False)

    def _commit(self, order: m.Commit) -> m.Committed | m.CommitFailed:
        work = order.rank, order.incident, order.generation
        try:
            if self._source.saved_elsewhere:
                where, size = f"version {order.version}, {self._source.saved_elsewhere}", 0
            else:
                path, size = self._make(order)
                where = str(path)
            return m.Committed(*work, where, size)
        except BaseException as problem:
            self._log_failure(order, "was not committed", problem)
            return m.CommitFailed(*work, _words(problem), _of_storage(problem))

    def _make(self, order: m.Commit) -> tuple[Path, int]:
        if self._holding.is_on_its_way(order):
            return self._holding.await_durable(order, self._wrote)
        made = make_checkpoint(self._directory(order), order, self._job, self._wrote)
        if self._holding.holds(order):
            self._holding.serve(order)
        return made


def make_checkpoint(save_dir: Path, order: m.Commit, job: RankJob, progress: Progress) -> tuple[Path, int]:
    """Commit the pieces of ``order``, with the description of this job; see ``ttp.store.commit``.

    Args:
        save_dir: directory of checkpoints, which has the draft.
        order: the order to commit. Its pieces tell which rank-local pages are missing.
        job: the committing rank, and the adapter, which adds files of the framework.
        progress: called with bytes written.

    Returns:
        The checkpoint's path, and the bytes of all its pieces.

    Raises:
        CheckpointError: the checkpoint does not exist now.
    """
    return NewCheckpoint(
        save_dir,
        replace(order, missing_pages=not_kept(order.pieces, job.env.world_size)),
        run_id=job.env.run_id,
        world_size=job.env.world_size,
        groups=job.layout.groups,
        framework=job.source.framework,
        finalise=lambda directory: job.source.finalise(directory, order),
        lend=lent,
        disk=Disk(progress),
    ).commit()


def _of_storage(problem: BaseException) -> bool:
    """Return whether the storage caused an error, which may pass: space is freed, a server comes back."""
    return isinstance(problem, OSError) or isinstance(problem.__cause__, OSError)


def _words(problem: BaseException) -> str:
    if isinstance(problem, OSError) and problem.errno is not None:
        return f"{type(problem).__name__}: [errno {problem.errno}] {problem.strerror}: {problem.filename or ''}".rstrip(
            ": "
        )
    return f"{type(problem).__name__}: {problem}"
