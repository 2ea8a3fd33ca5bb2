"""Which backward passes have no provisional capture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.adapters.torch.hooked import Job
from ttp.adapters.torch.loop.no_sync import NoSync


class TestNoSync:
    """Which backward passes get no capture, on a stand-in for DistributedDataParallel."""

    def ddp(self, model: nn.Module) -> Any:
        return SimpleNamespace(module=model, require_backward_grad_sync=True, require_forward_param_sync=True)

    @pytest.fixture
    def both(self) -> tuple[NoSync, Any]:
        model = nn.Linear(2, 2)
        ddp = self.ddp(model)
        return NoSync(model, [ddp]), ddp

    def passes(self, no_sync: NoSync, ddp: Any, *synchronising: bool) -> list[bool]:
        """Return whether each of these backward passes gets its capture; then make the update."""
        captured = []
        for each in synchronising:
            ddp.require_backward_grad_sync = ddp.require_forward_param_sync = each
            captured.append(not no_sync.withholds())
        no_sync.at_gate()
        return captured

    def test_only_the_one_that_reduces_once_that_is_known(self, both: tuple[NoSync, Any]) -> None:
        no_sync, ddp = both
        assert self.passes(no_sync, ddp, False, False, True) == [True, True, True]
        for _ in range(3):
            assert self.passes(no_sync, ddp, False, False, True) == [False, False, True]

    def test_a_program_that_reduces_by_itself(self, both: tuple[NoSync, Any]) -> None:
        no_sync, ddp = both
        for _ in range(3):
            assert self.passes(no_sync, ddp, False, False) == [True, True]
        assert self.passes(no_sync, ddp, True) == [True]

    def test_a_forward_pass_outside_of_no_sync(self, both: tuple[NoSync, Any]) -> None:
        no_sync, ddp = both
        self.passes(no_sync, ddp, False, True)
        ddp.require_backward_grad_sync, ddp.require_forward_param_sync = False, True
        assert not no_sync.withholds(), "that backward pass reduces all the same"

    def test_gradients_that_are_not_its_own(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        ddp = self.ddp(model[0])
        no_sync = NoSync(model, [ddp])
        for _ in range(3):
            assert self.passes(no_sync, ddp, False, True) == [True, True]

    def test_without_one_every_pass_gets_it(self) -> None:
        job = Job()
        for version in range(1, 4):
            job.backward()
            job.backward()
            job.optimizer.step()
            assert job.taken()[:3] == [(version, "early"), (version, "early"), (version, "again")]
