"""NCCL's watchdog: torch's settings end a rank behind a hung collective, and ttp's leave it alone."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import RunCase
from ttp.launch.nccl import HANDLING, HEARTBEAT

pytestmark = pytest.mark.gpu

SHORT = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def test_it_would_end_the_rank(run_case: RunCase) -> None:
    done = run_case("watchdog:hung_collective", check=False, **SHORT, **{HANDLING: "3", HEARTBEAT: "600"})
    assert done.code not in (0, 1), f"the settings that ttp exports were not needed: {done.story}"


@pytest.mark.parametrize("mode", ["1", "2"])
def test_it_would_abort(run_case: RunCase, mode: str) -> None:
    """Prints the result only: an abort does not end ttp's own kernel, and may itself wait for it."""
    done = run_case("watchdog:hung_collective", check=False, **SHORT, **{HANDLING: mode, HEARTBEAT: "600"})
    lived = [line for line in done.out.splitlines() if line.startswith("lived ")]
    done.numbers |= {"exit": done.code, "last": lived[-1] if lived else "never"}


def test_the_monitor_would_end_the_rank(run_case: RunCase) -> None:
    """Without handling the monitor still ends the process, one heartbeat timeout after the failure."""
    done = run_case("watchdog:hung_collective", check=False, **SHORT, **{HANDLING: "0", HEARTBEAT: "8"})
    assert done.code not in (0, 1), f"the heartbeat that ttp exports was not needed: {done.story}"


def test_it_leaves_the_rank_alone(run_case: RunCase) -> None:
    run_case("watchdog:hung_collective", **SHORT, **{HANDLING: "0", HEARTBEAT: "600"})


def test_what_hangs_is_saved_after_the_time_out(run_case: RunCase) -> None:
    run_case("watchdog:saved_after_the_time_out")
