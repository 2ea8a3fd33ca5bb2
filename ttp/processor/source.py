"""The interface between the processor and a framework adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ttp.core.layout import Rank, Version
from ttp.core.messages import Commit, Piece, SaverOrder, ShardDigest
from ttp.errors import CheckpointError


class Cancelled(Exception):  # noqa: N818 - it is not an error
    """A save was given up, because a newer order replaced it or the gate is about to open."""


class MovedError(CheckpointError):
    """The state changed while it was written: what was written belongs to no version."""


class StateSource:
    """The training state of one rank, as an adapter sees it. All methods run on threads of the processor.

    An adapter has to write ``write_pieces``. What it leaves out of the rest says that it can do no more.
    """

    framework: str
    """Name of the framework, for the manifest."""
    counts_bytes: bool = False
    """Whether ``Processor.written`` is advanced while a piece is written; if not, a hanging write cannot be told."""
    writes_parts: bool = False
    """Whether it can write parts of shards (``ttp.core.stripes``), dealt out as any other replica would."""

    @property
    def on_device(self) -> bool:
        """Whether a version that the host has finished may still be queued on an accelerator."""
        return False

    @property
    def has_preimage(self) -> bool:
        """Whether the last update, torn or finished, can be undone. Asked when no update is running."""
        return False

    def gradient_ready(self) -> bool:
        """Whether the training thread waits at the gate with all that the next update needs. Does not wait.

        Where a device is behind its host: whether it stands before its next update, which is queued, with all of it.
        """
        return False

    def redo(self, version: Version) -> bool:
        """Let a device that is behind its host make the update to ``version``.

        Returns:
            Whether the device was waiting before that update.
        """
        return False

    def inspect(self, version: Version) -> tuple[tuple[ShardDigest, ...], tuple[str, ...]]:
        """Inspect this copy of ``version``: a digest per shard held, and names of tensors with NaN or Inf.

        Asked on the saver's thread while the state is quiet under the closed gate. Never raises.
        """
        return (), ()

    def watch_pages(self, changed: Callable[[int, bool], None]) -> None:
        """Call ``changed(version, final)`` after each write of this rank's page, on the thread that wrote it."""

    def post_step_done(self) -> bool:
        """Whether what follows the last finished update (scheduler, scaler, EMA) has been done too."""
        return True

    def device_version(self, version: Version, patience_s: float) -> Version | None:
        """The newest version, up to ``version``, that the device has finished and will keep until it is let on.

        None: an update is half done there. Only asked when ``on_device``.

        Args:
            version: what the host has finished.
            patience_s: how long the device may stand still, outside of an update, before it counts as hanging; 0: it
                is not waited for at all.
        """
        return version

    def write_pieces(
        self,
        *,
        order: SaverOrder,
        version: Version,
        draft: Path,
        generation: int,
        cancelled: Callable[[], bool],
    ) -> list[Piece]:
        """Write what ``order`` asks for to ``draft``, durably. The gate is closed; the state is of the planned version.

        With ``How.UNDO`` it is the one before; the live state is not written to. An update to be redone has been made.

        Raises:
            Cancelled: ``cancelled()`` became true.
            MovedError: the state is another one than when it was begun.
            OSError: the storage failed.
        """
        raise NotImplementedError

    @property
    def saved_elsewhere(self) -> str:
        """How the program makes a checkpoint of files that it has saved itself, as a text: then nothing is committed.

        Empty: the pieces are in the draft, and ttp commits them.
        """
        return ""

    def finalise(self, directory: Path, order: Commit) -> Sequence[Piece]:
        """Add files that the framework's own tools need to a checkpoint that is being committed. May be called again.

        Args:
            directory: has the pieces of ``order`` in it.
            order: what is committed.

        Returns:
            The files it has added, which are durable.

        Raises:
            CheckpointError: the pieces do not fit together.
            OSError: the storage failed.
        """
        return ()

    def on_welcome(self, rank: Rank, incarnation: int, page_dir: Path) -> None:
        """Called when the processor has joined the job: open the rank-local page."""

    def close(self) -> None:
        """Called when the processor ends: close pages and remove hooks."""


class UpdateReporter(Protocol):
    """The processor, as adapters know it. For the training thread; writes to memory only."""

    mark: int
    """How many points of the running step the training thread has passed. Equal programs pass equal points, so the
    ranks of a job can be compared; 0 after an update."""

    activity: str
    """What it does instead of training, in words: a hang is not looked for then. Empty: it trains."""

    def begin_update(self, again: bool = False) -> None:
        """Call it just before the first write of an update. Waits while the job is frozen.

        Args:
            again: it is the update that was left by an exception, with the same gradient.
        """

    def leave_update(self) -> None:
        """Call it when a caught exception has left the update: the copy is torn until a later update has ended."""

    def stand_between(self) -> None:
        """Call it between two steps that make one update; the next ``begin_update`` continues the update."""

    def end_update(self) -> None:
        """Call it just after the last write of an update."""
