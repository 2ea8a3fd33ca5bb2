"""Random generators of the program's own, given as ``extra_state`` as they are, go on where they were, in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.adapters.torch.going_on import Program, adamw, goes_on, net
from tests.adapters.torch.test_local_piece import adapter
from tests.adapters.torch.test_states_of_peers import Peers
from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.errors import OtherModelError

supports = pytest.mark.supports

NUMPY = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


def draw(generator: Any) -> list[float]:
    """Return some numbers; a numpy generator keeps half of a draw for the next one."""
    if isinstance(generator, torch.Generator):
        return [*torch.randn(5, generator=generator).tolist(), *torch.rand(3, generator=generator).tolist()]
    return [float(each) for each in generator.integers(9, size=3, dtype=np.int32)] + [float(generator.normal())]


@supports("random generators of the program's own")
@goes_on
def test_of_torch_and_numpy_in_a_program() -> Program:
    model, drawn = net(), torch.Generator().manual_seed(4)
    optimizer, noise = adamw(model), np.random.default_rng(5)

    def step(_number: int) -> Any:
        optimizer.zero_grad()
        x = torch.randn(8, 6, generator=drawn) + torch.from_numpy(noise.normal(size=(8, 6))).float()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Program(model, optimizer, step, extra_state={"drawn": drawn, "noise": noise})


@supports("random generators of the program's own")
@pytest.mark.parametrize("make", [torch.Generator, *(lambda kind=kind: np.random.Generator(kind(7)) for kind in NUMPY)])
@pytest.mark.parametrize("named", [True, False])
def test_a_rank_that_dies_gets_its_own_stream_back_in_the_same_object(
    make: Callable[[], Any], named: bool, tmp_path: Path
) -> None:
    job, expected = Peers(tmp_path, 2), []
    for _rank in range(2):
        generator = make()
        for _ in range(_rank + 1):
            draw(generator)
        job.join({"noise": generator} if named else generator).capture.capture(0, final=True)
        expected.append(draw(generator))
    path = job.save()
    for rank in range(2):
        fresh = make()
        adapter({"noise": fresh} if named else fresh).load(path, rank, 2, protected=False)
        assert draw(fresh) == expected[rank]
    assert expected[0] != expected[1]


def test_the_state_of_another_kind_of_generator_is_refused() -> None:
    rng = np.random.default_rng(1)
    saved = {"g": ExtraState({"g": rng}).capture("g")[0]}
    before = draw(np.random.Generator(np.random.SFC64(3)))
    for other in (np.random.Generator(np.random.SFC64(3)), torch.Generator()):
        with pytest.raises(OtherModelError, match=r"extra_state\['g'\]"):
            ExtraState({"g": other}).restore(saved)
    unhurt = np.random.Generator(np.random.SFC64(3))
    with pytest.raises(OtherModelError):
        ExtraState({"g": unhurt}).restore(saved)
    assert draw(unhurt) == before
