"""The version of the package. The wire protocol has a version of its own, see ``ttp.core.messages``."""

__version__ = "0.1.0"
