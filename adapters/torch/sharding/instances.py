"""Finds all objects of a class in this process, also those that nothing known to ttp refers to."""

from __future__ import annotations

import gc
from itertools import compress
from typing import TypeVar

T = TypeVar("T")


def instances_of(kind: type[T]) -> list[T]:
    """Return the live objects of a class and its subclasses. Takes about 0.1 s in a process with torch.

    ``isinstance`` is not used: it reads ``__class__`` of every object, and some objects warn, load lazy modules or
    raise then.
    """
    kinds = {kind}
    fresh = [kind]
    while fresh:
        fresh = [below for above in fresh for below in type.__subclasses__(above) if below not in kinds]
        kinds.update(fresh)
    things = gc.get_objects()
    return list(compress(things, map(kinds.__contains__, map(type, things))))
