"""Checkpoint manager for torchtitan; see docs/frameworks.md."""

from ttp.adapters.frameworks.titan import TtpCheckpointManager

__all__ = ["TtpCheckpointManager"]
