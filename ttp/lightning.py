"""Callback and checkpoint plug-in for PyTorch Lightning; see docs/frameworks.md."""

from ttp.adapters.frameworks.lightning import TtpCallback, TtpCheckpointIO

__all__ = ["TtpCallback", "TtpCheckpointIO"]
