"""Names of torch's process groups, as the original makes them: equal in old and new processes of a job.

Torch puts the number of groups that a process has made into the name of a new one. A process that has replaced another
one has made fewer, so that ``new_group(..., use_local_synchronization=True)`` would never meet the other ranks. Here a
name depends on the ranks, and on the last repair: the store still has the keys of earlier groups.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from typing import Any


def use_names_of(generation: Callable[[], int]) -> None:
    """Let torch name new groups so. No effect if the program has not imported torch.

    Args:
        generation: returns the number of the last repair.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return

    def name(ranks: Sequence[int], use_hashed_name: bool) -> str:
        if not ranks:  # the default group
            return f"{generation()}__"
        if not use_hashed_name:
            c10d._world.group_count += 1
            return f"{c10d._world.group_count - 1}_{generation()}"
        found = f"{hashlib.sha1('_'.join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()}_{generation()}"
        while found in c10d._world.pg_names.values():
            found += "_"
        return found

    c10d._process_group_name = name
