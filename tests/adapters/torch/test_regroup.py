"""The backends inside process groups are exchanged; a torch in which that does not work is refused without harm."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.forking import fork
from ttp.adapters.torch import regroup
from ttp.adapters.torch.transport import Gloo, Place

_dist: Any = dist
CPU = torch.device("cpu")


def test_this_torch_lets_backends_be_exchanged() -> None:
    assert regroup.self_test() == ""


@pytest.mark.parametrize("breaks", ["the old one stays", "it raises"])
def test_a_torch_that_does_not_is_refused(breaks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = regroup.register

    def register(group: Any, backend: Any, kind: Any, devices: Sequence[str]) -> None:
        if kind == _dist.ProcessGroup.BackendType.GLOO:
            made(group, backend, kind, devices)
        elif breaks == "the old one stays":
            made(group, backend, _dist.ProcessGroup.BackendType.GLOO, devices)
        elif breaks == "it raises":
            raise TypeError("no such number")

    monkeypatch.setattr(regroup, "register", register)
    assert regroup.self_test().startswith("this version of torch ")


def self_tested() -> None:
    assert regroup.self_test() == ""


def renewed() -> None:
    groups = regroup.Groups(seat=False)
    groups.enter()
    dist.init_process_group("gloo", store=_dist.HashStore(), rank=0, world_size=1)
    hold_up_other_threads()
    dist.all_reduce(torch.ones(1))
    groups.renew(1)
    regroup._c10d._new_process_group_helper = groups._stock[0]


def hold_up_other_threads() -> None:
    """Let the threads of gloo run only while this one waits."""
    for entry in Path("/proc/self/task").iterdir():
        thread = int(entry.name)
        if thread != threading.get_native_id():
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def repeat_on_one_cpu(way: Callable[[], None]) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    register, module = regroup.register, cast(Any, regroup)

    def registered(*args: Any) -> None:
        register(*args)
        hold_up_other_threads()

    module.register = registered
    for _ in range(50):
        way()


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8),
    reason="torch 2.8 and later free groups with the interpreter unlocked",
)
@pytest.mark.parametrize("way", [self_tested, renewed])
def test_a_group_ends_while_a_thread_of_it_frees_a_tensor(way: Callable[[], None]) -> None:
    """The thread needs the interpreter, so the interpreter must not wait for the thread."""
    process = fork(repeat_on_one_cpu, (way,))
    process.join(60)
    hangs = process.exitcode is None
    process.kill()
    process.join()
    assert not hangs and process.exitcode == 0


def connected(port: int) -> int:
    """Return the connections of this process to a port."""
    found = psutil.net_connections("tcp")
    return sum(each.pid == os.getpid() and getattr(each.raddr, "port", None) == port for each in found)


def test_a_backend_that_is_connected_holds_no_connection_to_the_store(server: Any) -> None:
    before = connected(server.port)
    client = _dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    assert connected(server.port) == before + 1
    backend = Gloo().connect(Place(_dist.PrefixStore("some", client), 0, 1, "some", [0]))
    del client
    gc.collect()
    assert connected(server.port) == before
    value = torch.ones(1)
    backend.allreduce([value]).wait()
    assert value.item() == 1


def test_a_backend_whose_partners_do_not_come_is_given_up(server: Any) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        Gloo().connect(Place(server, 0, 2, "some", [0, 1], timedelta(seconds=0.2)))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., regroup.Groups]]:
    """Return a function that makes groups. Torch's state is restored at the end."""
    for name in ("_new_process_group_helper", "_store_based_barrier", "_rank_not_in_group"):
        monkeypatch.setattr(regroup._c10d, name, getattr(regroup._c10d, name))
    yield regroup.Groups
    _backends = [group._get_backend(CPU) for group in regroup._c10d._world.pg_map]  # see ``Groups.renew``
    if dist.is_initialized():
        dist.destroy_process_group()
    monkeypatch.undo()  # frees the groups


def test_groups_that_nobody_has_seen_being_made_are_not_exchanged(made: Callable[..., regroup.Groups]) -> None:
    dist.init_process_group("gloo", store=_dist.HashStore(), rank=0, world_size=1)
    groups = made(seat=False)
    groups.enter()
    assert groups.why_not() == "process groups were made before @ttp_to_persist was applied"


def test_a_seat_makes_its_groups_alone_until_they_are_exchanged(made: Callable[..., regroup.Groups]) -> None:
    barrier = regroup._c10d._store_based_barrier
    groups = made(seat=True)
    dist.init_process_group("gloo", store=_dist.HashStore(), rank=1, world_size=2)  # nobody else is there
    dist.barrier()
    groups.enter()
    assert groups.why_not() == ""
    dist.new_group([0, 1])
    groups._before = []
    dist.destroy_process_group()
    groups.renew(1)  # nothing is left to be exchanged
    assert regroup._c10d._store_based_barrier is barrier


@pytest.mark.parametrize(
    ("asks", "where", "why"),
    [
        ("nothing", "before", ""),
        ("itself", "before", ""),
        ("barrier", "before", ""),  # nobody waits for a newcomer there, nor does it
        ("barrier", "behind", "train() calls barrier() before its first update: a newcomer would call it alone"),
        ("all_reduce", "before", "train() calls all_reduce() before its first update"),
        ("all_gather_object", "before", "train() calls all_gather_object() before its first update"),
        ("new_group", "before", ""),
        ("new_group", "behind", "train() makes or destroys process groups after wrap_optimizer()"),
        ("ddp", "before", ""),
    ],
)
def test_what_train_asks_other_ranks_before_its_loop_is_noted(
    made: Callable[..., regroup.Groups], asks: str, where: str, why: str
) -> None:
    stock, groups = regroup._c10d._rank_not_in_group, made(seat=False)
    dist.init_process_group("gloo", store=_dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))  # before train() is no affair of the loop
    groups.enter()
    ways: dict[str, Any] = {
        "nothing": lambda: None,
        "itself": lambda: (dist.get_rank(), dist.get_world_size(), dist.get_backend(), dist.is_initialized()),
        "barrier": dist.barrier,
        "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
        "all_gather_object": lambda: dist.all_gather_object([None], "mine"),
        "new_group": lambda: dist.new_group([0]),
        "ddp": lambda: DistributedDataParallel(nn.Linear(1, 1)),
    }
    if where == "before":
        ways[asks]()
    groups.wrapped()
    if where == "behind":
        ways[asks]()
    found = groups.in_loop()
    assert found.startswith(why) and bool(found) == bool(why)
    assert regroup._c10d._rank_not_in_group is stock
    dist.all_reduce(torch.ones(1))
    assert groups.in_loop() == found, "what follows is in the loop"


def test_groups_that_were_made_before_train_and_destroyed_in_it_are_not_exchanged(
    made: Callable[..., regroup.Groups],
) -> None:
    groups = made(seat=False)
    dist.init_process_group("gloo", store=_dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group([0])
    groups.enter()
    assert groups.why_not() == ""
    dist.destroy_process_group(group)
    assert groups.why_not() == "train() destroys process groups that were made before it was called"


def test_in_a_torch_that_shows_no_collectives_no_rank_stays_in_its_loop(
    made: Callable[..., regroup.Groups], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer might call one alone, and hang: the survivors leave ``train()`` instead."""
    groups = made(seat=False)
    monkeypatch.setattr(regroup, "_MEMBER", "_under_another_name")
    groups.enter()
    groups.wrapped()
    assert groups.in_loop() == "this version of torch does not show which collectives train() calls"


def test_train_may_be_called_again_before_its_loop_has_begun(made: Callable[..., regroup.Groups]) -> None:
    """Torch's own function is put back once the loop begins, also if recording was begun twice."""
    stock, groups = regroup._c10d._rank_not_in_group, made(seat=False)
    groups.enter()
    groups.listen()
    groups.wrapped()
    assert groups.in_loop() == "" and regroup._c10d._rank_not_in_group is stock


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be the only rank of a job."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("stay", [True, False])
def test_groups_of_train_are_exchanged_if_ranks_stay_in_it_and_else_destroyed(
    made: Callable[..., regroup.Groups], server: Any, stay: bool
) -> None:
    groups = made(seat=False)
    dist.init_process_group("gloo", store=_dist.HashStore(), rank=0, world_size=1)
    groups.enter()
    inner: Any = dist.new_group([0])
    before = [group._get_backend(CPU) for group in regroup._c10d._world.pg_map]
    groups.let_go()
    assert groups.meet("127.0.0.1", server.port, 5, "here") == ["here"]
    groups.renew(1, all_of_them=stay)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 1
    assert (inner in regroup._c10d._world.pg_map) == stay
    after = [group._get_backend(CPU) for group in regroup._c10d._world.pg_map]
    assert not any(one is other for one in before for other in after), "the old ones are broken"
    if stay:
        dist.all_reduce(value, group=inner)


@pytest.mark.usefixtures("alone")
def test_where_train_makes_all_groups_none_is_left(made: Callable[..., regroup.Groups], server: Any) -> None:
    """The next call of ``train()`` makes them, under the same names as before."""
    groups = made(seat=False)
    groups.enter()
    dist.init_process_group("gloo", store=_dist.HashStore(), rank=0, world_size=1)
    name = dist.distributed_c10d._get_default_group().group_name
    groups.let_go()
    groups.meet("127.0.0.1", server.port, 5, "here")
    groups.renew(1)
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=_dist.HashStore(), rank=0, world_size=1)
    assert dist.distributed_c10d._get_default_group().group_name == name


def test_ranks_with_different_groups_do_not_go_on(
    made: Callable[..., regroup.Groups], server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective on a group that one of its ranks does not have would hang."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    groups = made(seat=True)
    dist.init_process_group("gloo", store=_dist.HashStore(), rank=1, world_size=2)  # nobody else is there
    assert dist.new_group([0]) is dist.GroupMember.NON_GROUP_MEMBER
    groups.enter()
    server.set("ttp/says/0", "here")
    server.set("ttp/groups/0", json.dumps([regroup._c10d._world.group_count + 1, []]))
    assert groups.meet("127.0.0.1", server.port, 5, "too") == ["here", "too"]
    with pytest.raises(RuntimeError, match="rank 0 and rank 1 have different process groups"):
        groups.renew(1)
