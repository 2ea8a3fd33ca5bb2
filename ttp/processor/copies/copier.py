"""Makes second copies of the state that only this rank has, while training goes on; see ``ttp.core.replication``.

Every ``buddy_every`` versions, a thread copies the state into the memory of the host, as the pieces that a save would
write. It does so during the next forward and backward pass, in which nothing changes the state. If the copy is not
finished before the next update, the training thread waits for it at the gate, up to ``HOLD_S``; a copy that takes
longer is dropped. Sending the copy to the other host, and everything else, happens while training goes on.

Nothing here raises into training, and no failure stops it. A copy that fails is logged, once for each reason, and tried
again at its next turn.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ttp.core import messages as m
from ttp.core.copy_messages import CopyTo
from ttp.core.decide import How
from ttp.core.layout import Rank, Shard, Version
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.core.replication import NOBODY, OwnCopies, keepers
from ttp.errors import CheckpointError
from ttp.processor.copies.store import Copy, CopyStore, NoRoomError
from ttp.processor.copies.transfer import Receiver, Sender
from ttp.processor.local_state.mirror import read_page_or_kept
from ttp.processor.local_state.pages import Page
from ttp.processor.rank_job import RankJob
from ttp.processor.serial_worker import SerialWorker
from ttp.processor.source import Cancelled
from ttp.store.durable import sync_directory
from ttp.store.piece_file import copy_piece

log = logging.getLogger("ttp.processor")

HOLD_S = 30.0
"""Seconds that an update may wait for the copy of the state that it is going to change."""
QUIESCE_S = 10.0
"""Seconds that a save waits until a copy that was given up no longer reads the state, which the save reads too."""
DEVICE_S = 30.0
"""Seconds that queued kernels of a version may take before its copy is given up."""

SHARD, PAGE, JOB = "shard", "rank_local", "job"
"""Kinds of pieces, as ``ttp.core.messages.Piece`` names them."""


@dataclass(slots=True)
class _Attempt:
    """A copy that is being made. ``through`` is set when it no longer reads the state, whether it succeeded or not."""

    version: Version
    through: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    reason: str = ""
    """Why the copy was given up; empty: it was not."""
    room: Callable[[], None] = lambda: None

    def give_up(self, reason: str) -> None:
        with self.lock:
            self.reason = self.reason or reason

    def check(self) -> None:
        """Raise ``Cancelled`` if the copy was given up."""
        if self.reason:
            raise Cancelled(self.reason)

    def cancelled(self) -> bool:
        """Return whether the copy was given up. ``StateSource.write_pieces`` asks between tensors and every few MiB."""
        try:
            self.room()
        except (NoRoomError, OSError) as problem:
            self.give_up(str(problem))
        return bool(self.reason)


class Copying:
    """Makes and keeps the second copies of one rank.

    Args:
        job: the rank, and the adapter that writes its state.
        receiver: takes the copies of other ranks.
        tell: takes events for the thread that owns the machine.
    """

    def __init__(self, job: RankJob, receiver: Receiver, tell: Callable[[ev.CopyMade | ev.CopySkipped], None]) -> None:
        self.every = job.config.buddy_every
        """Updates from one copy to the next."""
        self.waited_s = 0.0
        """Seconds that updates of this rank have waited for copies: all that the copies cost on the critical path."""
        rank = Rank(job.env.rank)
        self._source, self._rank, self._receiver, self._tell = job.source, rank, receiver, tell
        self._token, self._run_id = job.config.token, job.env.run_id
        receiver.rank = rank
        self._keeper = {shard: r for r, shards in keepers(job.layout).items() for shard in shards}
        mine = tuple(shard for shard, keeper in self._keeper.items() if keeper == rank)
        self._order = m.SaverOrder(rank, mine, How.AS_IS, (rank,), job_state=True)
        self._copies = OwnCopies()
        self._store: CopyStore | None = None
        self._page_dir = Path()
        self._sender: Sender | None = None
        self._named = False
        self._frozen = self._closed = False
        self._deferred: list[act.SettleCopy] = []
        self._attempt: _Attempt | None = None
        self._size = 0
        self._worker = SerialWorker("ttp-copies")
        self._complaints: set[str] = set()

    # ------------------------------------------------------------------------------------------------- training thread

    def hold(self) -> None:
        """Wait until the running copy has read what the next update changes, or give the copy up."""
        attempt = self._attempt
        if attempt is None or attempt.through.is_set() or attempt.reason:
            return
        began = time.monotonic()
        if not attempt.through.wait(HOLD_S):
            attempt.give_up(f"it was not finished after the next update had waited {HOLD_S:g} s for it")
        self.waited_s += time.monotonic() - began

    def updated(self, version: Version) -> None:
        """Begin a copy after an update, if the schedule says so for this version."""
        if version % self.every or not self._named or version == 0:
            return
        if not self._copies.begin(version):
            self._tell(ev.CopySkipped(version))
            return
        if not self._copies.tries(version // self.every):
            self._tell(ev.CopyMade(version, False, "the last copies failed: this one is left out"))
            return
        attempt = self._attempt = _Attempt(version)
        if self._frozen:
            attempt.give_up("the job is frozen")
        try:
            self._worker.submit(lambda: self._make(attempt))
        except RuntimeError as problem:  # no thread can be started: training goes on without this copy
            attempt.through.set()
            self._complain(version, str(problem))
            self._tell(ev.CopyMade(version, False, str(problem)))

    # ------------------------------------------------------------------------------------------------ processor thread

    def joined(self, page_dir: Path, incarnation: int, *, anew: bool) -> None:
        """Note that this rank belongs to the job. ``anew``: see ``CopyStore``."""
        self._page_dir = page_dir
        try:
            self._store = self._receiver.store = CopyStore(page_dir, incarnation, anew=anew)
        except OSError as problem:
            log.error("buddy=True: cannot store copies of the state in %s: %s", page_dir, problem)

    def named(self, order: CopyTo) -> None:
        """Send copies to the buddy that the order names from now on."""
        if self._sender is None or self._sender.address != order.address:
            if self._sender is not None:
                self._sender.close()
            self._sender = Sender(order.address, self._token, self._run_id) if order.buddy != NOBODY else None
        where = (
            f"and to rank {order.buddy} at {order.address}"
            if self._sender
            else "and to no other host: the job has only this one"
        )
        if not self._named:
            log.info("the state is copied to the memory of this host every %s updates, %s", self.every, where)
        self._named = True

    def settle(self, action: act.SettleCopy) -> None:
        """Drop the copies that are no longer needed, unless the job is frozen."""
        if self._frozen:
            self._deferred.append(action)
            return
        gone = self._copies.settle(action.version, whole=action.whole)
        store = self._store
        if gone is not None and store is not None:
            with contextlib.suppress(RuntimeError):  # no thread can be started: the copy stays, and the gate opens
                self._worker.submit(lambda: store.drop(self._rank, gone))

    def freeze(self) -> None:
        """Give up a copy that is being made, because the gate is closed."""
        self._frozen = self._receiver.frozen = True
        attempt = self._attempt
        if attempt is not None:
            attempt.give_up("the job was frozen")

    def thaw(self) -> None:
        """Allow copies again, because training goes on."""
        self._frozen = self._receiver.frozen = False
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            self.settle(action)

    def held(self) -> tuple[m.KeptCopy, ...]:
        """Return the copies that this rank can provide: those on its host."""
        return self._store.held() if self._store is not None else ()

    def close(self) -> None:
        """Stop making and accepting copies. Those that exist stay, for the rank that saves."""
        self._closed = True
        if self._attempt is not None:
            self._attempt.give_up("this rank leaves the job")
        self._worker.close()
        self._receiver.close()
        if self._sender is not None:
            self._sender.close()

    # ---------------------------------------------------------------------------------------------------------- making

    def _make(self, attempt: _Attempt) -> None:
        done = ev.CopyMade(attempt.version, True)
        try:
            copy = self._copy(attempt)
            self._send(copy, attempt)
        except Exception as problem:
            text = attempt.reason or f"{type(problem).__name__}: {problem}"
            done = ev.CopyMade(attempt.version, False, text)
            if not (self._frozen or self._closed):
                self._complain(attempt.version, text)
        finally:
            attempt.through.set()
        self._tell(done)

    def _copy(self, attempt: _Attempt) -> Copy:
        store, version = self._store, attempt.version
        if store is None:
            raise CheckpointError("this host cannot store copies (the log says why)")
        attempt.room = store.check_room
        store.check_room(self._size)
        draft = store.begin(self._rank, version)
        try:
            if self._source.on_device and self._source.device_version(version, DEVICE_S) != version:
                raise CheckpointError("the device has not finished the version")
            attempt.check()
            pieces = self._source.write_pieces(
                order=self._order, version=version, draft=draft, generation=version, cancelled=attempt.cancelled
            )
            with attempt.lock:  # from here on the copy is whole, whatever happens to the state
                attempt.check()
                attempt.through.set()
            copy = store.finish(draft, self._rank, version, pieces)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._size = copy.size
        return copy

    def _send(self, copy: Copy, attempt: _Attempt) -> None:
        store = self._store
        assert store is not None
        if self._sender is not None:
            whole = self._copies.whole
            keep = [] if whole is None else [whole]
            self._sender.send(copy, self._rank, attempt.version, store.incarnation, keep=keep, cancelled=attempt.check)

    def _complain(self, version: Version, text: str) -> None:
        reason = text.translate(str.maketrans("", "", "0123456789.,"))
        level = logging.DEBUG if reason in self._complaints else logging.WARNING
        self._complaints.add(reason)
        log.log(level, "no second copy of version %s was made: %s; the previous copy is kept", version, text)

    # ---------------------------------------------------------------------------------------------------------- saving

    def quiesce(self) -> None:
        """Wait until no copy reads the state any more. Called before a save."""
        attempt = self._attempt
        if attempt is not None and not attempt.through.wait(QUIESCE_S):
            log.warning(
                "the copy of version %s has not stopped reading the state; the save begins all the same",
                attempt.version,
            )

    def split(self, order: m.Save, live_version: Version) -> tuple[m.SaverOrder, m.SaverOrder]:
        """Split a save order.

        Args:
            order: the whole order.
            live_version: version of the live state.

        Returns:
            The part to write from the live state, and the part to write from kept copies.
        """
        wanted, there = order.order, set(self.held())
        old = order.version < live_version
        from_kept = tuple(
            rank
            for rank in wanted.pages
            if m.KeptCopy(rank, order.version) in there and (old or not self._has_page(rank, order.version))
        )
        job = wanted.job_state and bool(wanted.kept) and not wanted.shards
        pages = tuple(rank for rank in wanted.pages if rank not in from_kept)
        live = replace(wanted, pages=pages, job_state=wanted.job_state and not job, kept=())
        return live, replace(wanted, shards=(), pages=from_kept, job_state=job)

    def write_kept(
        self,
        order: m.SaverOrder,
        save: m.Save,
        draft: Path,
        cancelled: Callable[[], bool],
        wrote: Callable[[int], None],
    ) -> list[m.Piece]:
        """Write the pieces of kept copies into the draft, durably and verified.

        Args:
            order: the part of the order for kept copies; see ``split``.
            save: the whole order.
            draft: directory of the checkpoint.
            cancelled: returns True to give up.
            wrote: called with the number of bytes just written.

        Raises:
            Cancelled: ``cancelled()`` became true.
            CheckpointError: a copy is missing or damaged.
            OSError: the storage failed.
        """
        wanted = [(self._keeper[shard], SHARD, shard) for shard in order.kept]
        wanted += [(rank, PAGE, Shard("")) for rank in order.pages]
        wanted += [(self._keeper[order.kept[0]], JOB, Shard(""))] if order.job_state else []

        def check() -> None:
            if cancelled():
                raise Cancelled

        pieces: list[m.Piece] = []
        for rank, kind, shard in wanted:
            copy, piece = self._find(rank, save.version, kind, shard)
            name = f"{Path(piece.file).stem}-k{save.generation}{Path(piece.file).suffix}"
            copy_piece(piece, copy.path / piece.file, draft / name, wrote, check)
            pieces.append(replace(piece, file=name, writer=self._rank))
        sync_directory(draft)
        return pieces

    def _find(self, rank: Rank, version: Version, kind: str, shard: Shard) -> tuple[Copy, m.Piece]:
        assert self._store is not None
        copy = self._store.read(rank, version)
        for piece in copy.pieces:
            if piece.kind == kind and piece.shard == shard:
                return copy, piece
        raise CheckpointError(f"the copy of rank {rank}, version {version}, has no {kind} {shard}".rstrip())

    def _has_page(self, rank: Rank, version: Version) -> bool:
        assert self._store is not None
        return isinstance(read_page_or_kept(self._page_dir, rank, version, self._store.incarnation), Page)
