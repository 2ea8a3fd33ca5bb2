"""Callback for Ray Train; see docs/frameworks.md."""

from ttp.adapters.frameworks.ray import TtpCallback

__all__ = ["TtpCallback"]
