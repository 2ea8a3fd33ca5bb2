"""Wrappers and containers of optimizers in the style of other projects."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

Base: Any = Optimizer
no_grad: Any = torch.no_grad


class Container(Base):
    """Like torchtitan's: one optimizer for each part of the model; its own state stays empty."""

    def __init__(self, model: nn.Module) -> None:
        parts = ([p for p in child.parameters() if p.requires_grad] for child in model.children())
        self.optimizers: list[Any] = [Adam(part, lr=0.01) for part in parts if part]
        super().__init__([p for each in self.optimizers for g in each.param_groups for p in g["params"]], {"lr": 0.01})

    def step(self, *args: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, *args: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {str(number): each.state_dict() for number, each in enumerate(self.optimizers)}


class Combined(Base):
    """Like torchrec's: pairs of a name and an optimizer, and ``Optimizer.__init__`` is not called."""

    def __init__(self, model: nn.Module) -> None:
        self._optims = [(name, Adam(child.parameters(), lr=0.01)) for name, child in model.named_children()]

    param_groups = property(lambda self: [group for _, each in self._optims for group in each.param_groups])
    state = property(lambda self: {p: state for _, each in self._optims for p, state in each.state.items()})

    def step(self, *args: Any) -> None:
        for _, optimizer in self._optims:
            optimizer.step()

    def zero_grad(self, *args: Any) -> None:
        for _, optimizer in self._optims:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self._optims}


class Schedulers:
    """Like torchtitan's container of schedulers."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.schedulers = [StepLR(each, 1, 0.9) for each in optimizers]

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("each of those inside has a state of its own")


class Delegate(Base):
    """Like accelerate's: no hooks of its own, and every call is passed on."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.scaler = optimizer, None

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def zero_grad(self, *args: Any) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state_dict()
        return found


Delegate.__name__ = "AcceleratedOptimizer"


class Lookahead(Base):
    """Like most implementations: slow weights in a state of its own, and ``Optimizer.__init__`` is not called."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.count = optimizer, 0
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state: Any = defaultdict(dict)

    def slow(self, parameter: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.state[parameter]
        return found

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)
        self.count += 1
        for parameter in (p for group in self.param_groups for p in group["params"] if p.requires_grad):
            slow = self.slow(parameter).setdefault("slow", parameter.detach().clone())
            if self.count % 2 == 0:
                slow.add_(parameter.data - slow, alpha=0.5)
                parameter.data.copy_(slow)

    def zero_grad(self, *args: Any) -> None:
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        parameters = [p for group in self.param_groups for p in group["params"]]
        return {"count": self.count, "slow": [self.slow(p).get("slow") for p in parameters]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter, slow in zip(parameters, state["slow"], strict=True):
            if slow is not None:
                self.slow(parameter)["slow"] = slow


class HookedLookahead(Lookahead):
    """One whose steps call hooks."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        Base.__init__(self, optimizer.param_groups, {})


class LookaheadInside(Lookahead):
    """Like timm's: slow weights in the state of the optimizer inside."""

    def slow(self, parameter: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state[parameter]
        return found

    @property
    def count(self) -> int:
        return int(self.param_groups[0].get("lookahead_step", 0))

    @count.setter
    def count(self, count: int) -> None:
        for group in getattr(self, "param_groups", self.optimizer.param_groups):
            group["lookahead_step"] = count


class Sam(Base):
    """Like davda54/sam."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups: Any
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer: Any = Adam(self.param_groups, lr=0.01)
        self.param_groups = self.base_optimizer.param_groups

    @no_grad()
    def first_step(self) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[parameter]["old_p"] = parameter.data.clone()
            parameter.add_(parameter.grad, alpha=0.05)
        self.zero_grad()

    @no_grad()
    def second_step(self) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.data = self.state[parameter]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    @no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        self.first_step()
        loss = closure()
        self.second_step()
        return loss

    def state_dict(self) -> dict[str, Any]:  # what is in its own state is over with the step
        found: dict[str, Any] = self.base_optimizer.state_dict()
        return found


class Larc:
    """Like apex's, and no optimizer itself: the weight decay goes into the gradient, so the step inside has none."""

    def __init__(self, optimizer: Any) -> None:
        self.optim = optimizer

    def step(self) -> None:
        decays = [group["weight_decay"] for group in self.optim.param_groups]
        for group in self.optim.param_groups:
            for parameter in group["params"]:
                parameter.grad += group["weight_decay"] * parameter.detach()
                parameter.grad *= 0.5 * parameter.detach().norm() / (parameter.grad.norm() + 1e-8)
            group["weight_decay"] = 0
        self.optim.step()
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            group["weight_decay"] = decay

    def zero_grad(self) -> None:
        self.optim.zero_grad()
