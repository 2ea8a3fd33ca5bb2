"""Finds the memory cgroups of a process, v1 and v2."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_OCTAL = re.compile(r"\\([0-7]{3})")
"""How ``mountinfo`` writes a blank or a backslash in a path."""


@dataclass(frozen=True, slots=True)
class Group:
    """One cgroup: ``name`` is shown to the operator, ``folder`` holds its files."""

    version: int
    name: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted cgroup hierarchy.

    Args:
        version: 1 or 2.
        root: path inside the hierarchy that is mounted; in a container it may be below the hierarchy's own root.
        point: path where it is mounted.
    """

    version: int
    root: str
    point: Path


def mounts(proc: Path) -> Iterator[Mount]:
    """Yield the mounted hierarchies that may limit memory.

    Args:
        proc: path of ``/proc``.

    Raises:
        OSError, ValueError: ``mountinfo`` cannot be read or parsed.
    """
    for line in (proc / "self" / "mountinfo").read_text(errors="replace").splitlines():
        fields, _, source = line.partition(" - ")
        _, _, _, root, point, *_ = (_OCTAL.sub(lambda found: chr(int(found[1], 8)), field) for field in fields.split())
        kind, _, *options = source.split()
        if kind == "cgroup2":
            yield Mount(2, root, Path(point))
        elif kind == "cgroup" and "memory" in ",".join(options).split(","):
            yield Mount(1, root, Path(point))


def groups(pid: int | str, known: Iterable[Mount], proc: Path) -> Iterator[Group]:
    """Yield the memory cgroup of a process and its ancestors, the innermost first; none if they cannot be read.

    Args:
        pid: the process, or ``self``.
        known: mounted hierarchies, from ``mounts``.
        proc: path of ``/proc``.
    """
    known = tuple(known)
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            version = 2 if not controllers else 1
            if version == 1 and "memory" not in controllers.split(","):
                continue
            for mount in known:
                if mount.version == version:
                    yield from _chain(mount, PurePosixPath(path))


def _chain(mount: Mount, path: PurePosixPath) -> Iterator[Group]:
    """Yield the cgroup at ``path`` and its ancestors, as far as the mount shows them."""
    inside = path.relative_to(mount.root) if path.is_relative_to(mount.root) else PurePosixPath()
    for part in (inside, *inside.parents):
        yield Group(mount.version, f"cgroup {PurePosixPath(mount.root) / part}", mount.point / part)
