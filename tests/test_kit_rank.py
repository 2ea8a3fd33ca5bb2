"""A rank of the kit dies exactly where the plan says, with the state that a program has there."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import adam, optimizer, sgd

from ttp.testing import kit_rank


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the hooks of a killer, which are for all of a process, and let a kill be an exception."""
    handles: list[Any] = []
    for library, name in (
        (modules, "register_module_forward_hook"),
        (optimizer, "register_optimizer_step_pre_hook"),
        (optimizer, "register_optimizer_step_post_hook"),
    ):
        register = getattr(library, name)
        monkeypatch.setattr(library, name, lambda hook, register=register: handles.append(register(hook)))
    for library, kind in ((adam, "adam"), (sgd, "sgd")):
        for way in ("single_tensor", "fused", "multi_tensor"):
            monkeypatch.setattr(library, f"_{way}_{kind}", getattr(library, f"_{way}_{kind}"))  # is put back

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGKILL)
        raise Killed

    monkeypatch.setattr(os, "kill", kill)
    yield
    for handle in handles:
        handle.remove()


class Program:
    """A loop with a model of two layers, and what it has done before it was killed."""

    def __init__(self, kind: Any = torch.optim.SGD) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        self.optimizer = kind(self.model.parameters(), lr=0.5)
        self.done: list[str] = []
        self.begun = self.state()

    def state(self) -> list[Any]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.begun = self.state()
            self.optimizer.zero_grad()
            loss = self.model(torch.ones(1, 2)).square().sum()
            self.done.append("forward")
            loss.backward()
            self.done.append("backward")
            self.optimizer.step()
            self.done.append("step")

    def changed(self) -> list[bool]:
        """Return which parameters the running step has written."""
        return [not torch.equal(a, b) for a, b in zip(self.begun, self.state(), strict=True)]


STEP = ["forward", "backward", "step"]


@pytest.mark.parametrize(
    ("phase", "done", "changed"),
    [("forward", [], 0), ("backward", ["forward"], 0), ("in_step", STEP[:2], 2), ("stepped", STEP[:2], 4)],
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_it_dies_in_the_phase_of_the_plan_after_so_many_steps(
    kind: Any, phase: str, done: list[str], changed: int
) -> None:
    """In the middle of an update half of the parameters are written; at its end all are."""
    program = Program(kind)
    kit_rank.Killer({"phase": phase, "after": 2})
    program.run(2)
    with pytest.raises(Killed):
        program.run(1)
    assert program.done == STEP * 2 + done and sum(program.changed()) == changed


def test_a_phase_of_the_program_is_its_own() -> None:
    """An evaluation has no gradient, and is no forward pass of a step."""
    program, killer = Program(), kit_rank.Killer({"phase": "on_log", "after": 1})
    killer.at("on_log")
    program.run(2)
    with pytest.raises(Killed):
        killer.at("on_log")
    evaluated = kit_rank.Killer({"phase": "forward", "after": 0})
    with torch.no_grad():
        program.model(torch.ones(1, 2))
    assert evaluated.due("forward")


def test_a_container_that_steps_others_makes_one_step() -> None:
    program = Program()

    class Container(sgd.SGD):
        def step(self, closure: Any = None) -> Any:
            program.optimizer.step()

    outer = Container([nn.Parameter(torch.zeros(1))], lr=0.1)
    killer = kit_rank.Killer({"phase": "on_log", "after": 9})
    outer.step()
    assert killer._steps == 1


def test_a_program_is_a_module_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def main(steps, save_dir, report):\n    return {'steps': steps}\n")
    assert kit_rank._program(str(file)).main(3, None, None) == {"steps": 3}
    assert kit_rank._program("ttp.testing.digests") is sys.modules["ttp.testing.digests"]
