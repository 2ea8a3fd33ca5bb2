"""State that only one rank has: random streams, buffers, ``extra_state``. Start with ``capture``."""
