"""A rank's part where a checkpoint is held in memory first; see ``ttp.core.controller.shadow``."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from ttp.config import Config, RankEnv
from ttp.core import messages as m
from ttp.core.layout import Layout, Rank, Version
from ttp.errors import CheckpointError
from ttp.launch import shadow
from ttp.launch.leases import write_whole
from ttp.launch.warm import memory
from ttp.store.held import Held, Order
from ttp.store.manifest import Manifest
from ttp.store.names import parse_checkpoint_name

MEMORY_FACTOR = 2
"""So many times its bytes have to be free: those that go on make new models, too."""
LOOK_S = 0.02


class Holding:
    """One for each rank.

    Args:
        config: the job's settings.
        env: who this rank is.
        layout: of the job.
        save_dir: where checkpoints go in the end.
        may: this process can go on when another one dies.
    """

    def __init__(self, config: Config, env: RankEnv, layout: Layout, save_dir: Path, *, may: bool) -> None:
        self._config, self._save_dir, self._held = config, save_dir, Held.of(save_dir)
        mine = len(layout.shards_of(Rank(env.rank)))
        self._shards = len(layout.groups) / max(mine, 1)  # so many times what this rank has is all there is
        alone = os.environ.get("LOCAL_WORLD_SIZE", "") == str(env.world_size)
        self._may = may and alone and config.shadow_s is not None
        if self._may and env.local_rank == 0 and (env.launch == 0 or not self._held.speed()):
            threading.Thread(target=self._held.measure, args=(save_dir,), name="ttp-speed", daemon=True).start()
        if self._may or self._held.unfinished():
            self._tell_launcher()

    def _tell_launcher(self) -> None:
        """It sees to it that what is held becomes durable, and does not end before."""
        write_whole(self._config.resolved_run_dir() / shadow.FOLDER / self._held.root.name, str(self._held.root))

    def look(self, digests: Collection[m.ShardDigest]) -> tuple[str, Version]:
        """Where a checkpoint of this state may be held, and what is held and not durable yet. Never raises."""
        held = self._held.unfinished()
        size, speed = int(sum(seen.size for seen in digests) * self._shards), self._held.speed()
        slow = self._may and speed > 0 and size / speed > (self._config.shadow_s or 0)
        if held or not slow or not all(seen.digest for seen in digests):
            return "", held
        free = memory.left()
        room = self._held.room(size) and free is not None and free > MEMORY_FACTOR * size
        return (str(self._held.memory) if room else ""), held

    def holds(self, order: m.Save | m.Commit) -> bool:
        """Whether this order is about memory."""
        return order.directory == str(self._held.memory)

    def begin(self, order: m.Save, keep: int) -> None:
        """This rank is about to write to memory.

        Raises:
            OSError: it cannot.
        """
        self._held.make()
        fallback = self._config.fallback_dir or ""
        patience_s = self._config.rescue_patience_s
        self._held.give(
            Order(order.incident, order.draft, str(self._save_dir), fallback, keep, patience_s, time.time())
        )
        self._tell_launcher()
        if order.order.job_state:  # one of them does
            threading.Thread(target=self._serve, name="ttp-shadow", daemon=True).start()

    def _serve(self) -> None:
        """Beside the writing; ``serve`` tries it once more."""
        with contextlib.suppress(OSError):
            self.serve()

    def serve(self) -> None:
        """What is held is about to be gone on from.

        Raises:
            OSError: nobody would bring it to the storage.
        """
        shadow.serve(self._held)

    def is_on_its_way(self, order: m.Commit) -> bool:
        """Whether what is to be committed to the storage is held in memory, or was. Without pieces it has to be."""
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
        """Where it is now."""
        state = self._held.state()
        version = parse_checkpoint_name(Path(state.path).name)
        fits = version is not None and version >= order.version
        return Path(state.path) if fits and (not order.pieces or state.incident == order.incident) else None

    def _is_written(self, order: m.Commit) -> bool:
        """Whether ranks have written the pieces to the storage themselves."""
        return ((Path(order.directory) if order.directory else self._save_dir) / order.draft).exists()

    def await_durable(self, order: m.Commit, wrote: Callable[[int], None]) -> tuple[Path, int]:
        """Wait until what is held is durable and verified. Returns where it is, and its bytes.

        Raises:
            OSError: the storage refuses.
            CheckpointError: it is not held any more.
        """
        written = self._held.state().written
        while True:
            if path := self._durable(order):
                return path, self._held.state().size
            found, state = self._held.checkpoint(), self._held.state()
            if not self._fits(order, found and found[1]):
                if self._durable(order):
                    continue
                raise CheckpointError("what was held in memory is not there any more")
            if state.problem:
                raise OSError(state.problem)
            wrote(max(0, state.written - written))
            written = state.written
            if not self._held.is_served():
                shadow.serve(self._held)
            time.sleep(LOOK_S)
