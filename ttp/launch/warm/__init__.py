"""Warm restarts: workers are forked from a process that has their imports, not started as new interpreters.

``template`` is that process, ``starter`` its owner inside the launcher, ``worker`` what stands for a forked worker
there, ``rules`` decides when forking is the same as starting. See ``docs/continuity.md``.
"""
