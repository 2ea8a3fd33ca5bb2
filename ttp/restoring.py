"""Restores the newest checkpoint that all ranks have: the work of ``ttp.restore`` in one process."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttp import session
from ttp.config import of_launcher
from ttp.core.layout import Version
from ttp.core.restore_choice import LOOK_AGAIN_S, is_fallback_note
from ttp.core.restore_messages import Candidate
from ttp.errors import CheckpointError, RestoreError, StorageAwayError
from ttp.launch.rank_names import in_torchruns_names
from ttp.processor import continuing
from ttp.store import choice
from ttp.store.held import Held
from ttp.store.share import WHOLE, Share, everything, share_of

if TYPE_CHECKING:
    from ttp.processor.processor import Processor
    from ttp.session import Adapter

log = logging.getLogger("ttp")

_GONE_BACK = (
    "not all of %s was read yet. As a rule some rank has skipped a newer checkpoint, and its log says why. Each rank "
    "reads its part now, and if that is whole, training goes on from there: nothing has to be done for this launch"
)
_NOT_SHARED = (
    "still not all of %s was read: LOCAL_RANK or LOCAL_WORLD_SIZE is wrong on some rank, or hosts see different copies "
    "(is save_dir shared?). Each rank reads all of it now, which takes longer"
)


class Restoring:
    """One call of ``ttp.restore``.

    Args:
        adapter: loads the checkpoint into the registered objects.
        save_dir: directory of checkpoints.
        fallback_dir: the directory that is used when ``save_dir`` fails; None: there is none.
        processor: the processor of this rank; None: ttp is switched off, so the ranks agree without a controller.
        first: whether this is the first training of the process. Of a second one, a restart may be the first start.
    """

    def __init__(
        self,
        adapter: Adapter,
        save_dir: Path,
        fallback_dir: Path | None,
        processor: Processor | None,
        *,
        first: bool = True,
    ) -> None:
        self._adapter, self._processor = adapter, processor
        self._save_dir, self._fallback_dir, self._first = save_dir, fallback_dir, first

    def restore(self) -> Version:
        """Find, agree on, verify and load a checkpoint. Return its version; 0: there is none.

        Raises:
            CheckpointError: the checkpoint is of another model, or cannot be read.
            ConfigError: a checkpoint that the job has committed has vanished.
            RefusedError: the controller does not accept this rank.
            RestoreError: the ranks have no checkpoint in common, or do not restore together.
        """
        with Held.of(self._save_dir).reading():  # the writer does not remove a checkpoint in memory meanwhile
            found, chosen = self._find_in_time()
            choice.warn_of_lost_steps(found.candidates, chosen)
            if self._processor is not None and self._first and not chosen.name:
                choice.warn_of_new_beginning(
                    self._save_dir, self._processor.env, session.BEGAN_IN, session.BEGAN_UNIX_S
                )
            checkpoint = found.where.get(chosen, self._save_dir / chosen.name)
            version = self._load(checkpoint, chosen, verified=chosen in found.verified) if chosen.name else Version(0)
        if chosen.name:
            log.info("restored %s: training goes on with step %s", checkpoint, version + 1)
        if (processor := self._processor) is not None:
            processor.set_base_version(version, 0 if processor.env.rank else choice.checkpoint_bytes(checkpoint))
        return version

    def _load(self, checkpoint: Path, chosen: Candidate, *, verified: bool) -> Version:
        """Verify and load a checkpoint. If survivors go on in their processes, the ranks verify it together."""
        adapter: Any = self._adapter
        rank, world_size = place(self._processor)
        survivor = self._survivor()
        choice.check_chosen(checkpoint, chosen, already_verified=verified or survivor is not None)
        if survivor is not None:
            share = self._share(checkpoint.parent)
            verify = functools.partial(choice.check_chosen, checkpoint, chosen, already_verified=False, share=share)
            return Version(adapter.load_going_on(checkpoint, rank, world_size, survivor.state, verify))
        version = Version(adapter.load(checkpoint, rank, world_size, protected=self._processor is not None))
        if self._processor is not None:
            self._processor.tidy_after(checkpoint)
        return version

    def _survivor(self) -> continuing.Continuing | None:
        """Return the ``Continuing`` if survivors of the last launch go on in their processes; equal on all ranks."""
        found = continuing.current() if hasattr(self._adapter, "load_going_on") else None
        return found if found is not None and found.clock.runs and self._processor is not None else None

    def _share(self, directory: Path) -> Share:
        """Return the pieces that this rank reads: without a controller to combine the ranks' results, all of them."""
        return WHOLE if self._processor is None else share_of(directory, *place(self._processor), os.environ)

    def _find_in_time(self) -> tuple[choice.Found, Candidate]:
        """Return the result of ``_find``; at a restart, wait for storage that is away, up to ``sum(LOOK_AGAIN_S)``."""
        for pause_s in LOOK_AGAIN_S:
            try:
                return self._find()
            except StorageAwayError as away:
                log.warning("%s Looking again in %g s", away, pause_s)
                time.sleep(pause_s)
        return self._find()

    def _find(self) -> tuple[choice.Found, Candidate]:
        """Return what this rank found and the checkpoint that all ranks restore.

        Usually it is enough that each rank reads its share of the newest checkpoint. If a share is damaged, the ranks
        go back to an older checkpoint, and read their shares of that. If the shares do not cover a checkpoint, each
        rank reads all of it.
        """
        found = self._look_back(self._share)
        chosen, unread = self._agree(found)
        for share, older, why in ((self._share, True, _GONE_BACK), (everything, False, _NOT_SHARED)):
            if not unread:
                break
            log.warning(why, chosen.name)
            if any(reading.count != 1 for reading in found.readings):
                found = self._look_back(share, older=older, before=found)
            chosen, unread = self._agree(found)
        while unread:  # other ranks may not know yet that they have to read all of it
            chosen, unread = self._agree(found)
        return found, chosen

    def _look_back(
        self, share: Callable[[Path], Share], *, older: bool = False, before: choice.Found | None = None
    ) -> choice.Found:
        later = self._survivor() is not None
        try:
            found = choice.look_back(self._save_dir, self._fallback_dir, share, older=older, later=later)
        except CheckpointError as problem:
            if self._processor is None or not self._processor.env.launch:
                raise
            raise StorageAwayError(f"{problem}. Is save_dir mounted?") from problem
        for reason in found.skipped:
            if before is None or reason not in before.skipped:
                log.warning("restore %s %s", "found" if is_fallback_note(reason) else "skipped", reason)
        return found

    def _agree(self, found: choice.Found) -> tuple[Candidate, bool]:
        """Return the checkpoint that all ranks restore, and whether some part of it was read by no rank."""
        if self._processor is not None:
            decision = self._processor.agree_on_restore(found.candidates, found.skipped, found.readings)
            return Candidate(decision.version, decision.manifest_digest, decision.name), decision.unread
        verdict = self._adapter.agree_without_controller(found.candidates, found.skipped)
        if isinstance(verdict, str):
            raise RestoreError(verdict)
        return verdict, False


def place(processor: Processor | None) -> tuple[int, int]:
    """Return the rank and the world size of this process from its processor, else from the launcher's environment.

    Raises:
        ConfigError: the launcher's variable is no number.
    """
    if processor is not None:
        return processor.env.rank, processor.env.world_size
    environ = in_torchruns_names(os.environ)
    return of_launcher(environ, "RANK", int, "0"), of_launcher(environ, "WORLD_SIZE", int, "1")
