"""Warm restarts: workers are forked from a process that has their imports, not started as new interpreters.

``template`` is that process, ``starter`` its owner in the launcher, ``worker`` the launcher's object for a forked
worker, ``rules`` decides when forking is equivalent to starting. See ``docs/continuity.md``.
"""
