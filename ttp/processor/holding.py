"""What a rank does to save a checkpoint to the host's memory first; see ``ttp.core.controller.shadow``."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from ttp.aside import aside
from ttp.core import messages as m
from ttp.core.layout import Rank, Version
from ttp.errors import CheckpointError
from ttp.launch import shadow
from ttp.launch.leases import write_whole
from ttp.launch.warm import memory
from ttp.processor.rank_job import RankJob
from ttp.store.held import Held, Order
from ttp.store.manifest import Manifest
from ttp.store.names import parse_checkpoint_name

MEMORY_FACTOR = 2
"""The free memory of the host has to be this many checkpoints: survivors that go on also build new models."""
LOOK_S = 0.02


class Holding:
    """Decides whether a checkpoint may be held in memory, and waits until a held one is durable. One per rank.

    Args:
        job: the rank, and the directory of the storage that receives the checkpoints.
        may: True if this process can go on when another one dies.
    """

    def __init__(self, job: RankJob, *, may: bool) -> None:
        config, env = job.config, job.env
        self._config, self._save_dir, self._held = config, job.save_dir, Held.of(job.save_dir)
        mine = len(job.layout.shards_of(Rank(env.rank)))
        self._shards = len(job.layout.groups) / max(mine, 1)  # size of the checkpoint / size of this rank's shards
        alone = os.environ.get("LOCAL_WORLD_SIZE", "") == str(env.world_size)
        self._may = may and alone and config.shadow_s is not None
        if self._may and env.local_rank == 0 and (env.launch == 0 or not self._held.speed()):
            aside("ttp-speed", lambda: self._held.measure(job.save_dir))
        if self._may or self._held.unfinished():
            self._tell_launcher()

    def _tell_launcher(self) -> None:
        """Name the directory in memory to the launcher, which keeps its writer alive and waits for it at the end."""
        write_whole(self._config.resolved_run_dir() / shadow.FOLDER / self._held.root.name, str(self._held.root))

    def look(self, digests: Collection[m.ShardDigest]) -> tuple[str, Version]:
        """Return where to hold a checkpoint of these shards, and the version that is held already. Never raises.

        Args:
            digests: the shards of this rank with their sizes and digests.

        Returns:
            The directory in memory (empty: save to the storage), and the version that is held in memory and not
            durable yet (0: none).
        """
        held = self._held.unfinished()
        size, speed = int(sum(seen.size for seen in digests) * self._shards), self._held.speed()
        slow = self._may and speed > 0 and size / speed > (self._config.shadow_s or 0)
        if held or not slow or not all(seen.digest for seen in digests):
            return "", held
        free = memory.left()
        room = self._held.room(size) and free is not None and free > MEMORY_FACTOR * size
        return (str(self._held.memory) if room else ""), held

    def holds(self, order: m.Save | m.Commit) -> bool:
        """Return whether this order names the directory in memory."""
        return order.directory == str(self._held.memory)

    def begin(self, order: m.Save, keep: int) -> None:
        """Prepare to write a checkpoint to memory: give the writer its order and have one rank start it.

        Args:
            order: the controller's order to save.
            keep: number of checkpoints to keep on the storage.

        Raises:
            OSError: The directory or the order cannot be written.
        """
        self._held.make()
        fallback = self._config.fallback_dir or ""
        patience_s = self._config.rescue_patience_s
        self._held.give(
            Order(order.incident, order.draft, str(self._save_dir), fallback, keep, patience_s, time.time())
        )
        self._tell_launcher()
        if order.order.job_state:  # exactly one rank saves the job state
            aside("ttp-shadow", self._serve)

    def _serve(self) -> None:
        """Start the writer while this rank writes; if that fails ``serve`` tries again."""
        with contextlib.suppress(OSError):
            self.serve()

    def serve(self, order: m.Commit | None = None) -> None:
        """Start the writer unless it runs. Call it before ranks go on from the checkpoint in memory.

        Args:
            order: the order whose checkpoint is in memory; the writer is not needed once that is durable.

        Raises:
            OSError: No writer could be started.
        """
        shadow.serve(self._held, lambda: order is not None and self._durable(order) is not None)

    def is_on_its_way(self, order: m.Commit) -> bool:
        """Return whether the writer copies, or has copied, the checkpoint that this order commits to the storage.

        If the order lists no pieces, only the writer can carry it out.
        """
        if self.holds(order) or (order.pieces and self._is_written(order)):
            return False
        found = self._held.checkpoint()
        return self._fits(order, found and found[1]) or bool(self._durable(order))

    @staticmethod
    def _fits(order: m.Commit, manifest: Manifest | None) -> bool:
        if manifest is None or manifest.version != order.version:
            return False
        return not order.pieces or manifest.incident == order.incident

    def _durable(self, order: m.Commit) -> Path | None:
        """Return the path of this order's checkpoint, or a newer one, that the writer made durable; None: not yet."""
        state = self._held.state()
        version = parse_checkpoint_name(Path(state.path).name)
        fits = version is not None and version >= order.version
        return Path(state.path) if fits and (not order.pieces or state.incident == order.incident) else None

    def _is_written(self, order: m.Commit) -> bool:
        """Return whether ranks have written the pieces of this order to the storage themselves."""
        return ((Path(order.directory) if order.directory else self._save_dir) / order.draft).exists()

    def await_durable(self, order: m.Commit, wrote: Callable[[int], None]) -> tuple[Path, int]:
        """Wait until the writer has made the checkpoint of this order durable and verified it.

        Args:
            order: the order to commit it to the storage.
            wrote: called with the number of bytes that the writer has written since the last call.

        Returns:
            The path of the checkpoint and its size in bytes.

        Raises:
            OSError: The storage refuses.
            CheckpointError: The checkpoint is not in memory any more, and not durable.
        """
        written = self._held.state().written
        while True:
            if path := self._durable(order):
                return path, self._held.state().size
            found, state = self._held.checkpoint(), self._held.state()
            if not self._fits(order, found and found[1]):
                if self._durable(order):
                    continue
                raise CheckpointError("the checkpoint in memory is gone, and was not copied to the storage")
            if state.problem:
                raise OSError(state.problem)
            wrote(max(0, state.written - written))
            written = state.written
            self.serve(order)
            time.sleep(LOOK_S)
