"""The only copy of a shard is lost with its rank, or with its whole host: the job goes on from the second copies."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.forking import ForkedPython
from tests.making import making
from tests.ports import free_port
from ttp.processor.local_state.page_dir import SHARED_MEMORY

JOB = Path(__file__).with_name("buddy_job.py")
EVERY = 4
STEPS = 16


@dataclass
class Buddies:
    """Ranks that are started by hand, so that each can have a host name of its own."""

    directory: Path
    hosts: tuple[str, ...]
    fault: str
    env: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    ranks: list[ForkedPython] = field(default_factory=list)

    def launch(self, life: int) -> list[int]:
        """Run one launch and return the exit codes of all ranks."""
        master = str(free_port())
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("TTP_", "TORCHELASTIC"))}
        for rank, host in enumerate(self.hosts):
            env = (
                clean
                | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(len(self.hosts)),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": master,
                    "TORCHELASTIC_RESTART_COUNT": str(life),
                    "TTP_PORT": str(self.port),
                    "TTP_RUN_DIR": str(self.directory / "run" / host),
                    "TTP_HOST": host,
                    "TTP_BUDDY_EVERY": str(EVERY),
                    "TTP_STANDBYS": "0",
                    "TTP_TOKEN": "a secret",
                    "JOB_DIR": str(self.directory),
                    "JOB_STEPS": str(STEPS),
                    "JOB_FAULT": self.fault,
                }
                | self.env
            )
            self.ranks.append(ForkedPython(JOB, [], env, self.directory / f"life{life}.log"))
        codes = [rank.wait(150) for rank in self.ranks]
        self.ranks = []
        return codes

    def memory(self, host: str) -> Path:
        """Return the directory of the pages and copies of a host, as ``ttp.processor.local_state.page_dir`` does."""
        key = hashlib.sha256(f"127.0.0.1|{self.port}|none|{host}".encode()).hexdigest()[:12]
        return SHARED_MEMORY / f"ttp-{os.getuid()}-{key}"

    def story(self) -> str:
        return "\n".join(path.read_text()[-5000:] for path in sorted(self.directory.glob("*.log")))

    def said(self, rank: int, life: int, word: str) -> list[list[str]]:
        lines = (line.split() for line in (self.directory / f"rank{rank}.log").read_text().splitlines())
        return [words[2:] for words in lines if words[:2] == [str(life), word]]

    def events(self) -> list[dict[str, Any]]:
        folder = self.directory / "checkpoints" / "incidents"
        return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]

    def stop(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Buddies]]:
    def make(hosts: str, fault: str, **env: str) -> Buddies:
        return Buddies(tmp_path, tuple(hosts), fault, env)

    with making(make, Buddies.stop) as job:
        yield job


def check(job: Buddies, victims: set[int]) -> None:
    """Check that the victims died, the job was saved from copies, and it resumed with the bits of that version."""
    first = job.launch(0)
    survivors = [r for r in range(len(job.hosts)) if r not in victims]
    assert [code for r, code in enumerate(first) if r not in victims] == [75] * len(survivors), job.story()
    finished = max(int(words[0]) for words in job.said(survivors[0], 0, "version"))
    assert job.launch(1) == [0] * len(job.hosts), job.story()
    assert not any(job.memory(host).exists() for host in job.hosts), "nothing is left in the memory"

    (start,) = {int(words[0]) for r in range(len(job.hosts)) for words in job.said(r, 1, "start")}
    assert start % EVERY == 0
    assert 0 <= finished - start <= 2 * EVERY - 1, job.story()
    plan = next(e for e in job.events() if e["kind"] == "plan")
    assert plan["version"] == start and set(plan["how"].values()) == {"kept"}
    lost = finished - start
    assert (f"{lost} finished steps are lost" if lost else "no step is lost") in plan["reason"]
    for rank in range(len(job.hosts)):
        once, again = (dict(words for words in job.said(rank, life, "version")) for life in (0, 1))
        common = sorted(set(once) & set(again), key=int)
        assert common == [str(v) for v in range(start + 1, int(max(once, key=int)) + 1)]
        assert [once[v] for v in common] == [again[v] for v in common]
    assert "derived from its seed" not in job.story()


@pytest.mark.timeout(320)
def test_a_whole_host_is_lost(job: Callable[..., Buddies]) -> None:
    check(job("ab", "1:10:host"), {1})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("hosts", "fault", "victims"),
    [
        ("aa", "1:10:kill", {1}),  # one host: nobody to send to, but its memory stays
        ("ab", "0:11:kill", {0}),
        ("aab", "2:9:host", {2}),
        ("aabb", "1:13:kill", {1}),
        ("ab", "1:8:kill", {1}),  # right after a copy was begun
    ],
)
def test_a_rank_is_lost(job: Callable[..., Buddies], hosts: str, fault: str, victims: set[int]) -> None:
    check(job(hosts, fault), victims)
