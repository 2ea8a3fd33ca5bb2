"""Process groups of a rank that goes on: what is inside of them is exchanged, so that whoever holds one need not know.

A group is an object that asks a *backend* for each collective. Backends connect ranks, and a connection to a process
that has died is of no use; so all ranks make new ones, in a store of their own, and register them in the old groups.
Three parts of torch that are not public are needed for that, and ``self_test`` tries them in a group of one.

- *A survivor* may wait in a collective for as long as the group's timeout. Whatever it waits for goes through sockets,
  which are shut down; they are known because they were not there before the group was made. A socket that listens is
  left alone: gloo ends the process when that is shut down.
- *A newcomer* makes its groups alone, as the others have theirs. Until it enters ``train()``, or where the others do
  not leave their loops until ``wrap_optimizer()``, they are of torch's backend "fake", which speaks to nobody; then it
  exchanges, as the others do.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_c10d: Any = c10d  # what is used of it is not public
_dist: Any = dist
_Type: Any = _dist.ProcessGroup.BackendType
_TYPES_FROM = 16
"""Numbers from here on are of no kind of backend: a group keeps the old one where it knows the number."""
_DEVICES = ("cpu", "cuda")
"""That a gloo backend is registered for."""
_MEMBER = "_rank_not_in_group"
"""What each collective that a program calls asks first."""
_LOCAL = ("get_rank", "get_world_size", "get_backend", "get_backend_config")
"""Functions of torch that ask this process alone, and look at its membership as collectives do."""
_OF_C10D = (c10d.__name__, "torch.distributed.c10d_logger")
"""Modules that a collective passes through."""
_TIMEOUT = timedelta(minutes=30)
Socket = tuple[int, int]
"""Descriptor and inode: the number alone may have been used again."""


class Groups:
    """The process groups of this process. Make it before the first of them.

    Args:
        seat: this process takes the seat of one that has died: it makes its groups alone.
    """

    def __init__(self, *, seat: bool) -> None:
        self._sockets: set[Socket] = set()
        self._timeouts: dict[Any, timedelta] = {}  # of groups that were made alone
        self._unseen = bool(_c10d._world.pg_map)
        self._before: list[Any] = []
        self._count = 0
        self._seat = seat
        self._store: Any = None  # where the ranks of the next launch meet
        self._wrapped: list[Any] | None = None  # the groups that there were in wrap_optimizer()
        self._asked, self._deaf = "", True
        self._member: Any = None  # torch's function, in whose place ``_note`` is
        self._stock = _c10d._new_process_group_helper, _c10d._store_based_barrier
        _c10d._new_process_group_helper = self._make
        if seat:
            import torch.testing._internal.distributed.fake_pg  # noqa: F401 # makes the backend "fake" known

            _c10d._store_based_barrier = lambda *_, **__: None

    def _make(self, *args: Any, **kwargs: Any) -> Any:
        make = self._stock[0]
        if self._seat:
            return self._make_alone(make, *args, **kwargs)
        before = _connected()
        try:
            return make(*args, **kwargs)
        finally:
            self._sockets |= _connected() - before

    def _make_alone(
        self, make: Callable[..., Any], size: Any, rank: Any, ranks: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs.pop("backend_options", None)
        group, store = make(size, rank, ranks, _c10d.Backend("fake"), *args, **kwargs)
        if isinstance(group, _dist.ProcessGroup):
            self._timeouts[group] = kwargs.get("timeout") or _TIMEOUT
            _c10d._world.pg_map[group] = (str(backend), store)
            _c10d._world.pg_backend_config[group] = str(_c10d.BackendConfig(_c10d.Backend(str(backend))))
        return group, store

    # ------------------------------------------------------------------------------------------------ at train()

    def enter(self) -> None:
        """``train()`` is about to be called for the first time: groups from now on are its own."""
        self._before, self._count = list(_c10d._world.pg_map), _c10d._world.group_count
        self.listen()

    def listen(self) -> None:
        """Note from now on, until ``in_loop``, what ``train()`` asks other ranks: nobody would answer a newcomer."""
        self._asked, self._wrapped = "", None
        self._deaf = not hasattr(_c10d, _MEMBER)
        if self._member is None and not self._deaf:
            self._member, _c10d._rank_not_in_group = _c10d._rank_not_in_group, self._note

    def _note(self, group: Any) -> bool:
        frame: FrameType | None = sys._getframe(1)
        name = "" if frame is None else frame.f_code.co_name
        while frame is not None and frame.f_globals.get("__name__") in _OF_C10D:
            frame = frame.f_back
        caller = "" if frame is None else str(frame.f_globals.get("__name__"))
        answered = name in _LOCAL or (name == "barrier" and self._wrapped is None)
        if not answered and not caller.startswith(("torch.", "ttp.")):
            self._asked = self._asked or name
        return bool(self._member(group))

    def wrapped(self) -> None:
        """``wrap_optimizer()`` was called: until then a newcomer is alone."""
        self._wrapped = list(_c10d._world.pg_map)

    def in_loop(self) -> str:
        """The loop has begun. Why a newcomer could not get there while the others stay in it; empty: it could."""
        if self._member is not None:
            _c10d._rank_not_in_group, self._member = self._member, None
        if self._deaf:
            return "this torch does not show what train() asks other ranks"
        if self._asked:
            return f"train() calls {self._asked}() before its first update, which nobody would answer a newcomer"
        if self._wrapped != list(_c10d._world.pg_map):
            return "train() makes or destroys process groups behind wrap_optimizer()"
        return ""

    def why_not(self) -> str:
        """Why these groups cannot be exchanged; empty: they can."""
        if self._unseen:
            return "process groups were made before @ttp_to_persist was met"
        if any(group not in _c10d._world.pg_map for group in self._before):
            return "train() destroys process groups that were there before"
        if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
            return "TORCH_GLOO_LAZY_INIT connects ranks later"
        for group in _c10d._world.pg_map:
            backends = {type(group._get_backend(device)).__name__ for device in group._device_types}
            if backends - {"ProcessGroupGloo", "FakeProcessGroup"}:
                return f"a process group is of {', '.join(sorted(backends))}; only gloo's can be exchanged"
        return ""

    def let_go(self) -> None:
        """Whoever waits in a collective gets an error. Any thread."""
        for descriptor, inode in self._sockets & _connected():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
                if os.fstat(found.fileno()).st_ino == inode:
                    found.shutdown(socket.SHUT_RDWR)

    def meet(self, address: str, port: int, within_s: float, said: str) -> list[str]:
        """Tell the ranks of the next launch something; returns what each of them says. ``renew`` comes next.

        Args:
            address: of a store that was not used before.
            port: likewise.
            within_s: how long the store waits for the others.
            said: by this rank.

        Raises:
            RuntimeError: they do not come.
        """
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        wait = timedelta(seconds=within_s)
        self._store = _dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)
        self._store.set(f"ttp/says/{rank}", said)
        return [self._store.get(f"ttp/says/{other}").decode() for other in range(size)]

    def renew(self, launch: int, *, all_of_them: bool = False) -> None:
        """All ranks: exchange the groups that were made before ``train()``, and destroy those that it has made.

        The names of groups are numbers: as they are counted from where they were, groups that ``train()`` makes anew
        have the names that the others' have, and whatever is kept by name (a ``DeviceMesh``) finds the new ones.

        Args:
            launch: number of this launch; no two exchanges of a process have the same.
            all_of_them: exchange those of ``train()`` too: it is not left.

        Raises:
            RuntimeError: the ranks do not have the same groups, or do not come.
        """
        self._sockets = set()
        if self._seat:
            self._seat = False
            _c10d._store_based_barrier = self._stock[1]
        store, self._store = self._store, None
        if all_of_them:
            self._exchange_all(store, launch)
            return
        if not self._before:
            if _dist.is_initialized():
                _dist.destroy_process_group()
            return
        for group in [group for group in _c10d._world.pg_map if group not in self._before]:
            _dist.destroy_process_group(group)
        _c10d._world.group_count = self._count
        self._exchange_all(store, launch)

    def _exchange_all(self, store: Any, launch: int) -> None:
        self._compare(store)
        for group in list(_c10d._world.pg_map):  # in order of creation, which is the same on all ranks
            self._exchange(group, store, launch)

    def _compare(self, store: Any) -> None:
        """Meet the other ranks; whoever has other groups would wait for ever in the first of them."""
        rank, mine = _dist.get_rank(), self._names()
        store.set(f"ttp/groups/{rank}", json.dumps([_c10d._world.group_count, mine]))
        for other in range(_dist.get_world_size()):
            count, theirs = json.loads(store.get(f"ttp/groups/{other}"))
            shared = [name for name, ranks in mine if other in ranks]
            if count != _c10d._world.group_count or [name for name, ranks in theirs if rank in ranks] != shared:
                raise RuntimeError(f"rank {other} has other process groups than rank {rank}")

    def _exchange(self, group: Any, store: Any, launch: int) -> None:
        name, desc = _c10d._world.pg_names[group], group.group_desc
        new_store = _dist.PrefixStore(f"ttp/{name}/", store)
        before = _connected()
        timeout = self._timeouts.pop(group, None) or _timeout(group)
        backend = _gloo(new_store, group.rank(), group.size(), timeout)
        self._sockets |= _connected() - before
        register(group, backend, alone=group._get_backend_name() == "custom", number=launch)
        group._set_group_name(name)  # both are kept by the backend
        group._set_group_desc(desc)
        _c10d._world.pg_map[group] = ("gloo", new_store)

    @staticmethod
    def _names() -> list[tuple[str, list[int]]]:
        """Every group that this rank is a member of, in order of creation: its name and its members."""
        world = _c10d._world
        return [(str(world.pg_names[group]), sorted(world.pg_group_ranks[group])) for group in world.pg_map]


def register(group: Any, backend: Any, *, alone: bool, number: int) -> None:
    """Have a group ask ``backend`` from now on.

    Args:
        group: the process group.
        backend: a new one.
        alone: there is only the backend "fake" in the group.
        number: of this exchange.
    """
    kind = _Type.GLOO if alone else _Type(_TYPES_FROM + number % (256 - _TYPES_FROM))
    for device in _DEVICES:
        group._register_backend(torch.device(device), kind, backend)
    if alone:
        group._set_default_backend(_Type.GLOO)


def self_test() -> str:
    """Why this torch is not as it has to be; empty: backends can be exchanged. Takes some milliseconds."""
    try:
        return _self_test()
    except Exception as problem:
        return f"this torch keeps process groups in another way: {problem!r}"


def _self_test() -> str:
    store, name, device = _dist.HashStore(), "ttp self test", torch.device("cpu")
    group = _dist.ProcessGroup(store, 0, 1)
    group._set_default_backend(_Type.GLOO)
    _c10d._register_process_group(name, group)
    try:
        for number in range(2):
            backend = _gloo(_dist.PrefixStore(str(number), store), 0, 1, timedelta(seconds=10))
            register(group, backend, alone=number == 0, number=number)
            group._set_group_name(name)
            if group._get_backend(device) is not backend:
                return "this torch does not let backends of a group be exchanged"
            value = torch.ones(1)
            group.allreduce([value]).wait()
            if value.item() != 1 or _c10d._resolve_process_group(name) is not group:
                return "a group is not the same after its backend was exchanged"
    finally:
        _c10d._unregister_process_group(name)
    return ""


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


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    lent = _LentStore(store)
    _lent.append(lent)
    backend = _dist.ProcessGroupGloo(_dist.PrefixStore("cpu/", lent), rank, size, timeout=timeout)
    backend._set_sequence_number_for_group()
    lent.store = None
    return backend


def _timeout(group: Any) -> timedelta:
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    found = getattr(options, "_timeout", None)
    return found if isinstance(found, timedelta) else _TIMEOUT


def _connected() -> set[Socket]:
    """Sockets of this process that are connected over TCP; none where that cannot be seen."""
    try:
        return set(_look())
    except OSError:
        return set()


def _look() -> Iterator[Socket]:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            descriptor = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
                if tcp and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield descriptor, os.fstat(found.fileno()).st_ino
