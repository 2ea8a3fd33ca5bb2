"""The guide's GPT-3 program, unchanged: killed, saved and started again, it ends with the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.megatron.gpt import MICROBATCHES
from tests.adapters.megatron.jobs import KILLED_AT, STEPS, Job
from tests.adapters.megatron.nursery import Nursery
from tests.ports import free_port
from ttp.testing.kit import stop_controllers


class Gpt3(Job):
    def __init__(self, nursery: Nursery, directory: Path, ranks: int, **shape: Any) -> None:
        super().__init__(nursery, directory, shape)
        self.ranks = ranks

    def run(self, life: int, fault: dict[str, Any] | None = None) -> list[int]:
        env = {"TTP_PORT": str(free_port()), "MASTER_ADDR": "127.0.0.1", "XDL_IP": "127.0.0.1", "TTP_OT": "60"}
        env |= {"TTP_RUN_DIR": str(self.directory / f"run{life}"), "TTP_SAVE_DIR": str(self.save_dir)}
        env |= {"TORCHELASTIC_RESTART_COUNT": str(life)}
        arguments: dict[str, Any] = {"shape": self.shape, "steps": STEPS, "life": life, "fault": fault}
        codes = self.nursery.run(self.directory, "seed_gpt3.gpt3", ranks=self.ranks, env=env, **arguments)
        stop_controllers(self.directory / f"run{life}")  # after 75 it would wait for the next launch
        return codes

    def results(self, life: int) -> list[dict[str, Any]]:
        return [json.loads((self.directory / f"result.{life}.{rank}.json").read_text()) for rank in range(self.ranks)]

    def saved(self) -> list[str]:
        return sorted(path.name for path in self.save_dir.glob("iter_*"))


def _killed_and_resumed(
    nursery: Nursery, path: Path, ranks: int, rank: int, at: str, may_be_saved: set[int], **shape: Any
) -> None:
    unhurt = Gpt3(nursery, path / "unhurt", ranks, **shape)
    assert unhurt.run(0) == [0] * ranks, unhurt.story()
    job = Gpt3(nursery, path / "job", ranks, **shape)
    codes = job.run(0, {"rank": rank, "step": KILLED_AT, "at": at})
    assert codes == [-9 if r == rank else 75 for r in range(ranks)], job.story()
    saved = int((job.save_dir / "latest_checkpointed_iteration.txt").read_text())
    assert saved in may_be_saved and job.saved() == [f"iter_{saved:07d}"], job.story()
    assert job.run(1) == [0] * ranks, job.story()
    for resumed, never_hurt in zip(job.results(1), unhurt.results(0), strict=True):
        assert resumed["start"] == saved
        assert resumed["losses"] == never_hurt["losses"][saved * MICROBATCHES :]
        for what in ("weights", "samples", "scheduler", "streams"):
            assert resumed[what] == never_hurt[what], what


def test_killed_in_a_step_it_resumes_at_the_next_one(nursery: Nursery, tmp_path: Path) -> None:
    _killed_and_resumed(nursery, tmp_path, 2, 0, "begin", {KILLED_AT})


@pytest.mark.slow
@pytest.mark.parametrize("at", ["begin", "barrier passed", "updated", "reported", "stepped"])
@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (4, 0), (4, 2), (5, 4), (6, 1)])
def test_wherever_and_whoever_is_killed(nursery: Nursery, tmp_path: Path, ranks: int, rank: int, at: str) -> None:
    saved = {KILLED_AT} if at == "begin" else {KILLED_AT, KILLED_AT + 1}  # behind the barrier the others may go on
    _killed_and_resumed(nursery, tmp_path, ranks, rank, at, saved)


@pytest.mark.slow
def test_two_tensor_parallel_halves(nursery: Nursery, tmp_path: Path) -> None:
    _killed_and_resumed(nursery, tmp_path, 4, 3, "begin", {KILLED_AT}, tp=2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_losses_and_weights_are_those_of_the_plain_optimizer(nursery: Nursery, tmp_path: Path, ranks: int) -> None:
    job = Gpt3(nursery, tmp_path, ranks)
    assert job.run(0) == [0] * ranks, job.story()
    assert nursery.run(tmp_path, "seed_gpt3.plain", ranks=ranks, shape={}, steps=STEPS) == [0] * ranks, job.story()
    for ours, plain in zip(job.results(0), job.results(9), strict=True):
        assert (ours["losses"], ours["weights"]) == (plain["losses"], plain["weights"])
