"""Breaks and makes the connections of process groups: sockets for gloo, communicators for NCCL.

- *gloo.* A rank that waits in a collective waits for data from sockets, so these are shut down. The sockets of a group
  are found as those that did not exist before the group was made, and have a time limit for sending, as gloo sets it:
  another thread of the program may connect to something at the same time. Listening sockets are left open: gloo ends
  the process if one is shut down.
- *NCCL.* Communicators are aborted all at once, each on a thread of its own: if ranks aborted them one after the other,
  in different orders, they could wait for each other. ``ABORT_S`` limits the time, because torch's own limit is the
  timeout of the group. After an abort the device runs the work that is queued behind the collective, on incomplete
  data, so ``ttp.core.rank.letting_go`` decides first whether a rank may abort. Aborted backends are never used again.
  This has not been run on a GPU. See decision 61.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import select
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ttp.config import Config
from ttp.launch import nccl
from ttp.processor.faults import describe
from ttp.wire.sockets import second

_c10d: Any = c10d  # ttp uses private parts of it
_dist: Any = dist
_Type: Any = _dist.ProcessGroup.BackendType
TIMEOUT = timedelta(minutes=30)
"""The timeout of a group for which none is known."""
ABORT_S = 10.0
"""Seconds for all aborts together. Other projects report half a second, and 10 ms for each waiting kernel."""
NCCL_MIN = (2, 26)
"""Oldest version of NCCL whose aborts are trusted: other projects that abort communicators require it."""
_MODIFY = 3  # of ``epoll_ctl``
_REGISTERED = re.compile(r"tfd: *(\d+) .*data: *([0-9a-f]+)")
Socket = tuple[int, int]
"""Descriptor and inode of a socket: the number of the descriptor may have been used again for another one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Describes the group that a new backend is for, and the rank of this process in it.

    Args:
        store: store of the group, through which its members connect.
        rank: rank of this process in the group.
        size: number of members.
        name: name of the group.
        members: the members' ranks in the job; empty: all ranks, as torch has it for the default group.
        timeout: timeout of collectives.
        options: options of the old backend, or those that the program gave; None: none are known.
    """

    store: Any
    rank: int
    size: int
    name: str
    members: Sequence[int] = ()
    timeout: timedelta = TIMEOUT
    options: Any = None


class Transport(Protocol):
    """Breaks and makes the connections of one kind of backend."""

    kind: Any
    """Type of the backend in torch's groups."""
    backend: str
    """Class name of the backend."""

    def let_go(self, backends: Sequence[Any]) -> None:
        """Break the connections of backends, so that threads blocked in a collective raise or return. Any thread.

        Raises:
            RuntimeError: Not all connections could be broken.
        """

    def connect(self, place: Place) -> Any:
        """Return a new backend. Collective: all members of the group call it.

        Raises:
            RuntimeError: Other members did not connect in time.
        """

    def why_not(self) -> str:
        """Return why connections cannot be made again in this process; empty: no reason is known."""


class Gloo:
    """The ``Transport`` of gloo: connections are sockets of this process."""

    kind, backend = _Type.GLOO, "ProcessGroupGloo"

    def __init__(self) -> None:
        self._sockets: set[Socket] = set()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Record the connections that are made while the block runs as those of backends."""
        before = _sockets()
        try:
            yield
        finally:
            self._sockets |= {found for found in _sockets() - before if _connected(found) and _limits_sending(found)}

    def forget(self) -> None:
        """Forget all connections, because their backends are not used any more."""
        _quieten({descriptor for descriptor, inode in self._sockets if _connected((descriptor, inode))})
        self._sockets = set()

    def let_go(self, backends: Sequence[Any]) -> None:
        """See ``Transport.let_go``. Breaks all recorded connections, whatever ``backends`` holds."""
        for known in list(self._sockets):  # another thread may be making a group
            _connected(known, shut_down=True)

    def connect(self, place: Place) -> Any:
        """See ``Transport``."""
        lent = _LentStore(place.store)
        _lent.append(lent)
        with self.noting():
            store = _dist.PrefixStore("cpu/", lent)
            backend = _dist.ProcessGroupGloo(store, place.rank, place.size, timeout=place.timeout)
        backend._set_sequence_number_for_group()
        lent.store = None
        return backend

    def why_not(self) -> str:
        """See ``Transport``."""
        lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")
        return "TORCH_GLOO_LAZY_INIT is set, so that gloo connects ranks only when they communicate" if lazy else ""


class Nccl:
    """The ``Transport`` of NCCL: connections are communicators."""

    kind, backend = _Type.NCCL, "ProcessGroupNCCL"

    def let_go(self, backends: Sequence[Any]) -> None:
        """See ``Transport``."""
        deadline = time.monotonic() + ABORT_S
        ended: dict[int, str] = {}

        def abort(number: int) -> None:
            try:
                backends[number].abort()
                ended[number] = ""
            except Exception as problem:
                ended[number] = describe(problem)

        threads = [
            threading.Thread(target=abort, args=(number,), name="ttp-abort", daemon=True)
            for number in range(len(backends))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if failed := list(filter(None, list(ended.values()))):
            raise RuntimeError(f"a communicator of NCCL could not be aborted: {failed[0]}")
        if late := len(backends) - len(ended):
            raise RuntimeError(
                f"{late} of {len(backends)} process groups of NCCL were not aborted within {ABORT_S:g} s"
            )

    def connect(self, place: Place) -> Any:
        """See ``Transport.connect``. The members connect in the first collective, so the backend keeps the store."""
        options = _c10d.ProcessGroupNCCL.Options()
        with contextlib.suppress(AttributeError):  # an older NCCL has no config
            options.config = place.options.config
        options.is_high_priority_stream = bool(getattr(place.options, "is_high_priority_stream", False))
        options._timeout = place.timeout
        options.global_ranks_in_group, options.group_name = list(place.members), place.name
        store = _dist.PrefixStore("cuda/", place.store)
        backend = _c10d.ProcessGroupNCCL(store, place.rank, place.size, options)
        backend._set_sequence_number_for_group()
        return backend

    def why_not(self) -> str:
        """See ``Transport``."""
        if (found := _nccl_version()) < NCCL_MIN:
            version, least = (".".join(map(str, each)) for each in (found, NCCL_MIN))
            return f"NCCL is {version}; communicators are known to be aborted safely only with {least} or later"
        return "; ".join(nccl.why_not_go_on(os.environ, Config.from_env(), nccl.launcher_environ()))


def of_names(*, with_nccl: bool) -> Mapping[str, Transport]:
    """Return the transports by the names that torch gives their backends, in the order in which they are let go.

    NCCL comes first: its abort closes the sockets that NCCL has made, so ``Gloo`` does not shut them down.
    """
    known: dict[str, Transport] = {"nccl": Nccl()} if with_nccl else {}
    return known | {"gloo": Gloo()}


def _nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that is loaded, which may be newer than the one that torch was built with."""
    asked = getattr(_c10d.ProcessGroupNCCL, "get_runtime_nccl_version", None)
    cuda: Any = torch.cuda
    return tuple(asked() if asked is not None else cuda.nccl.version())


class _LentStore(_dist.Store):  # type: ignore[misc,name-defined,unused-ignore] # of torch, which is Any here
    """A store that is disconnected once the backend that uses it has connected to its peers.

    A group keeps its old backends, and they keep their stores, until the process ends: each would hold a connection.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.store = store

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> Any:
        return self.store.get(key)

    def add(self, key: str, amount: int) -> Any:
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> Any:
        return self.store.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.store.wait(keys, *timeout)


_lent: list[_LentStore] = []  # keeps the Python objects alive: torch keeps only their C++ parts


def _sockets() -> set[Socket]:
    """Return the sockets of this process; an empty set where its descriptors cannot be listed.

    A process may have thousands, and this runs twice for each group: ``_connected`` is called for new ones only.
    """
    try:
        with os.scandir("/proc/self/fd") as entries:
            listed = [int(entry.name) for entry in entries]
    except OSError:
        return set()
    found = set()
    for descriptor in listed:
        with contextlib.suppress(OSError):
            seen = os.fstat(descriptor)
            if stat.S_ISSOCK(seen.st_mode):
                found.add((descriptor, seen.st_ino))
    return found


class _Event(ctypes.Structure):
    """An event of epoll, as the kernel has it."""

    _pack_ = 1 if platform.machine() == "x86_64" else 8
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


def _quieten(descriptors: Set[int]) -> None:
    """Let gloo's threads hear at most once more of sockets that are shut down, instead of all the time. Never raises.

    A socket that gloo has not closed then holds a part of a message for a buffer that does not exist any more. gloo's
    thread does not read that part, so it would never sleep again. The socket stays known to epoll, because gloo ends
    the process if it is not.
    """
    for entry in Path("/proc/self/fd").iterdir() if descriptors else ():
        with contextlib.suppress(OSError):
            if "[eventpoll]" in str(entry.readlink()):
                for known, data in _REGISTERED.findall(Path(f"/proc/self/fdinfo/{entry.name}").read_text()):
                    if int(known) in descriptors:
                        event = _Event(select.EPOLLET, int(data, 16))
                        ctypes.CDLL(None).epoll_ctl(int(entry.name), _MODIFY, int(known), ctypes.byref(event))


def _limits_sending(known: Socket) -> bool:
    """Return whether a time limit for sending was set for the socket."""
    with contextlib.suppress(OSError), second(known[0]) as found:
        return any(found.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16))
    return False


def _connected(known: Socket, *, shut_down: bool = False) -> bool:
    """Return whether ``known`` still exists and is a TCP socket that does not listen.

    Args:
        known: a socket that this process had.
        shut_down: shut the connection down if it is one.
    """
    descriptor, inode = known
    with contextlib.suppress(OSError), second(descriptor) as found:
        if os.fstat(found.fileno()).st_ino != inode:  # the descriptor was closed, and its number used again
            return False
        tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
        connected = tcp and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if connected and shut_down:
            found.shutdown(socket.SHUT_RDWR)
        return connected
    return False
