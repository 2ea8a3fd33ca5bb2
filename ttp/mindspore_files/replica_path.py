"""``get_ckpt_path_with_strategy``: find the file of a replica for a rank whose own file is missing."""

from __future__ import annotations

import re
from pathlib import Path

from ttp.config import RankEnv
from ttp.mindspore_files.redundancy import groups_of_stages, replicas_of
from ttp.mindspore_files.strategy_file import Stage, read_stages

_RANK = re.compile(r"rank_\d+")


def get_ckpt_path_with_strategy(cur_ckpt_path: str, cur_strategy_path: str) -> str | None:
    """Find a checkpoint that the current rank can load: its own, or that of a rank with the same slices.

    This works as ``mindspore.get_ckpt_path_with_strategy``: each ``rank_N`` in ``cur_ckpt_path`` is replaced. Unlike
    there, no ``init()`` is needed: the rank is read from the launcher's environment.

    Args:
        cur_ckpt_path: the file that the current rank would load.
        cur_strategy_path: the strategy file of its stage, or a directory with those of all stages.

    Returns:
        The path of an existing file; None if there is none.

    Raises:
        ConfigError: the environment does not state the rank.
        CheckpointError: the strategy file cannot be read.
    """
    rank = RankEnv.from_env().rank
    if f"rank_{rank}" in _RANK.findall(cur_ckpt_path) and Path(cur_ckpt_path).is_file():
        return cur_ckpt_path
    stages = read_stages(Path(cur_strategy_path))
    if len(stages) == 1:  # as in MindSpore, the file counts as that of the rank's own stage
        stages = [Stage(rank // stages[0].devices, stages[0].layouts)]
    for replica in replicas_of(rank, groups_of_stages(stages)[1]):
        path = _RANK.sub(f"rank_{replica}", cur_ckpt_path)
        if Path(path).is_file():
            return path
    return None
