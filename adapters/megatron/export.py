"""Makes a checkpoint of ttp available to Megatron-LM's ``--load``, under the file names that Megatron-LM looks for."""

from __future__ import annotations

import os
from pathlib import Path

from ttp.errors import CheckpointError
from ttp.store.durable import write_durably
from ttp.store.manifest import Manifest

TRACKER = "latest_checkpointed_iteration.txt"


def offer_to_megatron(checkpoint: str | Path, load_dir: str | Path) -> Path:
    """Make a link ``load_dir/iter_0000012`` to ``checkpoint``, and make it the checkpoint that Megatron-LM loads.

    Use it for a job that continues without ttp, in any layout:
    ``--load load_dir --ckpt-format torch_dist --no-load-rng``. Nothing is copied. The number in the link's name is the
    version (finished updates).

    Args:
        checkpoint: a checkpoint that a Megatron job has written under ttp.
        load_dir: the directory for Megatron's ``--load``; it is made if it does not exist.

    Returns:
        The path of the link.

    Raises:
        CheckpointError: no Megatron job wrote the checkpoint, or it has no ``common.pt``.
        OSError: the link cannot be made.
    """
    source, target = Path(checkpoint).absolute(), Path(load_dir)
    version = Manifest.load(source).version
    if not (source / "common.pt").is_file():
        raise CheckpointError(
            f"{source} has no common.pt: no Megatron job wrote it, or its making failed (the job's log says why)"
        )
    target.mkdir(parents=True, exist_ok=True)
    link = target / f"iter_{version:07d}"
    fresh = target / f".{link.name}.{os.getpid()}"
    fresh.unlink(missing_ok=True)  # left by a process of the same pid, in another container
    try:
        fresh.symlink_to(source, target_is_directory=True)
        fresh.replace(link)
    finally:
        fresh.unlink(missing_ok=True)
    write_durably(target / TRACKER, str(version).encode())
    return link
