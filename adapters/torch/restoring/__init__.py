"""Puts a checkpoint back into live objects. Start with ``restore``."""
