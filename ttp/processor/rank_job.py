"""What the parts of a processor know of their rank and its job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ttp.config import Config, RankEnv
from ttp.core.layout import Layout
from ttp.processor.source import StateSource


@dataclass(frozen=True, slots=True)
class RankJob:
    """A rank and its job, as they are when the rank joins.

    Args:
        config: the job's settings.
        env: identity of this rank.
        layout: the replica groups, equal on all ranks.
        source: the adapter, which reads and writes the state.
        save_dir: directory of checkpoints.
    """

    config: Config
    env: RankEnv
    layout: Layout
    source: StateSource
    save_dir: Path
