"""Shows a checkpoint of ttp to Megatron-LM's ``--load`` under the names and in the format that it looks for."""

from __future__ import annotations

import os
from pathlib import Path

from ttp.errors import CheckpointError, UsageError
from ttp.store.manifest import Manifest

TRACKER = "latest_checkpointed_iteration.txt"


def offer_to_megatron(checkpoint: str | Path, load_dir: str | Path, *, ckpt_format: str = "torch_dist") -> Path:
    """Make ``load_dir/iter_0000012`` out of ``checkpoint``, and the one that Megatron-LM loads.

    For a job that goes on without ttp, in any layout: ``--load load_dir --ckpt-format torch_dist --no-load-rng``.
    Nothing is copied, the directory is a link. The number is that of the version: finished updates.

    Args:
        checkpoint: written by a Megatron job under ttp.
        load_dir: for Megatron's ``--load``; made if it is not there.
        ckpt_format: ``torch_dist``; Megatron-LM itself makes its legacy format of that.

    Returns:
        the link.

    Raises:
        CheckpointError: it is no such checkpoint.
        OSError: the directory refused.
        UsageError: another format.
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
