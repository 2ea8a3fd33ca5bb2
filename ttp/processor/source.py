"""The interface between the processor and a framework adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ttp.core.layout import Layout, Rank, Version, describe_copies
from ttp.core.messages import Commit, Piece, SaverOrder, ShardDigest
from ttp.errors import CheckpointError

ALONE = "when a rank fails whose shards other ranks hold too, or when a rank is told to end or raises an error"
"""In which case a job is saved that has shards on one rank only."""


class Cancelled(Exception):  # noqa: N818 - it is not an error
    """A save was given up, because a newer order replaced it or the gate is about to open."""


class MovedError(CheckpointError):
    """The state changed while it was written: what was written belongs to no version."""


def promise(copies: str, alone: bool, how: str) -> str:
    """Return what is saved when, in words.

    Args:
        copies: how many ranks hold each shard, in words.
        alone: whether only one rank holds some shard.
        how: how a checkpoint is saved, in words.
    """
    return f"{copies}; {ALONE if alone else 'when a rank fails'}, the last finished version is {how}"


class StateSource:
    """Access to the training state of one rank, which an adapter implements.

    Its methods run on processor threads. A rank that goes on in its process also calls what it needs on the training
    thread (``on_device``, and of torch's source ``why_not_at_rest`` and ``keep``), once the gate is closed for good.

    An adapter has to implement ``write_pieces``. The defaults of the other methods say that it cannot do the rest.
    """

    framework: str
    """Name of the framework, for the manifest."""
    counts_bytes: bool = False
    """True if the adapter advances ``Processor.written`` while it writes; if not, a hanging write is not noticed."""
    writes_parts: bool = False
    """True if the adapter can write parts of shards (``ttp.core.stripes``), cut as by any other replica."""

    @property
    def on_device(self) -> bool:
        """True if a version that the host has finished may still be queued on an accelerator."""
        return False

    @property
    def has_preimage(self) -> bool:
        """True if the last update, torn or finished, can be undone. Asked when no update is running."""
        return False

    def gradient_ready(self) -> bool:
        """Return whether the training thread waits at the gate with all that the next update needs. Does not wait.

        If a device is behind its host: whether the device waits before its next update, which is queued as a whole.
        """
        return False

    def redo(self, version: Version) -> bool:
        """Let a device that is behind its host make the update to ``version``.

        Returns:
            Whether the device was waiting before that update.
        """
        return False

    def other_weights(self) -> bool:
        """Return whether the program holds other weights in the model than those of training, as in an evaluation."""
        return False

    def inspect(self, version: Version) -> tuple[tuple[ShardDigest, ...], tuple[str, ...]]:
        """Inspect this copy of ``version``. Called while the state does not change, under the closed gate.

        Returns:
            A digest per shard that this rank holds, and the names of tensors with NaN or Inf.
        """
        return (), ()

    def watch_pages(self, changed: Callable[[int, bool], None]) -> None:
        """Call ``changed(version, final)`` after each write of this rank's page, on the thread that wrote it."""

    def post_step_done(self) -> bool:
        """Return whether the work after the last finished update (scheduler, scaler, EMA) has been done too."""
        return True

    def device_version(self, version: Version, patience_s: float) -> Version | None:
        """Return the newest version, up to ``version``, that the device has finished and keeps until it may go on.

        None: an update is half done on the device. Only called when ``on_device``.

        Args:
            version: the version that the host has finished.
            patience_s: seconds that the device may stand still, outside of an update, before it counts as hanging; 0:
                do not wait for it at all.
        """
        return version

    def write_pieces(
        self, *, order: SaverOrder, version: Version, draft: Path, generation: int, cancelled: Callable[[], bool]
    ) -> list[Piece]:
        """Write what ``order`` asks for to ``draft``, durably. The gate is closed; the state is of the planned version.

        With ``How.UNDO`` the state from before the last update is written, and the live state stays as it is. With a
        redo, the update has been made before this call.

        Args:
            order: the shards, pages and other state to write.
            version: version of the state.
            draft: directory of the checkpoint.
            generation: number of the order, which file names have to contain.
            cancelled: returns True to give up.

        Raises:
            Cancelled: ``cancelled()`` became true.
            MovedError: the state has changed since the write began.
            OSError: the storage failed.
        """
        raise NotImplementedError

    @property
    def saved_elsewhere(self) -> str:
        """Where the program keeps a checkpoint that it saves itself, in words: then ttp commits nothing.

        Empty: the pieces are in the draft, and ttp commits them.
        """
        return ""

    def promise(self, layout: Layout, save_dir: Path) -> str:
        """Return how many ranks hold each shard, and what is saved when, in words; empty while that is not known."""
        return promise(
            describe_copies(layout), bool(layout.unreplicated()), self.saved_elsewhere or f"saved in {save_dir}"
        )

    def finalise(self, directory: Path, order: Commit) -> Sequence[Piece]:
        """Add files that the framework's own tools need to a checkpoint that is being committed. May be called again.

        Args:
            directory: directory with the pieces of ``order``.
            order: the commit.

        Returns:
            The added files, which are durable.

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
    """Number of points of the running step that the training thread has passed; 0 after an update.

    Equal programs pass equal points, so the ranks of a job can be compared.
    """

    activity: str
    """What the rank does instead of training, in words: no hang is looked for meanwhile. Empty: it trains."""

    def begin_update(self, again: bool = False) -> None:
        """Report that the first write of an update comes next. Waits while the job is frozen.

        Args:
            again: it is the update that was left by an exception, with the same gradient.
        """

    def leave_update(self) -> None:
        """Report that a caught exception has left the update: the copy is torn until a later update has ended."""

    def stand_between(self) -> None:
        """Report that the thread is between two steps of one update; the next ``begin_update`` continues it."""

    def end_update(self) -> None:
        """Report that the last write of an update is done."""
