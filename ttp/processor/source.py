"""What the processor needs from a framework adapter, and what an adapter gets from the processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ttp.core.layout import Rank, Version
from ttp.core.messages import Commit, Piece, SaverOrder, ShardDigest
from ttp.errors import CheckpointError


class Cancelled(Exception):  # noqa: N818 - it is not an error
    """A save was given up because a newer order replaced it or the gate is about to open."""


class MovedError(CheckpointError):
    """The state became another one while it was written: what is written is of no version."""


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
        """Whether the last update, torn or finished, can be undone. Asked when the state is quiet."""
        return False

    def gradient_ready(self) -> bool:
        """Whether the training thread stands at the gate with all that the next update needs. Does not wait.

        Where a device is behind its host: whether it stands before its next update, which is queued, with all of it.
        """
        return False

    def redo(self, version: Version) -> bool:
        """Let a device that is behind its host make the update to ``version``. Whether it stands in front of it."""
        return False

    def inspect(self, version: Version) -> tuple[tuple[ShardDigest, ...], tuple[str, ...]]:
        """What this copy of ``version`` looks like: a digest per shard held, and names of tensors with NaN or Inf.

        Asked on the saver's thread while the state is quiet under the closed gate. Never raises.
        """
        return (), ()

    def watch_pages(self, changed: Callable[[int, bool], None]) -> None:
        """Call ``changed(version, final)`` whenever this rank's page was written, on the thread that wrote it."""

    def post_step_done(self) -> bool:
        """Whether what follows the last finished update (scheduler, scaler, EMA) has been done too."""
        return True

    def device_version(self, version: Version, patience_s: float) -> Version | None:
        """The newest version, up to ``version``, that the device has finished and does not leave by itself.

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
        """Write what ``order`` asks for into ``draft``, durably. The gate is closed; the version is the planned one.

        With ``How.UNDO`` it is the one before; the live state is not written to. An update to be redone has been made.

        Raises:
            Cancelled: ``cancelled()`` became true.
            MovedError: the state is another one than when it was begun.
            OSError: the storage failed.
        """
        raise NotImplementedError

    @property
    def saved_elsewhere(self) -> str:
        """In words, how the program makes a checkpoint of what it saved itself: nothing is committed then.

        Empty: the pieces are in the draft, and ttp commits them.
        """
        return ""

    def finalise(self, directory: Path, order: Commit) -> Sequence[Piece]:
        """Add to a checkpoint that is about to exist what the framework's own tools want. May be called again.

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
        """The processor has joined the job: open the rank-local page."""

    def close(self) -> None:
        """The processor leaves: give up pages and hooks."""


class UpdateReporter(Protocol):
    """The processor, as adapters know it. Training thread only; memory only."""

    mark: int
    """How many points of the running step the training thread has passed. Equal programs pass equal points, so the
    ranks of a job can be compared; 0 after an update."""

    activity: str
    """What it does instead of training, in words: a hang is not looked for then. Empty: it trains."""

    def begin_update(self, again: bool = False) -> None:
        """Just before the first write of an update. Waits while the world is frozen.

        Args:
            again: it is the update that was left by an exception, with the same gradient.
        """

    def leave_update(self) -> None:
        """The update was left by an exception that the program has caught: the copy is torn until a later one ends."""

    def stand_between(self) -> None:
        """Between two steps that make one update together; the next ``begin_update`` goes on with it."""

    def end_update(self) -> None:
        """Just after the last write of an update."""
