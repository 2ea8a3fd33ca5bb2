"""Programs of common styles with ttp's few lines: each is killed, in all its phases with ``-m slow``, and ends with the
bits of a run without a fault. The programs contain nothing for the test; see ``ttp.testing.kit``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forking import ForkedPython
from ttp.testing import kit

PHASES = ("forward", "backward", "in_step", "stepped")


def kills(*after: int) -> list[kit.Kill]:
    """Return a kill in each phase and launch, of the ranks in turn; ``after``: number of optimizer steps before it.

    The other rank may be a step behind. So the first kill comes after two steps of the loop: if nothing were saved, the
    programs would begin anew, with other random numbers.
    """
    return [kit.Kill(phase, turn % 2, steps) for turn, (phase, steps) in enumerate(zip(PHASES, after, strict=True))]


PROGRAMS: dict[str, list[kit.Kill]] = {
    "lightning_like": kills(2, 2, 1, 1),
    "gan": kills(4, 3, 3, 2),  # D and G make a step of two: in D's forward, in G's backward and step, between the two
    "titan_like": kills(2, 2, 1, 1),
    "nano_gpt": kills(2, 2, 1, 1),
    "timm_like": [*kills(2, 2, 1, 1), kit.Kill("evaluation", 1, 1)],  # the other one evaluates averages meanwhile
    "byol_like": kills(2, 2, 1, 3),  # the last behind the step that adds a param group
}
QUICK = {"titan_like": (1, 2), "nano_gpt": (0, 2), "timm_like": (1, 3), "byol_like": (1, 3)}
"""Phases of those whose starts take longest; all four under a launcher, with ``-m slow``."""


@pytest.mark.supports("closures")
@pytest.mark.supports("parameters that no optimizer has")
@pytest.mark.supports("param groups added later")
@pytest.mark.supports("buffers made in training")
@pytest.mark.supports("gradient accumulation and no_sync")
@pytest.mark.supports("several optimizers")
@pytest.mark.supports("rates set by hand")
@pytest.mark.supports("optimizer containers and wrappers")
@pytest.mark.supports("EMA")
@pytest.mark.supports("BatchNorm and SyncBatchNorm")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_is_killed_in_its_phases_and_ends_with_its_bits(program: str, tmp_path: Path) -> None:
    chosen = [PROGRAMS[program][phase] for phase in QUICK.get(program, range(4))]
    kit.run(kit.Job(f"tests.programs.{program}", chosen), tmp_path, start=ForkedPython).check()


@pytest.mark.supports("several trainings in a program")
@pytest.mark.timeout(600)
def test_two_trainings_in_one_program(tmp_path: Path) -> None:
    """The first has ten steps, and is not repeated."""
    found = kit.run(
        kit.Job("tests.programs.two_trainings", [kit.Kill("forward", 0, 12), kit.Kill("in_step", 1, 2)]),
        tmp_path,
        start=ForkedPython,
    )
    found.check()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("launcher", ["ttp", "torchrun"])
def test_the_same_under_a_launcher(launcher: str, program: str, tmp_path: Path) -> None:
    job = kit.Job(f"tests.programs.{program}", PROGRAMS[program], launcher=launcher)
    kit.run(job, tmp_path, start=ForkedPython).check()
