"""What one rank offers to restore, and the last check of what all ranks agreed on."""

from __future__ import annotations

from pathlib import Path

from ttp.core.messages import Candidate
from ttp.errors import RestoreError
from ttp.store.catalog import find_whole
from ttp.store.manifest import manifest_digest
from ttp.store.verify import verify_checkpoint


def look_back(save_dir: Path) -> tuple[tuple[Candidate, ...], tuple[str, ...], tuple[Candidate, ...]]:
    """Candidates newest first, what was skipped and why, and which candidates had every digest recomputed.

    Only the newest whole checkpoint is read in full; older ones, which are hardly ever chosen, are offered when their
    files have the promised sizes, and read in full if they are chosen after all.

    Raises:
        CheckpointError: ``save_dir`` cannot be listed.
    """
    verified, skipped = find_whole(save_dir, enough=1)
    if not verified:
        return (), tuple(skipped), ()
    older, _ = find_whole(save_dir, deep=False)
    older = [c for c in older if c.version < verified[0].version]
    return (*verified, *older), tuple(skipped), tuple(verified)


def check_chosen(checkpoint: Path, chosen: Candidate, *, already_verified: bool) -> None:
    """Make sure that ``checkpoint`` is what the ranks agreed on, and whole.

    Raises:
        RestoreError: it is not; the text says what is wrong.
    """
    if manifest_digest(checkpoint) != chosen.manifest_digest:
        raise RestoreError(f"{checkpoint} is not the checkpoint that the ranks agreed on: its manifest has changed")
    problems = [] if already_verified else verify_checkpoint(checkpoint)
    if problems:
        raise RestoreError(f"the ranks agreed on {checkpoint}, which is not whole here: {'; '.join(problems[:5])}")
