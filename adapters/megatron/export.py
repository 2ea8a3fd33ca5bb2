"""Makes a checkpoint of ttp available to Megatron-LM's ``--load``, under the names that it looks for."""

from __future__ import annotations

import os
from pathlib import Path

from ttp.errors import CheckpointError, UsageError
from ttp.store.manifest import Manifest

TRACKER = "latest_checkpointed_iteration.txt"


def offer_to_megatron(checkpoint: str | Path, load_dir: str | Path, *, ckpt_format: str = "torch_dist") -> Path:
    """Make a link ``load_dir/iter_0000012`` to ``checkpoint``, and make it the one that Megatron-LM loads.

    For a job that goes on without ttp, in any layout: ``--load load_dir --ckpt-format torch_dist --no-load-rng``.
    Nothing is copied. The number in the name is the version: finished updates.

    Args:
        checkpoint: a checkpoint that a Megatron job has written under ttp.
        load_dir: the directory for Megatron's ``--load``; it is made if it does not exist.
        ckpt_format: must be ``torch_dist``; Megatron-LM itself can make its legacy format of that.

    Returns:
        The link.

    Raises:
        CheckpointError: the checkpoint is none of a Megatron job.
        OSError: the link cannot be made.
        UsageError: another format was asked for.
    """
    source, target = Path(checkpoint).absolute(), Path(load_dir)
    if ckpt_format != "torch_dist":
        raise UsageError(
            f"ckpt_format={ckpt_format!r}: checkpoints are torch_dist ones. Megatron-LM makes its legacy format of one "
            "with --ckpt-convert-format torch --ckpt-convert-save DIR"
        )
    version = Manifest.load(source).version
    if not (source / "common.pt").is_file():
        raise CheckpointError(f"{source} has no common.pt: it was not written by a Megatron job, or could not be")
    target.mkdir(parents=True, exist_ok=True)
    link = target / f"iter_{version:07d}"
    fresh, tracker = (target / f".{name}.{os.getpid()}" for name in (link.name, TRACKER))
    fresh.symlink_to(source, target_is_directory=True)
    fresh.replace(link)
    tracker.write_text(str(version))
    tracker.replace(target / TRACKER)
    return link
