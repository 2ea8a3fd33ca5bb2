"""Several optimizers, several schedules, and optimizers that contain others: each goes on with its bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, StepLR

from tests.adapters.torch.going_on import UPDATES, Program, adamw, data, goes_on, net, plainly
from tests.adapters.torch.wrappers import (
    Combined,
    Container,
    Delegate,
    HookedLookahead,
    Larc,
    Lookahead,
    LookaheadInside,
    Sam,
    Schedulers,
)

supports = pytest.mark.supports


class Muon(Optimizer):
    """Momentum, made orthogonal, for matrices."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                kept.mul_(0.95).add_(parameter.grad)
                x = kept / (kept.norm() + 1e-7)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                parameter.sub_(group["lr"] * x)


@supports("several optimizers")
@pytest.mark.parametrize("schedules", [False, True])
@goes_on
def test_muon_and_adamw(schedules: bool) -> Program:
    model = net()
    matrices, others = ([p for p in model.parameters() if (p.dim() == 2) is two] for two in (True, False))
    muon, adam = Muon(matrices), torch.optim.AdamW(others, lr=1e-2)
    both = [LambdaLR(muon, lambda n: 0.9**n), CosineAnnealingLR(adam, 10)] if schedules else []

    def step(_number: int) -> Any:
        loss = model(data()).square().mean()
        loss.backward()
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in both:
            scheduler.step()
        return loss

    return Program(model, [muon, adam], step, scheduler=both or None)


@supports("several optimizers")
@goes_on
def test_two_networks_that_step_in_turns() -> Program:
    generator, critic = net(), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    of_critic, of_generator = adamw(critic), adamw(generator)

    def step(_number: int) -> Any:
        fake = generator(data())
        critic.zero_grad()
        (critic(fake.detach()).mean() - critic(torch.randn(8, 3)).mean()).backward()
        of_critic.step()
        generator.zero_grad()
        loss = -critic(fake).mean()
        loss.backward()
        of_generator.step()
        return loss

    model = nn.ModuleDict({"generator": generator, "critic": critic})
    return Program(model, [of_critic, of_generator], step)


@supports("several models, one optimizer")
@pytest.mark.parametrize("kind", [nn.ModuleDict, nn.ModuleList])
@goes_on
def test_student_teacher_and_head(kind: Any) -> Program:
    """The loop calls the parts; the teacher follows the student right after the step."""
    student, teacher, head = net(nn.BatchNorm1d(8)), net(nn.BatchNorm1d(8)).requires_grad_(False), nn.Linear(3, 2)
    parts = {"student": student, "teacher": teacher, "head": head}
    model = kind(parts if kind is nn.ModuleDict else parts.values())
    optimizer = torch.optim.AdamW([*student.parameters(), *head.parameters()], lr=1e-2)

    def step(_number: int) -> Any:
        x = data()
        with torch.no_grad():
            wanted = teacher(x)
        made = student(x)
        loss = (made - wanted).square().mean() + head(made).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return loss

    return Program(model, optimizer, step)


@supports("several schedulers")
@goes_on
def test_two_schedules_of_one_optimizer() -> Program:
    """One for each step, one for each epoch of two steps."""
    model = net()
    optimizer = adamw(model)
    often, seldom = LambdaLR(optimizer, lambda n: 1 / (1 + n)), StepLR(optimizer, 1, gamma=0.5)
    plain = plainly(model, optimizer)

    def step(number: int) -> Any:
        loss = plain(number)
        often.step()
        if number % 2:
            seldom.step()
        return loss

    return Program(model, optimizer, step, scheduler=[often, seldom])


@supports("schedules by the epoch")
@pytest.mark.parametrize("saved", ["in front of its step", "behind its step"])
@goes_on
def test_a_schedule_by_the_epoch(saved: str) -> Program:
    """As the page advises: at the beginning of an iteration, by what the schedule has counted."""
    model = net()
    optimizer = adamw(model)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    plain = plainly(model, optimizer)

    def begin(number: int) -> None:
        if scheduler.last_epoch < number // UPDATES:
            scheduler.step(1.0)

    def step(number: int) -> Any:
        begin(number)
        loss = plain(number)
        if saved == "behind its step":
            begin(number + 1)
        return loss

    return Program(model, optimizer, step, scheduler=scheduler)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "AcceleratedOptimizer": lambda model: Delegate(adamw(model)),
    "a container": Container,
    "a container of pairs": lambda model: Combined(nn.ModuleDict({"first": model[0], "last": model[-1]})),
    "AcceleratedOptimizer around a container": lambda model: Delegate(Container(model)),
    "Lookahead, its state inside": lambda model: LookaheadInside(adamw(model)),
    "Lookahead, given as extra state": lambda model: Lookahead(adamw(model)),
}


@supports("optimizer containers and wrappers")
@pytest.mark.parametrize("name", WRAPPERS)
@goes_on
def test_what_has_others_inside(name: str) -> Program:
    model = net()
    optimizer = WRAPPERS[name](model)
    program = Program(model, optimizer, plainly(model, optimizer))
    if isinstance(optimizer, Container):
        program.scheduler = Schedulers(optimizer.optimizers)
        program.step = plainly(model, optimizer, after=program.scheduler.step)
    if isinstance(optimizer, (Combined, Lookahead)):  # their steps call no hooks
        program.extra_state = {"lookahead": optimizer} if "extra" in name else None
        program.step = plainly(model, optimizer, after=program.step_done)
    return program


@supports("optimizer containers and wrappers")
@goes_on
def test_a_wrapper_with_a_state_of_its_own() -> Program:
    """It is given as ``extra_state``, too."""
    model = net()
    optimizer = HookedLookahead(adamw(model))
    return Program(model, optimizer, plainly(model, optimizer), extra_state={"lookahead": optimizer})


@supports("optimizer containers and wrappers")
@goes_on
def test_a_setting_that_only_the_step_inside_has() -> Program:
    """LARC puts the weight decay back behind that step, so that a resumed run has to have it again."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    wrapper = Larc(optimizer)

    def step(number: int) -> Any:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        return plainly(model, wrapper)(number)

    return Program(model, optimizer, step)


@supports("optimizer containers and wrappers")
@goes_on
def test_sam_with_its_closure() -> Program:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = Sam(model.parameters())

    def step(_number: int) -> Any:
        batch: Tensor = data()

        def closure() -> Any:
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        closure()
        loss = optimizer.step(closure)
        optimizer.zero_grad()
        return loss

    return Program(model, optimizer, step)
