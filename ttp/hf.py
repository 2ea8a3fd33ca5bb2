"""Callback for the Trainer of Hugging Face Transformers; see docs/frameworks.md."""

from ttp.adapters.frameworks.hf import TtpCallback, resume_directory

__all__ = ["TtpCallback", "resume_directory"]
