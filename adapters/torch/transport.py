"""How the connections of a process group are broken, and made again: gloo's are sockets, NCCL's are communicators.

- *gloo.* Whatever a rank waits for goes through sockets, which are shut down; they are known because they were not
  there before the group was made. A socket that listens is left alone: gloo ends the process when that is shut down.
- *NCCL.* Communicators are aborted, all at once and each on a thread of its own: one after the other they may wait for
  each other on other ranks. An abort that does not come back is given up by a deadline of ours, as the one of torch is
  the time-out of the group. What is queued behind the collective runs on whatever that has left: who may abort, and
  when, is decided before (``ttp.core.rank.letting_go``). Aborted backends are left alone. Never run on a GPU.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ttp.config import Config
from ttp.launch import nccl
from ttp.processor.faults import describe

_c10d: Any = c10d  # what is used of it is not public
_dist: Any = dist
_Type: Any = _dist.ProcessGroup.BackendType
TIMEOUT = timedelta(minutes=30)
ABORT_S = 10.0
"""How long all aborts together may take. Others report half a second, and 10 ms for each kernel that waits."""
NCCL_MIN = (2, 26)
"""Others who abort communicators ask for as much."""
Socket = tuple[int, int]
"""Descriptor and inode: the number alone may have been used again."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a new backend belongs.

    Args:
        store: of the group, in which its members meet.
        rank: in the group.
        size: of the group.
        name: of the group.
        members: ranks of the job; none: all of them, as torch says it of the default group.
        timeout: of collectives.
        options: that the program, or the backend before, was made with; None: none are known.
    """

    store: Any
    rank: int
    size: int
    name: str
    members: Sequence[int] = ()
    timeout: timedelta = TIMEOUT
    options: Any = None


class Transport(Protocol):
    """One kind of backend."""

    kind: Any
    """Its type, as torch's groups know it."""
    backend: str
    """The name of its class."""

    def let_go(self, backends: Sequence[Any]) -> None:
        """Whoever waits in a collective gets an error, or comes out of it. Any thread.

        Raises:
            RuntimeError: not all could be broken.
        """

    def connect(self, place: Place) -> Any:
        """A new backend. All members of the group call it.

        Raises:
            RuntimeError: they do not come.
        """

    def why_not(self) -> str:
        """Why its connections cannot be made again in this process; empty: nothing is known against it."""


class Gloo:
    """See ``Transport``."""

    kind, backend = _Type.GLOO, "ProcessGroupGloo"

    def __init__(self) -> None:
        self._sockets: set[Socket] = set()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Connections that are made inside are those of backends."""
        before = _sockets()
        try:
            yield
        finally:
            self._sockets |= {found for found in _sockets() - before if _connected(found)}

    def forget(self) -> None:
        """All backends so far are of no use any more."""
        self._sockets = set()

    def let_go(self, backends: Sequence[Any]) -> None:
        """See ``Transport``; of all groups that were made."""
        for known in self._sockets:
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
        return "TORCH_GLOO_LAZY_INIT connects ranks later" if lazy else ""


class Nccl:
    """See ``Transport``."""

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
        if failed := [said for said in list(ended.values()) if said]:
            raise RuntimeError(f"a communicator of NCCL could not be aborted: {failed[0]}")
        if late := len(backends) - len(ended):
            raise RuntimeError(
                f"{late} of {len(backends)} process groups of NCCL were not aborted within {ABORT_S:g} s"
            )

    def connect(self, place: Place) -> Any:
        """See ``Transport``. The members meet in its first collective, and keep the store for that."""
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
            return f"NCCL is {version}, and aborts soundly from {least} on, as far as is known"
        said = nccl.why_not_go_on(os.environ, Config.from_env(), nccl.launcher_environ())
        return "; ".join(said)


def of_names(*, with_nccl: bool) -> Mapping[str, Transport]:
    """Each transport by its name in torch, in the order in which connections are broken.

    Sockets that NCCL has made are closed by an abort: none of them is shut down then.
    """
    known: dict[str, Transport] = {"nccl": Nccl()} if with_nccl else {}
    return known | {"gloo": Gloo()}


def _nccl_version() -> tuple[int, ...]:
    """Of the library that is loaded, which may be newer than the one that torch was built with."""
    asked = getattr(_c10d.ProcessGroupNCCL, "get_runtime_nccl_version", None)
    cuda: Any = torch.cuda
    return tuple(asked() if asked is not None else cuda.nccl.version())


class _LentStore(_dist.Store):  # type: ignore[misc,name-defined,unused-ignore] # of torch, which is Any here
    """The store of a backend while it connects to the others.

    A group keeps its old backends until the process ends, and they their stores, so each would hold a connection.
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


_lent: list[_LentStore] = []  # torch does not keep what Python has added to an object that it keeps


def _sockets() -> set[Socket]:
    """Return the sockets of this process; none where its descriptors cannot be listed.

    A process may have thousands, and this runs twice for each group: what they are is asked of the new ones only.
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


def _connected(known: Socket, *, shut_down: bool = False) -> bool:
    """Return whether ``known`` still exists and is a TCP socket that does not listen.

    Args:
        known: a socket that this process had.
        shut_down: end the connection if so.
    """
    descriptor, inode = known
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        if os.fstat(found.fileno()).st_ino != inode:  # the descriptor was closed, and its number used again
            return False
        tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
        connected = tcp and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if connected and shut_down:
            found.shutdown(socket.SHUT_RDWR)
        return connected
    return False
