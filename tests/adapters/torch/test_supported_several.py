"""Several optimizers, several schedules, and optimizers that contain others: each goes on with its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, StepLR

from tests.adapters.torch.going_on import UPDATES, Program, adamw, assert_goes_on_with_its_bits, data, net, plainly
from ttp.processor import paged_source

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
def test_muon_and_adamw(tmp_path: Path, schedules: bool) -> None:
    def make() -> Program:
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

    assert_goes_on_with_its_bits(tmp_path, make)


@supports("several optimizers")
def test_two_networks_that_step_in_turns(tmp_path: Path) -> None:
    def make() -> Program:
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

    assert_goes_on_with_its_bits(tmp_path, make)


@supports("several schedulers")
def test_two_schedules_of_one_optimizer(tmp_path: Path) -> None:
    """One for each step, one for each epoch of two steps."""

    def make() -> Program:
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

    assert_goes_on_with_its_bits(tmp_path, make)


@supports("schedules by the epoch")
@pytest.mark.parametrize("saved", ["in front of its step", "behind its step"])
def test_a_schedule_by_the_epoch(tmp_path: Path, saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page advises: at the beginning of an iteration, by what the schedule has counted."""
    monkeypatch.setattr(paged_source, "POST_STEP_S", 0.0)

    def make() -> Program:
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

    assert_goes_on_with_its_bits(tmp_path, make)


class Lookahead(Optimizer):
    """The published algorithm: every k steps the weights go half-way back to slow weights."""

    def __init__(self, optimizer: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups = optimizer.param_groups
        super().__init__(optimizer.param_groups, {})
        for group in self.param_groups:
            group["counter"] = 0
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optimizer.step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                group["counter"] = (group["counter"] + 1) % self.k
                for parameter in group["params"] if group["counter"] == 0 else ():
                    slow = self.state[parameter]["slow"]
                    parameter.copy_(slow.lerp_(parameter, self.alpha))
        return loss

    def _every(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self.optimizer.state_dict(), "slow": [self.state[p]["slow"] for p in self._every()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for parameter, slow in zip(self._every(), state_dict["slow"], strict=True):
            self.state[parameter]["slow"].copy_(slow)


class SAM(Optimizer):
    """The published algorithm: up to the worst point near by, and from the gradient there."""

    def __init__(self, parameters: Any, base: Any, rho: float = 0.05, **settings: Any) -> None:
        super().__init__(parameters, {"rho": rho, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for parameter in every:
            self.state[parameter]["old_p"] = parameter.clone()
            parameter.add_(0.05 * parameter.grad / (norm + 1e-12))
            parameter.grad.zero_()
        with torch.enable_grad():
            loss = closure()
        for parameter in every:
            parameter.copy_(self.state[parameter]["old_p"])
        self.base_optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:  # what is in its own state is over with the step
        state: dict[str, Any] = self.base_optimizer.state_dict()
        return state


class AcceleratedOptimizer(Optimizer):
    """Like accelerate's: a subclass of Optimizer that passes every call on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


class Container(Optimizer):
    """Like torchtitan's."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [adamw(part) for part in parts]
        Optimizer.__init__(self, [p for part in parts for p in part.parameters()], {"lr": 1e-2})

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> Any:
        for optimizer in self:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {str(number): optimizer.state_dict() for number, optimizer in enumerate(self)}


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "AcceleratedOptimizer": lambda model: AcceleratedOptimizer(adamw(model)),
    "a container": lambda model: Container([model[0], model[-1]]),
}


@supports("optimizer containers and wrappers")
@pytest.mark.parametrize("name", WRAPPERS)
def test_what_has_others_inside(tmp_path: Path, name: str) -> None:
    def make() -> Program:
        model = net()
        optimizer = WRAPPERS[name](model)
        return Program(model, optimizer, plainly(model, optimizer))

    assert_goes_on_with_its_bits(tmp_path, make)


@supports("optimizer containers and wrappers")
def test_a_wrapper_with_a_state_of_its_own(tmp_path: Path) -> None:
    """It is given as ``extra_state``, too."""

    def make() -> Program:
        model = net()
        optimizer = Lookahead(adamw(model))
        return Program(model, optimizer, plainly(model, optimizer), extra_state={"lookahead": optimizer})

    assert_goes_on_with_its_bits(tmp_path, make)


@supports("optimizer containers and wrappers")
def test_sam_with_its_closure(tmp_path: Path) -> None:
    def make() -> Program:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

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

    assert_goes_on_with_its_bits(tmp_path, make)
