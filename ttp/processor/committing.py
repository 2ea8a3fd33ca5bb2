"""Make a checkpoint of the pieces that the savers of an incident have written: the same for every framework."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ttp.core.messages import Commit
from ttp.processor.local_state.local_piece import not_kept
from ttp.store.commit import Finalise, commit
from ttp.store.digest import Progress
from ttp.store.disk import Disk

if TYPE_CHECKING:
    from ttp.processor.processor import Processor


def commit_order(
    processor: Processor, order: Commit, *, framework: str, finalise: Finalise, progress: Progress
) -> tuple[str, int]:
    """Carry out ``order`` for the job of ``processor``.

    Args:
        processor: of the committing rank.
        order: what to commit. Which rank-local pages are missing is told from its pieces.
        framework: name of the adapter.
        finalise: see ``ttp.store.commit``.
        progress: called with bytes written.

    Returns:
        The checkpoint's path, and the bytes of all its pieces.

    Raises:
        CheckpointError: see ``ttp.store.commit``.
    """
    env = processor.env
    path, size = commit(
        processor.directory(order),
        replace(order, missing_pages=not_kept(order.pieces, env.world_size)),
        run_id=env.run_id,
        world_size=env.world_size,
        groups=processor.layout.groups,
        framework=framework,
        finalise=finalise,
        disk=Disk(progress),
    )
    return str(path), size
