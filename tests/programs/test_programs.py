"""Programs as others write them, with ttp's few lines: each is killed, in four phases with ``-m slow``, and ends with
the bits of a run that was never hurt. Nothing in a program is there for the test; see ``hurt.py`` for how it is hurt.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.forked import ForkedJob
from tests.e2e.harness import Job

HURT = Path(__file__).with_name("hurt.py")
STEPS = 10
PHASES = ("forward", "backward", "in_step", "stepped")
Fault = dict[str, Any]


def kills(*after: int) -> list[Fault]:
    """In each phase one, in a life of its own, of the ranks in turns; ``after``: so many steps of optimizers."""
    return [
        {"rank": turn % 2, "after": steps, "phase": phase}
        for turn, (phase, steps) in enumerate(zip(PHASES, after, strict=True))
    ]


PROGRAMS: dict[str, list[Fault]] = {
    "lightning_like": kills(1, 1, 1, 1),
    "gan": kills(2, 3, 3, 2),  # D and G make a step of two: in D's forward, in G's backward and step, between the two
    "titan_like": kills(1, 1, 1, 1),
    "nano_gpt": kills(1, 1, 1, 1),
    "timm_like": kills(1, 1, 1, 1),
    "byol_like": kills(1, 1, 1, 3),  # the last behind the step that adds a param group
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
    faults, env = [PROGRAMS[program][phase] for phase in QUICK.get(program, range(4))], {"JOB_PROGRAM": program}
    hurt = ForkedJob(tmp_path / "hurt", 2, STEPS, faults=faults, env=env, module="tests.programs.hurt")
    for fault in faults:
        codes = hurt.live(timeout_s=150)
        assert sorted(codes) == [-9, 75] and codes[fault["rank"]] == -9, f"{fault} ended with {codes}\n{hurt.story()}"
    assert hurt.live(timeout_s=150) == [0, 0], hurt.story()

    unbroken = ForkedJob(tmp_path / "unbroken", 2, STEPS, env=env, module="tests.programs.hurt", protected=False)
    assert unbroken.live(timeout_s=150) == [0, 0], unbroken.story()
    assert_as_if_nothing_had_happened(hurt, unbroken)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("launcher", ["ttp", "torchrun"])
def test_the_same_under_a_launcher(launcher: str, program: str, make_job: Callable[..., Job]) -> None:
    env = {"JOB_PROGRAM": program}
    hurt = make_job(ranks=2, steps=STEPS, script=HURT, env=env, faults=PROGRAMS[program], launcher=launcher)
    assert hurt.run() == 0, hurt.story()
    unbroken = make_job(ranks=2, steps=STEPS, script=HURT, env=env, protected=False)
    assert unbroken.run() == 0, unbroken.story()
    assert_as_if_nothing_had_happened(hurt, unbroken)


def assert_as_if_nothing_had_happened(hurt: Job, unbroken: Job) -> None:
    committed = hurt.committed()
    assert len(committed) == len(hurt.faults), hurt.story()
    assert committed == sorted(set(committed)), f"a finished step was lost: {committed}"
    for rank in range(hurt.ranks):
        expected, seen = dict(losses(unbroken, rank)), losses(hurt, rank)
        assert len(dict(seen)) == len(seen), f"rank {rank} had finished a step that was made again: {seen}"
        assert dict(seen) == {step: expected[step] for step, _ in seen}
    for ours, theirs in zip(hurt.results(), unbroken.results(), strict=True):
        assert ours == theirs


def losses(job: Job, rank: int) -> list[tuple[int, str]]:
    """Of the steps whose end the rank has seen, as the program reported them."""
    lines = (job.directory / f"losses{rank}.log").read_text().split("\n")[:-1]
    return [(int(step), loss) for step, loss in (line.split() for line in lines)]
