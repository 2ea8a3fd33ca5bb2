"""How NCCL's connections are broken and made again, on a made-up backend. It does not show how NCCL behaves."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu import made_up_nccl
from tests.gpu.made_up_nccl import ProcessGroupNCCL
from tests.waiting import until
from ttp.adapters.torch import regroup, transport
from ttp.adapters.torch.transport import Nccl
from ttp.launch.nccl import HANDLING, HEARTBEAT, TO_GO_ON

_dist: Any = dist
c10d = regroup._c10d
PATIENCE_S = 30.0


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ProcessGroupNCCL]]:
    """Let torch have NCCL, with a launcher's settings. Torch's state is restored at the end."""
    names = "_new_process_group_helper", "_store_based_barrier", "_rank_not_in_group", "_NCCL_AVAILABLE"
    for name in names:
        monkeypatch.setattr(c10d, name, getattr(c10d, name))
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", None, raising=False)
    monkeypatch.setattr(ProcessGroupNCCL, "on_abort", staticmethod(lambda _backend: None))
    monkeypatch.setattr(ProcessGroupNCCL, "made", [])
    for name, value in {HANDLING: "0", HEARTBEAT: "1000", **dict.fromkeys(TO_GO_ON, "0")}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    made_up_nccl.install()
    yield ProcessGroupNCCL
    if dist.is_initialized():
        dist.destroy_process_group()


def begin(backend: str, **settings: Any) -> None:
    dist.init_process_group(backend, store=_dist.HashStore(), rank=0, world_size=1, **settings)


def renew(groups: regroup.Groups, server: Any, launch: int) -> None:
    groups.meet("127.0.0.1", server.port, 10, f"stay {launch}")
    groups.renew(launch)


class TestLettingGo:
    """All communicators of a process are aborted at once, within a time limit."""

    @staticmethod
    def groups(count: int) -> tuple[regroup.Groups, list[Any]]:
        groups = regroup.Groups(seat=False, with_nccl=True)
        begin("cpu:nccl")
        for _ in range(count - 1):
            dist.new_group([0])
        return groups, list(ProcessGroupNCCL.made)

    def test_all_of_them_at_once(self, nccl: type[ProcessGroupNCCL]) -> None:
        """An abort may wait until the others are aborted, so one after the other would never end."""
        groups, backends = self.groups(4)
        together = threading.Barrier(4)
        nccl.on_abort = staticmethod(lambda _backend: together.wait(PATIENCE_S))
        assert groups.aborts
        groups.let_go()
        assert len(backends) == 4 and all(backend.aborted.is_set() for backend in backends)

    @pytest.mark.parametrize(
        ("kind", "words"), [("abort-hangs", "1 of 3 .* within 0.2 s"), ("abort-raises", "could not be aborted.*NCCL")]
    )
    def test_one_that_does_not_end_is_an_error(
        self, nccl: type[ProcessGroupNCCL], monkeypatch: pytest.MonkeyPatch, kind: str, words: str
    ) -> None:
        """The limit is ttp's own: torch would wait for the group's timeout."""
        groups, backends = self.groups(3)
        unkind = made_up_nccl.UNKIND[kind]
        nccl.on_abort = staticmethod(lambda backend: unkind(backend) if backend is backends[1] else None)
        monkeypatch.setattr(transport, "ABORT_S", 0.2)
        with pytest.raises(RuntimeError, match=words):
            groups.let_go()
        assert backends[0].aborted.is_set() and backends[2].aborted.is_set()

    def test_old_ones_are_left_alone(self, nccl: type[ProcessGroupNCCL], server: Any) -> None:
        groups, (old,) = self.groups(1)
        groups.enter()
        groups.let_go()
        renew(groups, server, 1)
        seen: list[Any] = []
        nccl.on_abort = staticmethod(seen.append)
        groups.let_go()
        assert seen == [nccl.made[-1]] and old not in seen

    def test_gloo_alone_aborts_nothing(self, nccl: type[ProcessGroupNCCL]) -> None:
        groups = regroup.Groups(seat=False, with_nccl=True)
        begin("gloo")
        assert not groups.aborts and groups.why_not() == "" and not nccl.made


def test_a_group_that_is_made_meanwhile_does_not_disturb_who_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, shut = transport.Gloo(), []
    gloo._sockets = {(1, 1), (2, 2)}

    def connected(known: transport.Socket, *, shut_down: bool = False) -> bool:
        shut.append(known)
        gloo._sockets |= {(9, len(shut))}  # as the training thread does
        return shut_down

    monkeypatch.setattr(transport, "_connected", connected)
    gloo.let_go([])
    assert sorted(shut) == [(1, 1), (2, 2)]


def test_a_connection_of_another_thread_is_not_shut_down() -> None:
    """The program may connect to something, such as the storage of its data, while a group is made. A group of one rank
    has no connections.
    """
    gloo, limit = transport.Gloo(), struct.pack("ll", 1800, 0)  # as gloo sets it to the group's timeout
    with socket.create_server(("127.0.0.1", 0)) as server:
        with gloo.noting():
            ours, own = (socket.create_connection(server.getsockname()) for _ in range(2))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            peers = [server.accept()[0] for _ in range(2)]
        with gloo.noting():
            other = socket.create_connection(server.getsockname())
        gloo.let_go([])
        with ours, own, peers[0], peers[1]:
            assert ours.recv(1) == b""
            peers[1].sendall(b"x")
            assert own.recv(1) == b"x"
        with other, server.accept()[0] as peer:
            peer.sendall(b"x")
            assert other.recv(1) == b"x"


def threads() -> set[Path]:
    """Return the threads of this process without torch's, which wait for work; gloo's have no name in torch 2.11."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (task / "comm").read_text() != "pt_gloo_runloop\n":
                found.add(task)
    return found


def test_a_part_of_a_message_keeps_no_thread_of_gloo_busy() -> None:
    """gloo's thread does not read the rest if the buffer is gone, and looked at the connection again at once."""
    gloo, store = transport.Gloo(), _dist.HashStore()
    before = threads()
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda rank: gloo.connect(transport.Place(store, rank, 2, "a group")), range(2)))
    until(lambda: len(threads() - before) == 2)  # those of the pool have ended
    loops = threads() - before
    received = torch.zeros(1 << 24)
    works = [ends[0].send([torch.ones(1 << 24)], 1, 0), ends[1].recv([received], 0, 0)]
    until(lambda: bool(received[0]))
    assert not received[-1]
    del works[1]
    gloo.let_go([])
    gloo.forget()
    until(lambda: all("S (sleeping)" in (task / "status").read_text() for task in loops for _ in range(100)))
    ends.clear()  # gloo ends the process if epoll does not know the connection


def test_gloo_limits_sending() -> None:
    """Else its sockets could not be told from those of other threads."""
    gloo, store, made = transport.Gloo(), _dist.HashStore(), []

    def make(rank: int) -> None:
        made.append(_dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=PATIENCE_S)))

    ranks = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    with gloo.noting():
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    assert len(made) == len(gloo._sockets) == 2 and all(map(transport._limits_sending, gloo._sockets))


class TestExchange:
    """The groups stay; their backends are replaced by new ones, made as the old ones were."""

    def test_of_a_survivor(self, nccl: type[ProcessGroupNCCL], server: Any) -> None:
        groups = regroup.Groups(seat=False, with_nccl=True)
        begin("cpu:nccl")
        given = nccl.Options()
        given.is_high_priority_stream, given.config.max_ctas, given.split_from = True, 4, object()
        given._timeout = timedelta(seconds=77)
        sub = _dist.new_group(
            [0], backend="cpu:nccl", pg_options=given, timeout=timedelta(seconds=77), group_desc="sub"
        )
        groups.enter()
        own = dist.new_group([0])  # made in train(): destroyed, and the program makes it again
        names = [c10d._world.pg_names[group] for group in c10d._world.pg_map]
        for launch in (1, 2):
            groups.let_go()
            renew(groups, server, launch)
            assert own not in c10d._world.pg_map
            whole, part = nccl.made[-2:]
            assert sub._get_backend(torch.device("cpu")) is part and not part.aborted.is_set()
            assert _dist.group.WORLD._get_backend(torch.device("cpu")) is whole
            options = part.options
            assert options.is_high_priority_stream and options.config.max_ctas == 4 and options.split_from is None
            assert options._timeout == timedelta(seconds=77)
            assert (options.global_ranks_in_group, options.group_name) == ([0], names[1])
            assert whole.options.global_ranks_in_group == [] and sub.group_desc == "sub"
            assert c10d._resolve_process_group(names[1]) is sub
            value = torch.ones(1)
            dist.all_reduce(value, group=sub)
            assert value.item() == 1
            own = dist.new_group([0])
            assert c10d._world.pg_names[own] == names[2]

    def test_of_a_newcomer(self, nccl: type[ProcessGroupNCCL], server: Any) -> None:
        """Before the exchange its groups have no peers. After it they are as if made together with the others."""
        groups = regroup.Groups(seat=True, with_nccl=True)
        given = nccl.Options()
        given.config.max_ctas, given._timeout = 2, timedelta(seconds=33)
        begin("cpu:nccl", pg_options=given, timeout=timedelta(seconds=33))
        assert not nccl.made and not groups.aborts
        groups.enter()
        renew(groups, server, 1)
        (made,) = nccl.made
        assert _dist.group.WORLD._get_backend(torch.device("cpu")) is made and groups.aborts
        assert (made.options.config.max_ctas, made.options._timeout) == (2, timedelta(seconds=33))
        assert _dist.group.WORLD._get_backend_name() == "nccl" and dist.get_backend() == "cpu:nccl"

    @pytest.mark.parametrize("seat", [False, True])
    def test_of_host_and_device(self, nccl: type[ProcessGroupNCCL], server: Any, seat: bool) -> None:
        groups = regroup.Groups(seat=seat, with_nccl=True)
        begin("cpu:gloo,cuda:nccl")
        groups.enter()
        host, device = torch.device("cpu"), torch.device("cuda")
        old = _dist.group.WORLD._get_backend(device)
        groups.let_go()
        renew(groups, server, 1)
        group = _dist.group.WORLD
        assert group._get_backend(device) is nccl.made[-1] is not old
        assert type(group._get_backend(host)).__name__ == "ProcessGroupGloo"
        assert group._get_backend_name() == "nccl", "what torch takes for a group of both"
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 1 and dist.get_backend_config() == "cpu:gloo,cuda:nccl"

    def test_a_group_that_is_bound_to_a_device_is_connected_at_once(
        self, nccl: type[ProcessGroupNCCL], server: Any
    ) -> None:
        groups = regroup.Groups(seat=False, with_nccl=True)
        begin("cpu:gloo,cuda:nccl")
        _dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        groups.enter()
        renew(groups, server, 1)
        assert nccl.made[-1].connected_to == torch.device("cuda", 0)


class TestRefusal:
    """Every obstacle is reported when the rank joins the job."""

    def why_not(self, with_nccl: bool = True) -> str:
        groups = regroup.Groups(seat=False, with_nccl=with_nccl)
        begin("cpu:nccl")
        groups.enter()
        return groups.why_not()

    def test_nothing(self, nccl: type[ProcessGroupNCCL]) -> None:
        """For the check a group of one rank was made, aborted and made again; the job's own group is unchanged."""
        assert self.why_not() == ""
        own, *tried = nccl.made
        assert len(tried) == 2 and all(backend.aborted.is_set() for backend in tried) and not own.aborted.is_set()

    def test_it_was_not_switched_on(self, nccl: type[ProcessGroupNCCL]) -> None:
        assert self.why_not(False).startswith("a process group uses ProcessGroupNCCL; only the backends of gloo can")

    def test_the_new_one_of_torch(self, nccl: type[ProcessGroupNCCL], monkeypatch: pytest.MonkeyPatch) -> None:
        """From torch 2.15 on ``nccl`` names another backend."""
        monkeypatch.setattr(c10d, "ProcessGroupNCCL", type("ProcessGroupNCCL2", (nccl,), {}))
        assert self.why_not().endswith("can be exchanged: start the job with TORCH_DIST_USE_NCCL2=0")

    def test_an_old_one(self, nccl: type[ProcessGroupNCCL], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nccl, "version", (2, 25, 1))
        assert "NCCL is 2.25.1" in self.why_not() and "2.26" in Nccl().why_not()

    @pytest.mark.parametrize("name", [HANDLING, "NCCL_NVLS_ENABLE", "TORCH_NCCL_PROPAGATE_ERROR"])
    def test_a_setting_of_the_user(
        self, nccl: type[ProcessGroupNCCL], monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setenv(name, "1")
        assert f"{name}=1" in self.why_not()

    @pytest.mark.parametrize("kind", sorted(made_up_nccl.UNKIND))
    def test_an_abort_that_does_not_work_here(
        self, nccl: type[ProcessGroupNCCL], monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        nccl.on_abort = staticmethod(made_up_nccl.UNKIND[kind])
        monkeypatch.setattr(transport, "ABORT_S", 0.1)
        assert self.why_not().startswith("this version of torch keeps process groups in another way")
