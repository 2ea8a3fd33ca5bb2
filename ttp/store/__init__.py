"""The only code that touches the bytes of a checkpoint: it writes, commits, finds, verifies and removes checkpoints.

A checkpoint is a directory whose name ``names`` makes, with a ``manifest.json`` that lists every piece with size and
digest. Whoever sees the name may trust that all of it is there; ``commit`` says why. Nothing here imports a framework.
"""
