"""The saver thread of a simulated rank, which carries out saves and commits on the toy storage."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from ttp.core import messages as m
from ttp.core import stripes
from ttp.core.layout import Rank
from ttp.core.rank import events as ev
from ttp.testing.sim_memory import WAIT_S
from ttp.testing.toy import SLOTS, digest, words_of

if TYPE_CHECKING:
    from ttp.testing.sim_rank import SimRank

Job = Generator[float, None, None]
NEVER = float("inf")


class Saver:
    """Carries out the saves and commits of one rank.

    Args:
        rank: the rank that the saver belongs to.
    """

    __slots__ = ("_cancelled", "_rank", "_world", "written")

    def __init__(self, rank: SimRank) -> None:
        self.written = 0
        """Bytes that the running job has written."""
        self._rank, self._world = rank, rank.world
        self._cancelled: list[bool] = [False]

    def save(self, order: m.Save) -> None:
        """Write the pieces of an order."""
        self._cancelled = [False]
        self._submit(self._save(order, self._cancelled))

    def commit(self, order: m.Commit) -> None:
        """Commit a draft."""
        self._submit(self._commit(order))

    def cancel(self) -> None:
        """Cancel the last save."""
        self._cancelled[0] = True

    def _submit(self, job: Job) -> None:
        """Start a job. An unfinished job, cancelled or hanging, runs on, as one on an abandoned thread would."""
        self.written = 0
        self._world.after(0.0001, self._rank.run, self._work, job)

    def _work(self, job: Job) -> None:
        wait = next(job, NEVER)  # NEVER: the job has ended, or is in a system call that never returns
        if wait < NEVER:
            self._world.after(wait, self._rank.run, self._work, job)

    # ------------------------------------------------------------------------------------------------------------ jobs

    def _save(self, order: m.Save, cancelled: list[bool]) -> Job:
        world, rank, work = self._world, self._rank, (order.rank, order.incident, order.generation)
        pieces: list[m.Piece] = []
        world.reached("before save", rank)
        for shard in order.order.shards:
            file = f"{shard}_{order.generation}"
            part, uneven = stripes.parse(shard), world.scenario.uneven == rank.rank
            world.storage.begin(_draft(order), file, rank.rank)
            first = rank.trainer.saved_state(order.version)[part.shard][0]
            yield rank.takes(0.004 / part.count) + world.faults.extra_s("slow", rank)
            world.reached("in save", rank)
            if cancelled[0]:
                return
            if not order.directory and world.faults.refuses("write", rank):
                rank.put(ev.Worked(m.SaveFailed(*work, "OSError: no space left on device", may_pass=True)))
                return
            second = rank.trainer.saved_state(order.version)[part.shard][1]
            content = words_of((first, second), part, uneven=uneven)
            pieces.append(self._durable(order, file, "shard", shard, content, f"{part.count}{uneven}"))
            self.written += 8
        for shard in order.order.kept:
            file = f"{shard}_kept_{order.generation}"
            world.storage.begin(_draft(order), file, rank.rank)
            yield rank.takes(0.004) + world.faults.extra_s("slow", rank)
            if cancelled[0]:
                return
            copy = rank.copies.shard(shard, order.version)
            if copy is None:
                rank.put(ev.Worked(m.SaveFailed(*work, f"the copy of {shard} is not there any more")))
                return
            content = words_of(copy, stripes.parse(shard))
            pieces.append(self._durable(order, file, "shard", shard, content))
        if order.order.pages:
            file = f"pages_{rank.rank}_{order.generation}"
            world.storage.begin(_draft(order), file, rank.rank)
            yield rank.takes(0.001) + world.faults.extra_s("slow", rank)
            pieces.append(self._durable(order, file, "rank_local", "", self._pages(order)))
        world.reached("after save", rank)
        if not cancelled[0]:
            rank.put(ev.Worked(m.Saved(*work, tuple(pieces))))

    def _pages(self, order: m.Save) -> tuple[object, ...]:
        pages = self._world.pages(self._rank.host)
        found: list[tuple[Rank, int]] = []
        for r in order.order.pages:
            slot, kept = pages.get((r, order.version % SLOTS)), self._rank.copies.page(r, order.version)
            if slot is not None and slot[0] == order.version:
                found.append((r, slot[1]))
            elif kept is not None:
                found.append((r, kept))
        return tuple(found)

    def _durable(
        self, order: m.Save, file: str, kind: str, shard: str, content: tuple[object, ...], cut: str = ""
    ) -> m.Piece:
        self._world.storage.finish(_draft(order), file, content)
        return m.Piece(file, 8, digest(content), kind, shard, self._rank.rank, cut=cut)

    def _commit(self, order: m.Commit) -> Job:
        world, rank, work = self._world, self._rank, (order.rank, order.incident, order.generation)
        world.reached("before commit", rank)
        if world.memory is not None and world.memory.brings(order):
            while order.version in world.memory.held:
                self.written += 1
                yield WAIT_S
            rank.put(ev.Worked(m.Committed(*work, f"step_{order.version}", 8)))
            return
        yield rank.takes(0.001) + world.faults.extra_s("slow", rank)
        world.reached("in commit", rank)
        if not order.directory and world.faults.refuses("commit", rank):
            rank.put(ev.Worked(m.CommitFailed(*work, "OSError: input/output error", may_pass=True)))
            return
        world.commit(order)
        world.trace(rank.name, f"renamed step {order.version}")
        world.reached("after rename", rank)
        yield rank.takes(0.001)
        if not order.directory and world.faults.refuses("sync", rank):
            rank.put(ev.Worked(m.CommitFailed(*work, "OSError: input/output error", may_pass=True)))
            return
        rank.put(ev.Worked(m.Committed(*work, f"step_{order.version}", 8)))


def _draft(order: m.Save) -> str:
    return f"{order.directory}/{order.draft}"
