"""The version of the package; the wire has its own, see ``ttp.core.messages``."""

__version__ = "0.1.0"
