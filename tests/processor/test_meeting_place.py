"""Ranks find out which of them share memory; a rank that cannot be sure counts as a host of its own."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from ttp.processor.gate import meeting_place
from ttp.processor.gate.meeting import BELL, OwnWords, run
from ttp.processor.gate.meeting_place import Place, find_place
from ttp.processor.liveness import futex
from ttp.processor.liveness.sentinel import Sentinel

PATIENCE_S = 60.0
CLONE_FS = 0x200
Find = Callable[..., list[Place]]


@pytest.fixture
def find(tmp_path: Path) -> Iterator[Find]:
    """Return ``find(["a", "a", "b"])``: what a rank in each directory finds; ranks in ``hidden`` have no sentinel.

    ``contained``: the directories have one name, as ``/dev/shm`` has in the containers of a machine.
    """
    sentinels: list[Sentinel] = []

    def all_find(names: Sequence[str | None], hidden: Sequence[int] = (), contained: bool = False) -> list[Place]:
        ranks, sent = len(names), [b""] * len(names)
        come = threading.Barrier(ranks)
        found: dict[int, Place] = {}

        def gather(rank: int, data: bytes) -> list[bytes]:
            sent[rank] = data
            come.wait(PATIENCE_S)
            everything = list(sent)
            come.wait(PATIENCE_S)
            return everything

        def run_rank(rank: int, name: str | None) -> None:
            page_dir = tmp_path / name if name is not None else None
            if page_dir is not None and contained:
                assert ctypes.CDLL(None).unshare(CLONE_FS) == 0, "this thread has no working directory of its own"
                os.chdir(page_dir)
                page_dir = Path()
            found[rank] = find_place(rank, page_dir, lambda data: gather(rank, data))

        for rank, name in enumerate(names):
            if name is not None:
                (tmp_path / name).mkdir(mode=0o700, exist_ok=True)
                if rank not in hidden:
                    sentinels.append(Sentinel(tmp_path / name, rank, f"{rank}", 0))
        threads = [threading.Thread(target=run_rank, args=pair, daemon=True) for pair in enumerate(names)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        return [found[rank] for rank in range(ranks)]

    yield all_find
    for sentinel in sentinels:
        sentinel.close()


def together(places: Sequence[Place]) -> Mapping[int, tuple[int, ...]]:
    return {rank: place.ranks for rank, place in enumerate(places)}


def test_ranks_of_a_directory_meet_in_one_memory(find: Find, tmp_path: Path) -> None:
    places = find(["a", "b", "a", "b", "a"])
    assert together(places) == {0: (0, 2, 4), 1: (1, 3), 2: (0, 2, 4), 3: (1, 3), 4: (0, 2, 4)}
    assert [place.number for place in places] == [0, 0, 1, 1, 2]
    assert all(place.firsts == (0, 1) for place in places)
    run(places[2].words.add_one(BELL))
    assert [run(place.words.load(BELL)) for place in places] == [1, 0, 1, 0, 1]
    assert not list(tmp_path.rglob(".meeting*")), "nobody of another life can come to it"


def test_directories_of_one_name_are_told_apart(find: Find) -> None:
    places = find(["a", "b", "a", "b"], contained=True)
    assert together(places) == {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}


def test_who_has_ended_is_seen_by_all(find: Find) -> None:
    places = find(["a"] * 3)
    assert not any(run(place.gone(1)) for number, place in enumerate(places) if number != 1)


def test_without_a_directory_a_rank_is_alone(find: Find) -> None:
    places = find(["a", None, "a", None])
    assert together(places) == {0: (0, 2), 1: (1,), 2: (0, 2), 3: (3,)}
    assert all(place.firsts == (0, 1, 3) for place in places)
    assert isinstance(places[1].words, OwnWords)


def test_a_rank_whose_death_nobody_would_see_is_alone(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_place, "SEEN_S", 0.05)
    places = find(["a"] * 3, hidden=[1])
    assert [place.ranks for place in places] == [(0, 2), (1,), (0, 2)]
    assert all(place.firsts == (0, 1) for place in places)


def test_containers_that_only_seem_to_share_a_directory(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_place, "_make", lambda *_: futex.Mapping(-1, 4096, writable=True))
    assert [place.ranks for place in find(["a"] * 2)] == [(0,), (1,)]


def test_a_directory_on_the_network_is_not_shared_memory(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = iter(range(100))
    monkeypatch.setattr(meeting_place, "_memory", lambda page_dir: f"kernel {next(kernels)}")
    assert [place.ranks for place in find(["a"] * 2)] == [(0,), (1,)]


def test_a_kernel_that_does_not_say_which_it_is(find: Find, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(meeting_place, "BOOT_ID", tmp_path / "missing")
    assert [place.ranks for place in find(["a"] * 2)] == [(0,), (1,)]


def test_a_sandbox_without_the_operation(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr(futex.Mapping, "add_one", refused)
    assert [place.ranks for place in find(["a"] * 2)] == [(0,), (1,)]
