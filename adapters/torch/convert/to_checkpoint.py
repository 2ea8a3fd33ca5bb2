"""Makes a checkpoint, which stock torch reads too, from the state in a plain file."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

from ttp.adapters.torch.convert.contents import WholeState, tree
from ttp.adapters.torch.saving.checkpoint import write_shard
from ttp.adapters.torch.saving.job_state import JOB_KIND, JobState
from ttp.adapters.torch.saving.metadata import finalise
from ttp.core.layout import REPLICATED, Rank, Version
from ttp.core.messages import Commit, Piece
from ttp.errors import CheckpointError, ToldAs
from ttp.processor.local_state.local_piece import Pages, write_local_piece
from ttp.store import names
from ttp.store.commit import NewCheckpoint
from ttp.store.digest import Progress, digest_bytes
from ttp.store.disk import Disk
from ttp.store.durable import make_directory, sync_directory, write_durably
from ttp.store.encoding import EncodingError

_RANK = Rank(0)
_KEEP_ALL = 1 << 30
_WHY = "`ttp convert` made this checkpoint, and a file has no rank-local state"


def write_checkpoint(save_dir: Path, version: Version, contents: WholeState, progress: Progress) -> Path:
    """Write ``contents`` as the checkpoint of ``version`` in ``save_dir``, and commit it.

    An old checkpoint of that version is kept under another name.

    Args:
        save_dir: the directory of checkpoints.
        version: finished updates.
        contents: the state to write.
        progress: see ``HashingFile``.

    Returns:
        The directory of the new checkpoint.

    Raises:
        CheckpointError: a tensor or value has no form on disk, or the storage failed.
    """
    incident = f"convert-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    draft = save_dir / names.draft_name(version, incident)
    try:
        make_directory(draft)
        pieces = _write_pieces(draft, version, contents, progress)
        sync_directory(draft)
        path, _ = NewCheckpoint(
            save_dir,
            _order(version, incident, contents, pieces),
            run_id="convert",
            world_size=1,
            groups={REPLICATED: (_RANK,)},
            framework="torch",
            finalise=lambda claim: finalise(claim, pieces, writer=_RANK),
        ).commit()
    except OSError as problem:
        raise CheckpointError(f"the checkpoint cannot be written to {save_dir}: {problem}") from problem
    finally:
        Disk().remove_tree(draft)
    return path


def _write_pieces(draft: Path, version: Version, contents: WholeState, progress: Progress) -> tuple[Piece, ...]:
    state = _state(version, contents)
    shard = write_shard(draft, "__0_0.distcp", state, shard=REPLICATED, writer=_RANK, progress=progress)
    local = write_local_piece(draft, "rank_local_0_0.msgpack", Pages({}, (), {_RANK: _WHY}), _RANK)
    with ToldAs(CheckpointError, f"the job state of {contents.source} cannot be stored", EncodingError, TypeError):
        data = JobState(version=version, **(contents.job or {})).encode()
        JobState.decode(data)
    write_durably(draft / "job_0.msgpack", data)
    return (shard, local, Piece("job_0.msgpack", len(data), digest_bytes(data), JOB_KIND, "", _RANK))


def _state(version: Version, contents: WholeState) -> dict[str, Any]:
    state = tree(contents.leaves, lambda entry: entry.read())
    state["ttp"] = {
        "version": version,
        "optimizer": contents.optimizer,
        "weights_only": not contents.has_optimizer,
    }
    scheduler = (contents.job or {}).get("scheduler")
    return state if scheduler is None else state | {"scheduler": scheduler}


def _order(version: Version, incident: str, contents: WholeState, pieces: tuple[Piece, ...]) -> Commit:
    return Commit(
        rank=_RANK,
        term=0,
        incident=incident,
        generation=0,
        version=version,
        incarnation=0,
        draft=names.draft_name(version, incident),
        cause=f"converted from {contents.source}",
        reason="made by `ttp convert`",
        keep=_KEEP_ALL,
        pieces=pieces,
        missing_pages=(_RANK,),
    )
