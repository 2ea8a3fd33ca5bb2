"""Loads a checkpoint into live objects. Start with ``restore``."""
