"""Captures and restores the state that only one rank has: random streams, buffers, ``extra_state``. See ``capture``."""
