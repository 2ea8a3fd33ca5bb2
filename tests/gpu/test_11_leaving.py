"""After the release the process ends, whatever the device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import Done, RunCase
from tests.gpu.spinning import SPIN_MAX_S
from ttp.errors import EXIT_SAVED

ENDS_WITHIN_S = SPIN_MAX_S / 2
"""Sooner than the kernel would let it; how soon, the numbers say."""


def left_after_s(done: Done) -> float:
    """Return the seconds from the printed line to the end of the process."""
    told = [float(line.split()[1]) for line in done.out.splitlines() if line.startswith("leaving ")]
    assert told, done.story
    done.numbers["left_after_s"] = round(done.died_at - told[0], 3)
    return done.died_at - told[0]


@pytest.mark.gpu
def test_forked_workers_of_a_data_loader(run_case: RunCase) -> None:
    run_case("leaving:forked_workers")


@pytest.mark.gpu
def test_a_process_ends_behind_a_kernel_that_spins(run_case: RunCase) -> None:
    done = run_case("leaving:end_behind_a_spin", check=False)
    assert done.code == EXIT_SAVED, done.story
    assert left_after_s(done) < ENDS_WITHIN_S


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def test_a_preempted_rank_is_saved_and_ends(run_case: RunCase, tmp_path: Path, device: str) -> None:
    """Its main thread waits for a device that hangs."""
    env = {"CASE_SAVE_DIR": str(tmp_path / "saved"), "CASE_WANTED": str(tmp_path / "wanted.pt")}
    done = run_case("leaving:preempted_behind_a_spin", device=device, check=False, **env)
    assert done.code == EXIT_SAVED, done.story
    if device == "cuda":
        assert left_after_s(done) < ENDS_WITHIN_S
    (checkpoint,) = (tmp_path / "saved").glob("tft_saved_checkpoints-step_2")
    check_bytes(checkpoint, tmp_path / "wanted.pt")


def check_bytes(checkpoint: Path, wanted: Path) -> None:
    import torch

    from tests.gpu.stand import assert_same, saved_tensors

    expected: dict[str, Any] = torch.load(wanted, weights_only=True)
    assert_same(saved_tensors(checkpoint), expected)
