"""The only code that touches the bytes of a checkpoint: it writes, commits, finds, verifies and removes checkpoints.

A checkpoint is a directory whose name ``names`` makes, with a ``manifest.json`` that lists every piece with size and
digest. A directory with such a name is complete; ``commit`` explains why. To import this package imports no framework.
"""
