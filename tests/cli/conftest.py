"""Fixtures: commands run in this process, a save_dir made by the store itself, a real controller with obedient
ranks.
"""

from __future__ import annotations

import json
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from tests.controller.conftest import Controller as Alone
from tests.core.talk import answers
from tests.making import making
from ttp.cli.main import main
from ttp.core import messages as m
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.core.layout_messages import TellLayout
from ttp.store import names
from ttp.store.commit import NewCheckpoint
from ttp.store.digest import digest_bytes
from ttp.testing import toy
from ttp.wire.convert import order_from_wire, report_to_wire

REPOSITORY = Path(__file__).resolve().parents[2]


class Said(NamedTuple):
    """The output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Ttp = Callable[..., Said]


@pytest.fixture
def ttp(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ttp:
    """Return a function that runs ``ttp ARGUMENTS`` in this process, which knows no job of this host."""
    for name in [n for n in os.environ if n.startswith("TTP_") or n == "MASTER_ADDR"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(*arguments: object) -> Said:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return run


# ------------------------------------------------------------------------------------------ what was saved

TABLE = {
    "format": 1,
    "items": [
        {"path": ["model", "weight"], "at": [0, 100], "dtype": "float32", "shape": [10, 2]},
        {"path": ["optim", "weight", "exp_avg"], "at": [100, 100], "dtype": "bfloat16", "shape": []},
        {"path": ["optim", "groups", 0, "lr"], "at": [200, 20]},
    ],
}
LOCAL = {"ranks": [0, 2], "provisional": [2], "missing": {"1": "there is no page of rank 1"}}


@dataclass
class SaveDir:
    """A save_dir, filled by the store's own commit."""

    path: Path

    def checkpoint(self, version: int, incident: str = "one") -> Path:
        files = {
            "__0_0.distcp": (b"%d weights " % version * 30, "shard", "model", TABLE),
            "rank_local_2_0.msgpack": (b"%d pages" % version, "rank_local", "", LOCAL),
            "job_0.msgpack": (b"", "job", "", None),
        }
        draft = self.path / names.draft_name(Version(version), incident)
        draft.mkdir(parents=True)
        pieces = []
        for file, (data, kind, shard, table) in files.items():
            (draft / file).write_bytes(data)
            text = json.dumps(table) if table else ""
            pieces.append(m.Piece(file, len(data), digest_bytes(data), kind, shard, Rank(2), text))
        order = m.Commit(
            rank=Rank(2),
            term=1,
            incident=incident,
            generation=0,
            version=Version(version),
            incarnation=3,
            draft=draft.name,
            cause="rank 1 [b] was lost",
            reason="newest that is whole",
            keep=100,
            pieces=tuple(pieces),
            missing_pages=(Rank(3),),
        )
        groups = {Shard("model"): tuple(Rank(r) for r in range(4))}
        return NewCheckpoint(self.path, order, "job", 4, groups, "torch", finalise=lambda _: []).commit()[0]

    def draft(self, version: int) -> Path:
        path = self.path / names.draft_name(Version(version), "lost")
        path.mkdir(parents=True)
        (path / "__0_0.distcp").write_bytes(b"half of")
        return path


@pytest.fixture
def save_dir(tmp_path: Path) -> SaveDir:
    return SaveDir(tmp_path / "checkpoints")


# ------------------------------------------------------------------------------------------ a running job


class Controller(Alone):
    """A real controller process, and ranks that obey its orders without writing to disk."""

    save_dir = "/save"
    threads: Sequence[threading.Thread] = ()

    def form(self, world_size: int, version: int = 7, *, saves: bool = True) -> None:
        """Let all ranks of a job say hello, and wait until the controller has welcomed them."""
        welcomed = threading.Barrier(world_size + 1)
        work = [(Rank(rank), world_size, Version(version), saves, welcomed) for rank in range(world_size)]
        self.threads = [threading.Thread(target=self._rank, args=of_rank, daemon=True) for of_rank in work]
        for thread in self.threads:
            thread.start()
        welcomed.wait(60)

    def _rank(self, rank: Rank, world_size: int, version: Version, saves: bool, welcomed: threading.Barrier) -> None:
        outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        outbox.put(report_to_wire(hello(rank, world_size, version, self.save_dir)))
        with suppress(grpc.RpcError):
            for wire in self.stub.Attach(iter(outbox.get, None), metadata=self.metadata):
                order = replace(order_from_wire(wire), rank=rank)  # what is said to several names none of them
                if isinstance(order, m.Welcome):
                    welcomed.wait(60)
                if isinstance(order, TellLayout):
                    for part in answers(order, Layout.data_parallel(world_size)):
                        outbox.put(report_to_wire(part))
                answer = obey(order, version, saves=saves)
                if answer is not None:
                    outbox.put(report_to_wire(answer))
        outbox.put(None)

    def close(self) -> None:
        super().close()
        for thread in self.threads:
            thread.join(30)


def obey(order: m.Order, version: Version, *, saves: bool) -> m.Report | None:
    match order:
        case m.Freeze(rank=rank, incident=incident):
            return m.Frozen(rank, incident, version, m.Phase.IDLE, final=True)
        case m.Save(rank=rank, incident=incident, generation=generation) if saves:
            return m.Saved(rank, incident, generation, ())
        case m.Save(rank=rank, incident=incident, generation=generation):
            return m.SaveFailed(rank, incident, generation, "no space left")
        case m.Commit(rank=rank, incident=incident, generation=generation):
            return m.Committed(rank, incident, generation, f"/made/up/step_{version}", 1)
        case m.Release(rank=rank):
            return m.Goodbye(rank, m.GoodbyeReason.RELEASED, version)
    return None


def hello(rank: Rank, world_size: int, version: Version, save_dir: str) -> m.Hello:
    where = "left" if rank < world_size // 2 else "right"
    facts = {"run_id": "digits", "host": where, "framework": "torch", "version": version, "save_dir": save_dir}
    return toy.hello(rank, Layout.data_parallel(world_size), **facts)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Controller]]:
    with making(partial(Controller, tmp_path), Controller.close) as start:
        yield start
