"""Exchanges the backends inside existing process groups after a rank has died, so that the group objects stay usable.

A process group of torch passes each collective on to a *backend*, which connects the ranks of the group and cannot
replace the connection to a process that has died. So all ranks make new backends, which connect through a new store,
and register them in the existing groups. That needs private parts of torch; ``self_test`` tries them in a group of one
rank. Decision 61 has the reasons for NCCL.

- *A survivor* (a rank whose process lives on) may be blocked in a collective until the group's timeout. ``let_go``
  breaks its connections, in a way that depends on the kind of backend (``transport.py``).
- *A newcomer* (the process that replaces a dead one) makes its groups alone, with torch's backend "fake", which
  connects to no rank, because the survivors have their groups already. It exchanges the backends together with the
  survivors when it enters ``train()``, or in ``wrap_optimizer()`` if the survivors stay in their loops.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ttp.adapters.torch.transport import TIMEOUT, Gloo, Place, Transport, of_names

log = logging.getLogger("ttp.adapters.torch")

_c10d: Any = c10d  # ttp uses private parts of it
_dist: Any = dist
_Type: Any = _dist.ProcessGroup.BackendType
_TYPES_FROM = 16
"""First backend type number that torch does not use. Each exchange takes a new number: under a number that it knows
already, a group keeps its old backend."""
_MEMBER = "_rank_not_in_group"
"""Name of the private function of torch that each collective calls first: replaced, it shows which are called."""
_LOCAL = ("get_rank", "get_world_size", "get_backend", "get_backend_config")
"""Functions of torch that call ``_MEMBER`` as collectives do, but communicate with no other rank."""
_OF_C10D = (c10d.__name__, "torch.distributed.c10d_logger")
"""Modules of torch whose frames lie between a collective and the code that calls it."""
_NEW_NCCL = "ProcessGroupNCCL2"
"""Class name of the backend that ``nccl`` names from torch 2.15 on."""
_ALONE = "FakeProcessGroup"
"""Class name of torch's backend that connects to no rank."""


class Groups:
    """Tracks the process groups of this process and exchanges their backends. Create it before the first group.

    Args:
        seat: True if this process is a newcomer, which makes its groups alone.
        with_nccl: exchange backends of NCCL too, not only those of gloo.
    """

    def __init__(self, *, seat: bool, with_nccl: bool = False) -> None:
        self._transports = of_names(with_nccl=with_nccl)
        gloo = self._transports["gloo"]
        assert isinstance(gloo, Gloo)
        self._gloo = gloo
        self._tried: dict[str, str] = {}  # results of the self-tests, by name of the backend
        self._alone: dict[Any, tuple[timedelta, Any]] = {}  # timeout and options of groups that were made alone
        self._unseen = bool(_c10d._world.pg_map)
        self._before: list[Any] = []
        self._count = 0
        self._seat = seat
        self._store: Any = None  # the store in which the ranks of the next launch meet
        self._wrapped: list[Any] | None = None  # the groups that existed when wrap_optimizer() was called
        self._asked, self._deaf = "", True
        self._member: Any = None  # torch's function, while ``_note`` replaces it
        self._stock = _c10d._new_process_group_helper, _c10d._store_based_barrier
        _c10d._new_process_group_helper = self._make
        if seat:
            import torch.testing._internal.distributed.fake_pg  # noqa: F401 # registers the backend "fake"

            _c10d._store_based_barrier = lambda *_, **__: None

    def _make(self, *args: Any, **kwargs: Any) -> Any:
        """Make a group, in place of torch's ``_new_process_group_helper``."""
        make = self._stock[0]
        if self._seat:
            return self._make_alone(make, *args, **kwargs)
        with self._gloo.noting():
            return make(*args, **kwargs)

    def _make_alone(
        self, make: Callable[..., Any], size: Any, rank: Any, ranks: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        options = kwargs.pop("backend_options", None)
        group, store = make(size, rank, ranks, _c10d.Backend("fake"), *args, **kwargs)
        if isinstance(group, _dist.ProcessGroup):
            self._alone[group] = kwargs.get("timeout") or TIMEOUT, options
            _c10d._world.pg_map[group] = (str(backend), store)
            _c10d._world.pg_backend_config[group] = str(_c10d.BackendConfig(_c10d.Backend(str(backend))))
        return group, store

    # ------------------------------------------------------------------------------------------------ at train()

    def enter(self) -> None:
        """Count groups that are made from now on as groups of ``train()``. Call it before the first ``train()``."""
        self._before, self._count = list(_c10d._world.pg_map), _c10d._world.group_count
        self.listen()

    def listen(self) -> None:
        """Record, until ``in_loop``, whether ``train()`` calls a collective: survivors would not join a newcomer's."""
        self._asked, self._wrapped = "", None
        self._deaf = not hasattr(_c10d, _MEMBER)
        if self._member is None and not self._deaf:
            self._member, _c10d._rank_not_in_group = _c10d._rank_not_in_group, self._note

    def _note(self, group: Any) -> bool:
        """Record the name of the collective that calls this, in place of torch's ``_rank_not_in_group``."""
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
        """Note that ``wrap_optimizer()`` is called. Until then the groups of a newcomer connect to no other rank."""
        self._wrapped = list(_c10d._world.pg_map)

    def in_loop(self) -> str:
        """Note that the training loop begins, and stop recording collectives.

        Returns:
            Why a newcomer could not come as far as this while the survivors stay in their loops; empty: it could.
        """
        if self._member is not None:
            _c10d._rank_not_in_group, self._member = self._member, None
        if self._deaf:
            return "this version of torch does not show which collectives train() calls"
        if self._asked:
            return f"train() calls {self._asked}() before its first update: a newcomer would call it alone"
        if self._wrapped != list(_c10d._world.pg_map):
            return "train() makes or destroys process groups after wrap_optimizer()"
        return ""

    def why_not(self) -> str:
        """Return why the backends of the groups of this process cannot be exchanged; empty: they can."""
        if self._unseen:
            return "process groups were made before @ttp_to_persist was applied"
        if any(group not in _c10d._world.pg_map for group in self._before):
            return "train() destroys process groups that were made before it was called"
        for group in _c10d._world.pg_map:
            for name, devices in _kinds(group).items():
                kind = type(group._get_backend(torch.device(devices[0]))).__name__
                if kind != _ALONE and (reason := self._why_not(name, kind, devices[0])):
                    return reason
        return ""

    def _why_not(self, name: str, kind: str, device: str) -> str:
        transport = self._transports.get(name)
        if transport is None or transport.backend != kind:
            only = "gloo and NCCL" if len(self._transports) > 1 else "gloo"
            todo = ": start the job with TORCH_DIST_USE_NCCL2=0" if kind == _NEW_NCCL and name == "nccl" else ""
            return f"a process group uses {kind}; only the backends of {only} can be exchanged{todo}"
        if name not in self._tried:  # late: at the entry of train() a program may not have chosen its device
            self._tried[name] = transport.why_not() or ("" if name == "gloo" else self_test(transport, device))
        return self._tried[name]

    def untouched(self) -> bool:
        """Return whether the groups are still exactly those that existed before ``train()``."""
        return list(_c10d._world.pg_map) == self._before

    @property
    def aborts(self) -> bool:
        """True if ``let_go`` aborts kernels on a device, which then runs the work that is queued behind them."""
        return bool(self._backends("nccl"))

    def _backends(self, name: str) -> list[Any]:
        """Return the backends of this name in all groups, without those that were made alone."""
        found = []
        for group in list(_c10d._world.pg_map):
            for device in _kinds(group).get(name, [])[:1]:
                backend = group._get_backend(torch.device(device))
                found += [] if type(backend).__name__ == _ALONE else [backend]
        return found

    def let_go(self) -> None:
        """Break the connections of all groups, so that threads blocked in a collective raise or return. Any thread.

        Raises:
            RuntimeError: Not all connections could be broken.
        """
        for name, transport in self._transports.items():
            backends, began_s = self._backends(name), time.monotonic()
            transport.let_go(backends)
            if backends and name == "nccl":
                took_s = time.monotonic() - began_s
                log.info("%d process groups of NCCL were aborted in %.3f s", len(backends), took_s)

    def meet(self, address: str, port: int, within_s: float, word: str) -> list[str]:
        """Connect to the store of the next launch, and exchange a text with all its ranks. Call ``renew`` next.

        Args:
            address: host of a TCPStore that was not used before.
            port: port of that store.
            within_s: seconds to wait for the other ranks.
            word: text of this rank.

        Returns:
            The text of every rank, by rank.

        Raises:
            RuntimeError: Other ranks did not connect in time.
        """
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        wait = timedelta(seconds=within_s)
        self._store = _dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)
        self._store.set(f"ttp/says/{rank}", word)
        return [self._store.get(f"ttp/says/{other}").decode() for other in range(size)]

    def renew(self, launch: int, *, all_of_them: bool = False) -> None:
        """Exchange the backends of groups that were made before ``train()``, and destroy groups that ``train()`` made.

        Collective: all ranks call it, after ``meet``. torch names groups by a counter, which is set back to its value
        before ``train()``: so the groups that ``train()`` makes again have the same names on all ranks, and objects
        that look a group up by name (a ``DeviceMesh``) find the new one.

        Args:
            launch: number of this launch, different for each exchange in a process.
            all_of_them: exchange the backends of the groups of ``train()`` too, instead of destroying these groups,
                because the survivors stay in their loops.

        Raises:
            RuntimeError: The ranks do not have the same groups, or did not connect in time.
        """
        self._gloo.forget()
        if self._seat:
            self._seat = False
            _c10d._store_based_barrier = self._stock[1]
        store, self._store = self._store, None
        # A group of torch before 2.8 that frees its backends waits for their threads with the interpreter locked, and
        # hangs if one of them frees a tensor of Python. A backend that Python frees waits with it unlocked.
        _backends = self._backends("gloo")
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
        """Check that all ranks have the same groups: otherwise the ranks would wait for each other forever.

        Raises:
            RuntimeError: The groups of this rank and of another one differ.
        """
        rank, world = _dist.get_rank(), _c10d._world
        # The name and the members of each group that this rank belongs to, in order of creation.
        mine = [(str(world.pg_names[group]), sorted(world.pg_group_ranks[group])) for group in world.pg_map]
        store.set(f"ttp/groups/{rank}", json.dumps([world.group_count, mine]))
        for other in range(_dist.get_world_size()):
            count, theirs = json.loads(store.get(f"ttp/groups/{other}"))
            shared = [name for name, ranks in mine if other in ranks]
            if count != world.group_count or [name for name, ranks in theirs if rank in ranks] != shared:
                raise RuntimeError(f"rank {other} and rank {rank} have different process groups")

    def _exchange(self, group: Any, store: Any, launch: int) -> None:
        """Connect new backends for a group, and register them in place of the old ones."""
        world, name, desc, kinds = _c10d._world, _c10d._world.pg_names[group], group.group_desc, _kinds(group)
        new_store = _dist.PrefixStore(f"ttp/{name}/", store)
        alone, bound = group._get_backend_name() == "custom", group.bound_device_id
        given = self._alone.pop(group, None)
        members = [] if group is _dist.group.WORLD else sorted(world.pg_group_ranks[group])
        for number, (kind, devices) in enumerate(kinds.items(), len(kinds) * launch):
            transport = self._transports[kind]
            timeout, options = given or _made_with(group._get_backend(torch.device(devices[0])))
            place = Place(new_store, group.rank(), group.size(), name, members, timeout, options)
            register(group, transport.connect(place), transport.kind if alone else _fresh(number), devices)
        if alone:
            group._set_default_backend(self._transports["nccl" if "nccl" in kinds else "gloo"].kind)
        group._set_group_name(name)  # the backends keep name and description, so the new ones lack them
        group._set_group_desc(desc)
        world.pg_map[group] = (world.pg_map[group][0], new_store)
        if bound is not None and "nccl" in kinds:  # as torch does; all members are here, in the same order
            group._get_backend(bound).eager_connect_single_device(bound)


def register(group: Any, backend: Any, kind: Any, devices: Sequence[str]) -> None:
    """Make a group use ``backend`` from now on.

    Args:
        group: the process group.
        backend: the new backend.
        kind: type of the backend; it must be new to the group, because a group keeps its old backend of a known type.
        devices: device types of the tensors for which the backend is used.

    Raises:
        RuntimeError: The group still uses another backend.
    """
    for device in devices:
        group._register_backend(torch.device(device), kind, backend)
        if group._get_backend(torch.device(device)) is not backend:
            raise RuntimeError("this version of torch does not let the backend of a process group be exchanged")


def _fresh(number: int) -> Any:
    """Return a type number, which torch itself does not use, for the ``number``-th exchanged backend."""
    return _Type(_TYPES_FROM + number % (256 - _TYPES_FROM))


def _kinds(group: Any) -> dict[str, list[str]]:
    """Return the names of a group's backends, and for each the device types for which it is used."""
    config = _c10d.BackendConfig(_c10d.Backend(_c10d._world.pg_backend_config[group]))
    found: dict[str, list[str]] = {}
    for device, name in config.get_device_backend_map().items():
        found.setdefault(str(name), []).append(device)
    return found


def _made_with(backend: Any) -> tuple[timedelta, Any]:
    """Return the timeout and the options with which a backend was made; options None: the backend has none."""
    options = getattr(backend, "options", None)
    found = getattr(options, "_timeout", None)
    return (found if isinstance(found, timedelta) else TIMEOUT), options


def self_test(transport: Transport | None = None, device: str = "cpu") -> str:
    """Return why backends cannot be exchanged with this torch; empty: they can. Takes some milliseconds with gloo.

    Args:
        transport: transport of the backends to try; None: gloo's.
        device: type of the device for which a group of one rank is made.
    """
    transport = Gloo() if transport is None else transport
    try:
        return _self_test(transport, device)
    except Exception as problem:
        return f"this version of torch keeps process groups in another way: {problem!r}"


def _self_test(transport: Transport, device: str) -> str:
    store, name, backends = _dist.HashStore(), "ttp self test", []
    group = _dist.ProcessGroup(store, 0, 1)
    group._set_default_backend(transport.kind)
    _c10d._register_process_group(name, group)
    try:
        for number in range(2):
            place = Place(_dist.PrefixStore(str(number), store), 0, 1, name, [0], timedelta(seconds=10))
            backend = transport.connect(place)
            backends.append(backend)
            register(group, backend, _fresh(number) if number else transport.kind, [device])
            group._set_group_name(name)
            value = torch.ones(1, device=device)
            group.allreduce([value]).wait()
            if value.item() != 1 or _c10d._resolve_process_group(name) is not group:
                return "in this version of torch a process group does not work after its backend was exchanged"
            transport.let_go([backend])
    finally:
        _c10d._unregister_process_group(name)
        del group  # before its backends: see ``renew``
    return ""
