"""The rank of a program with MindIO's names: what is called before it joins, and how its training function ends."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ttp.compat.mindio.framework_ttp as tft
from tests.compat.test_names import Told, fresh  # noqa: F401 - a fixture that is used in each test
from ttp.compat.mindio import catching, rank
from ttp.compat.mindio.values import RET_EXIT
from ttp.errors import ConfigError, UsageError
from ttp.mindio.handlers import Ailment, HandlerKind

SETS = [{"rank_list": [0, 1], "replica_cnt": 1, "replica_shift": 0}]


class Joining:
    """A participant that notes what is done with it, in order."""

    def __init__(self, *_: object, **__: object) -> None:
        self.done: list[object] = []

    def register(self, kind: HandlerKind, _: object) -> None:
        self.done.append(kind)

    def set_replicas(self, sets: list[Any]) -> None:
        self.done.append([list(each.ranks) for each in sets])

    def set_halt_before_dump(self, halt: bool) -> None:
        self.done.append(halt)

    def start(self) -> None:
        self.done.append("joined")


def test_what_was_registered_before_counts_from_the_moment_of_joining(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another rank may die at once, and this one has to save then."""
    this: Any = rank.THIS
    monkeypatch.setattr(rank, "Participant", Joining)
    monkeypatch.setenv("TTP_RUN_DIR", str(tmp_path))
    with pytest.raises(UsageError, match=r"was called before tft_init_processor\(\)"):
        this.start("127.0.0.1", 8000)
    this.halt_before_dump()  # nobody has joined yet
    tft.tft_init_processor(0, 2, False, enable_tls=False)
    this.register(HandlerKind.SAVE, print, None)
    this.set_replicas(0, SETS)
    this.start("127.0.0.1", 8000)
    joined = this.participant
    assert joined.done == [HandlerKind.SAVE, [[0, 1]], "joined"]
    this.register(HandlerKind.RENAME, print, None)
    this.set_replicas(0, SETS)
    this.halt_before_dump()
    assert joined.done[3:] == [HandlerKind.RENAME, [[0, 1]], True]
    nothings: tuple[Any, ...] = ([], None, 7)
    for nothing in nothings:
        with pytest.raises(ConfigError, match="an entry for each kind of optimizer"):
            this.set_replicas(0, nothing)


@pytest.mark.parametrize("node", [None, "0"])
def test_the_rank_that_the_program_gives_counts(monkeypatch: pytest.MonkeyPatch, node: str | None) -> None:
    """msrun of several hosts without --node_rank sets no MS_NODE_ID, as MindSpore chooses the rank in init()."""
    joined: list[Any] = []

    def participant(env: Any, *_: Any, **__: Any) -> None:
        joined.append((env.rank, env.world_size))
        raise UsageError("far enough")

    monkeypatch.setattr(rank, "Participant", participant)
    for name, value in {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4", "MS_NODE_ID": node}.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    tft.tft_init_processor(2, 4, False, enable_tls=False)
    with pytest.raises(SystemExit):
        tft.tft_start_processor("127.0.0.1", 8000)
    assert joined == [(2, 4)]


def test_the_port_of_the_launcher_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank.job_port(8000) == 8000
    monkeypatch.setenv("TTP_PORT", "12345")
    assert rank.job_port(8000) == 12345
    with pytest.raises(ConfigError, match="is not a whole number from 1024"):
        rank.job_port(80)


@pytest.mark.parametrize(("mindspore", "begun"), [("1", 1), ("", 0)])
def test_an_end_without_a_beginning_is_one_of_mindspores_own_optimizer(
    monkeypatch: pytest.MonkeyPatch, mindspore: str, begun: int
) -> None:
    """Its kernel marks the beginning by a library of the original. Elsewhere no update has begun."""
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", mindspore)
    marks: list[str] = []

    def begin() -> bool:
        marks.append("begin")
        return True

    participant: Any = SimpleNamespace(begin_update=begin, end_update=lambda step: marks.append(f"end {step}"))
    monkeypatch.setattr(rank.THIS, "participant", participant)
    tft.tft_end_updating_os(1)
    assert marks == ["begin", "end 1"] * begun


def test_a_name_that_is_not_known_yet_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of pods appear after their start. What can be no name is refused at once."""
    asked: list[str] = []

    def ask(name: str, *_: object, **__: object) -> Any:
        asked.append(name)
        if len(asked) < known_at:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        name.encode("idna")
        return [(None, None, None, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    known_at = rank.RESOLVE_TRIES
    assert rank.resolve("pod-0") == "pod-0" and len(asked) == rank.RESOLVE_TRIES
    asked.clear()
    known_at += 1
    with pytest.raises(ConfigError, match=r"'pod-0' is not an address: .*not known"):
        rank.resolve("pod-0")
    for wrong in ("a" * 70, 7):
        asked.clear()
        known_at = 0
        with pytest.raises(ConfigError, match="is not an address"):
            rank.resolve(wrong)  # type: ignore[arg-type]  # what a program may give
        assert len(asked) <= 1


class Ended(BaseException):
    """The process has ended."""


@pytest.mark.parametrize("at", ["next", "repair"])
def test_a_rank_that_is_not_repaired_ends_for_its_launcher_to_restart_it(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    told, codes = Told(monkeypatch), list[int]()
    told.exits_at = at

    def end(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(time, "sleep", lambda _: None)

    def train() -> None:
        raise RuntimeError("UCE ERROR")

    with pytest.raises(Ended):
        tft.tft_exception_handler(train)()
    assert codes == [RET_EXIT] and told.reports == [Ailment.MEMORY]


def test_the_memory_of_the_ended_loop_is_given_back_before_the_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The repair allocates on the same device; one that is not there, or fails, does not stop it."""
    emptied: list[str] = []

    def device(name: str, there: bool) -> Any:
        return SimpleNamespace(is_available=lambda: there, empty_cache=lambda: emptied.append(name))

    for npu, cuda, wanted in ((True, False, ["npu"]), (False, True, ["cuda"])):
        emptied.clear()
        fake: Any = SimpleNamespace(npu=device("npu", npu), cuda=device("cuda", cuda))
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "torch", fake)
            catching._empty_cache(None)
        assert emptied == wanted


@pytest.mark.parametrize(("words", "code"), [(" 507054", "507054"), ("  12aB", "12aB"), (": 1", "")])
def test_the_processor_may_be_started_in_the_training_function(
    monkeypatch: pytest.MonkeyPatch, words: str, code: str
) -> None:
    """As the guide's ``train`` does. The repair is the same, and the code of the device is reported."""
    told: list[Told] = []

    def train(state: str) -> list[Any]:
        if not told:
            told.append(Told(monkeypatch))
            raise RuntimeError(f"UCE ERROR, Device error type{words}")
        return list(rank.THIS.handlers.args)

    assert tft.tft_exception_handler(train)("state") == ["state"]
    assert (told[0].reports, told[0].codes, told[0].left) == ([Ailment.MEMORY], [code], [False])


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 180), ("soon", 180), ("nan", 180), ("7", 30), ("60", 60), ("inf", 1800)]
)
def test_a_time_limit_that_is_no_number_is_the_default(
    monkeypatch: pytest.MonkeyPatch, text: str, seconds: float
) -> None:
    monkeypatch.setenv("TTP_NORMAL_ACTION_TIME_LIMIT", text)
    assert rank.seconds("TTP_NORMAL_ACTION_TIME_LIMIT", 180, 30, 1800) == seconds


def test_replicas_that_the_job_refuses_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a processor that is started again would declare them."""

    def refuse(sets: Any) -> None:
        raise ConfigError("outside 0..1")

    monkeypatch.setattr(Told(monkeypatch), "set_replicas", refuse, raising=False)
    with pytest.raises(ConfigError, match="outside"):
        tft.tft_set_optimizer_replica(0, [{"rank_list": [0, 7], "replica_cnt": 2}])
    assert not rank.THIS._sets
