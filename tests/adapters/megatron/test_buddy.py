"""The distributed optimizer in one instance: each stretch exists once, with a second copy in the memory of the next
host.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters.megatron.jobs import Job
from tests.adapters.megatron.nursery import Nursery
from ttp.adapters.megatron.contents import read_megatron

pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.timeout(400)]

EVERY, STEPS, LOST_AT = 2, 8, 5


def check(nursery: Nursery, directory: Path, shape: dict[str, Any], hosts: str, dead: list[int]) -> Job:
    """Lose a host with its memory. Check that the job goes on from second copies with the bits of an unbroken job."""
    job = Job(nursery, directory, shape)
    how = {"ranks": len(hosts), "steps": STEPS, "hosts": hosts}
    how["env"] = {"TTP_BUDDY_EVERY": str(EVERY), "TTP_STANDBYS": "0", "TTP_TOKEN": "a secret"}
    codes = job.live(0, fault={"ranks": dead, "step": LOST_AT, "phase": "begin", "host": True}, **how)
    assert codes == [-9 if rank in dead else 75 for rank in range(len(hosts))], job.story()
    assert job.live(1, **how) == [0] * len(hosts), job.story()
    assert_one_count(sorted(job.save_dir.glob("tft_saved_*"))[0])
    start = job.starts()[1]
    assert start % EVERY == 0 and 0 <= LOST_AT - start <= 2 * EVERY - 1
    job.run_state("unhurt", ranks=len(hosts), steps=STEPS - 2)
    for rank in range(len(hosts)):
        assert json.loads((directory / f"result{rank}.json").read_text()) == job.after("unhurt", rank), job.story()
        assert all(len(found) == 1 for found in job.seen(rank).values()), "a version made twice had other bits"
    return job


def assert_one_count(checkpoint: Path) -> None:
    """Check that Megatron finds the same step count in every param group, even one that is empty on the saver."""
    common = torch.load(checkpoint / "common.pt", weights_only=False)
    optimizers = [common["optimizer"]] if "optimizer" in common["optimizer"] else common["optimizer"].values()
    counts = {group.get("step") for each in optimizers for group in each["optimizer"]["param_groups"]}
    assert counts == {common["iteration"]}


@pytest.mark.slow  # tests/e2e/test_buddy.py loses a host in every run
def test_a_host_with_single_copies_is_lost(nursery: Nursery, tmp_path: Path) -> None:
    job = check(nursery, tmp_path, {}, "ab", [1])
    (first, *_) = sorted(job.save_dir.glob("tft_saved_*"))
    read_megatron(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "hosts", "dead"),
    [
        pytest.param({"tp": 2}, "aabb", [2, 3], id="tp2-dp2"),
        pytest.param({"ep": 2, "experts": True}, "aabb", [2, 3], id="experts"),
        pytest.param({"pp": 2, "layers": 4, "bf16": True}, "abcd", [1], id="pp2-dp2-four-hosts"),
    ],
)
def test_in_other_layouts(nursery: Nursery, tmp_path: Path, shape: dict[str, Any], hosts: str, dead: list[int]) -> None:
    check(nursery, tmp_path, shape, hosts, dead)
