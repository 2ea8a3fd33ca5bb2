"""Shows a checkpoint of ttp to Megatron-LM's ``--load`` under the names and in the format that it looks for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from ttp.adapters.megatron.legacy import TRACKER, write_legacy
from ttp.errors import CheckpointError, UsageError
from ttp.store.manifest import Manifest
from ttp.store.verify import verify_checkpoint


def offer_to_megatron(
    checkpoint: str | Path, load_dir: str | Path, *, ckpt_format: Literal["torch_dist", "torch"] = "torch_dist"
) -> Path:
    """Make ``load_dir/iter_0000012`` out of ``checkpoint``, and the one that Megatron-LM loads.

    For a job that goes on without ttp, in any layout: ``--load load_dir --ckpt-format torch_dist --no-load-rng``.
    Nothing is copied, the directory is a link. ``ckpt_format="torch"`` makes the legacy layout: a copy, for a job of
    the same tensor, pipeline and expert parallel sizes and buckets: ``--load load_dir --ckpt-format torch``.
    The number is that of the version: finished updates.

    Args:
        checkpoint: written by a Megatron job under ttp.
        load_dir: for Megatron's ``--load``; made if it is not there.
        ckpt_format: as Megatron calls it.

    Returns:
        the link, or the directory.

    Raises:
        CheckpointError: it is no such checkpoint, is damaged, or Megatron has no legacy layout for it.
        OSError: the directory refused.
        UsageError: another format.
    """
    source, target = Path(checkpoint).absolute(), Path(load_dir)
    if ckpt_format not in ("torch_dist", "torch"):
        raise UsageError(f"ckpt_format={ckpt_format!r}: torch_dist or torch")
    if ckpt_format == "torch":
        if problems := verify_checkpoint(source):
            raise CheckpointError(f"{source} is damaged: {'; '.join(problems)}. Nothing was written")
        return write_legacy(source, target).path
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
