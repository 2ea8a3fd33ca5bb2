"""A rank on a made-up device whose host runs ahead of the barrier before its updates.

The process of ``main`` says "ready", and meets the others until it is told that it is frozen. Then it says the version
of its device, is told the wanted version, and says its state: what it could report of the device, and the version that
it has reached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.adapters.torch.fake_runtime import FakeRuntime
from tests.waiting import until
from ttp.adapters.torch.device.accelerator import Fence
from ttp.adapters.torch.loop.stream_barrier import StreamBarrier
from ttp.processor.gate import meeting as meeting_module
from ttp.processor.gate.meeting import Meeting

PATIENCE_S = 60.0


class Rank:
    """Queues gradients and updates.

    Args:
        meeting: the barrier with the other ranks.
        held: by rank, the update whose gradient the rank has; read and written by index.
        place: number of this rank.
        count: number of ranks.
    """

    def __init__(self, meeting: Meeting, held: Any, place: int, count: int, **settings: Any) -> None:
        self.runtime = FakeRuntime()
        self.device = self.runtime.device
        self.place, self.count, self._held = place, count, held
        self.host, self.version, self.early = 0, 0, 0
        self.finished, self.begun = Fence([self.runtime]), Fence([self.runtime])
        options: dict[str, Any] = {"why_not": lambda: "", "closed": lambda: False, "patience_s": 1800.0}
        self.barrier = StreamBarrier(meeting, FakeRuntime(self.device), **(options | settings))

    def step(self, meet: Callable[[int], object] = lambda _turn: None, wait: bool = False) -> bool:
        """Make one update on the host. Returns whether the host ran ahead; else ``meet`` waited on the host."""
        turn = self.host + 1
        self.device.launch(lambda: self._gradient(turn))
        ahead = self.barrier.ready(turn)
        if ahead:
            self.barrier.queue(turn, turn)
        else:
            self.device.run()
            meet(turn)
            self.barrier.watch(turn)
        self.begun.record(turn)
        self.device.launch(lambda: self._update(turn))
        if wait:
            self.device.waits[threading.get_ident()] += 1
        self.finished.record(turn)
        self.host = turn
        self.barrier.updated()
        return ahead

    def _gradient(self, turn: int) -> None:
        assert self.version == turn - 1, "a pass over weights of another version"
        self._held[self.place] = turn

    def _update(self, turn: int) -> None:
        self.early += min(self._held[place] for place in range(self.count)) < turn
        self.version = turn

    def wait_version(self, version: int) -> bool:
        """Wait until the device has reached exactly this version."""
        until(lambda: self.finished.finished_version() >= version, PATIENCE_S)
        return self.finished.finished_version() == version >= self.begun.finished_version()

    def wait_held(self, version: int) -> bool:
        """Wait until the device waits before the update to ``version``."""
        return bool(until(lambda: self.barrier.held(version), PATIENCE_S))


class _Words:
    def __init__(self, mapping: Any) -> None:
        self._mapping = mapping

    def __getitem__(self, place: int) -> int:
        return int(self._mapping.word(64 * place))

    def __setitem__(self, place: int, value: int) -> None:
        self._mapping.set_word(64 * place, value)


def main(directory: Path, place: int, count: int, test: Connection) -> None:
    from tests.processor.meeting_ranks import through_files
    from ttp.processor.gate.meeting import run
    from ttp.processor.gate.meeting_place import find_place
    from ttp.processor.liveness.futex import Mapping
    from ttp.processor.liveness.peer_watcher import PeerWatcher
    from ttp.processor.liveness.sentinel import Sentinel

    meeting_module.NET_S = 3600.0  # whoever is not woken sleeps until the test gives up
    pages, frozen = directory / "pages", threading.Event()
    sentinel = Sentinel(pages, place, f"{place}", 0)
    found = find_place(place, pages, through_files(directory, place, count))
    meeting = Meeting(found.words, found.number, count, wide=False, gone=found.gone)

    def died(*_: object) -> None:
        run(meeting.warn())

    def freeze() -> None:
        test.recv()
        frozen.set()

    PeerWatcher(pages, place, 0, died).start()
    with (directory / "held").open("r+b") as file:
        held = _Words(Mapping(file.fileno(), 4096, writable=True))
    rank = Rank(meeting, held, place, count, closed=frozen.is_set)

    def meet(turn: int) -> None:
        async def stay() -> bool:
            return False

        if not run(meeting.come(turn)):
            run(meeting.wait(turn, stay))

    for _ in range(3):
        rank.step(meet)
    test.send("ready")
    freezing = threading.Thread(target=freeze, daemon=True)
    freezing.start()
    while not frozen.is_set():
        rank.step()
    test.send(at := _standing(rank))
    said = {"version": at, "held": rank.barrier.held(at + 1)}
    newest = test.recv()
    if newest > at:
        said["admitted"] = rank.barrier.admit(newest)
        rank.wait_version(newest)
    time.sleep(0.05)
    rank.device.run()
    test.send(said | {"then": rank.version, "early": rank.early})
    sentinel.close()


def _standing(rank: Rank) -> int:
    """Return where the device stands still."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        at = rank.finished.finished_version()
        time.sleep(0.1)
        if at == rank.finished.finished_version() and (rank.host == at or rank.barrier.held(at + 1)):
            break
    return at
