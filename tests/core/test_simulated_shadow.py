"""Ranks that go on from a held checkpoint, with faults before it is durable; see ``ttp.testing.sim_memory``."""

from __future__ import annotations

import pytest

from tests.core.seeds import seeds
from ttp.core.controller.shadow import Shadow
from ttp.testing.campaign import Wish
from ttp.testing.simulation import Simulation
from ttp.testing.toy import InvariantBroken

WISH = Wish(shadow=True)


def play(seeds: range) -> int:
    """Play these seeds, and return how often a checkpoint was held."""
    made = 0
    for seed in seeds:
        simulation = Simulation(WISH.scenario(seed))
        try:
            simulation.run()
        except InvariantBroken as problem:
            raise AssertionError(f"seed {seed}: {problem}") from problem
        assert simulation.memory is not None
        made += simulation.memory.made
    return made


@seeds(80, 6000)
def test_many_seeds(seeds: range) -> None:
    assert play(seeds) > 0.4 * len(seeds)


@pytest.mark.parametrize(("name", "first"), [("is_durable", 60), ("awaits", 100)])
def test_the_simulation_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch, name: str, first: int) -> None:
    """Within some seeds from ``first`` on, which saves those before that show nothing."""
    monkeypatch.setattr(Shadow, name, lambda *_: name == "is_durable")
    with pytest.raises(AssertionError, match="seed"):
        play(range(first, 600))
