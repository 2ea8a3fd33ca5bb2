"""``protect`` for Hugging Face Accelerate; see docs/frameworks.md."""

from ttp.adapters.frameworks.accelerate import protect

__all__ = ["protect"]
