"""``protect`` for DeepSpeed; see docs/frameworks.md."""

from ttp.adapters.frameworks.deepspeed import protect

__all__ = ["protect"]
