"""Wrappers and containers of optimizers in the style of other projects: saved with all of their state, or refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from tests.adapters.torch.checkpoints import Net, digest
from tests.adapters.torch.stub_processor import StubProcessor, join, save
from tests.making import making
from ttp.adapters.torch.adapter import TorchAdapter
from ttp.core.messages import Phase
from ttp.errors import UsageError

Base: Any = Optimizer
no_grad: Any = torch.no_grad


class Container(Base):  # type: ignore[misc]
    """Like torchtitan's: one optimizer for each part of the model; its own state stays empty."""

    def __init__(self, model: Any) -> None:
        parts = [list(child.parameters()) for child in (model.first, model.norm, model.second)]
        self.optimizers: list[Any] = [Adam([p for p in part if p.requires_grad], lr=0.01) for part in parts]
        super().__init__([p for each in self.optimizers for g in each.param_groups for p in g["params"]], {"lr": 0.01})

    def step(self, *args: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, *args: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


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


class Delegate(Base):  # type: ignore[misc]
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


Delegate.__name__ = "AcceleratedOptimizer"


class Lookahead(Base):  # type: ignore[misc]
    """Like most implementations: slow weights in a state of its own, and ``Optimizer.__init__`` is not called."""

    def __init__(self, optimizer: Any, every: int = 2) -> None:
        self.optimizer, self.every, self.count = optimizer, every, 0
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
            if self.count % self.every == 0:
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


class Sam(Base):  # type: ignore[misc]
    """Like davda54/sam."""

    def __init__(self, parameters: Any) -> None:
        self.param_groups: Any
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer: Any = Adam(self.param_groups, lr=0.01)
        self.param_groups = self.base_optimizer.param_groups

    @no_grad()  # type: ignore[untyped-decorator]
    def first_step(self) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[parameter]["old_p"] = parameter.data.clone()
            parameter.add_(parameter.grad, alpha=0.05)
        self.zero_grad()

    @no_grad()  # type: ignore[untyped-decorator]
    def second_step(self) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.data = self.state[parameter]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    @no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


class Hiding(Base):  # type: ignore[misc]
    """An optimizer that keeps its momentum in an attribute."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.momenta: dict[int, Any] = {}

    @no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for number, p in enumerate(p for group in self.param_groups for p in group["params"] if p.grad is not None):
            momentum = self.momenta.setdefault(number, torch.zeros_like(p))
            p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=0.01)


class Sign(Base):  # type: ignore[misc]
    """An optimizer without state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad.sign(), alpha=0.01)


Make = Callable[[nn.Module], Any]


class Job:
    """A loop with one optimizer of these, under a stub processor."""

    def __init__(self, directory: Path, make: Make, done: bool = False, extra: bool = False) -> None:
        torch.manual_seed(5)
        self.model, self.done = Net(), done
        self.optimizer = make(self.model)
        self.scheduler: Any = None
        if isinstance(self.optimizer, Container):
            self.scheduler = Schedulers(self.optimizer.optimizers)
        self.adapter = TorchAdapter(
            self.optimizer,
            model=self.model,
            scheduler=self.scheduler,
            extra_state={"optimizer": self.optimizer} if extra else None,
            scaler=None,
        )
        self.processor = StubProcessor(directory)

    def start(self, pages: Path) -> Job:
        join(self.adapter, self.processor, pages)
        return self

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(6, 4)).square().mean().backward()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.optimizer.step(*([self.backward] if isinstance(self.optimizer, Sam) else []))
            if self.scheduler is not None:
                self.scheduler.step()
            if self.done:
                self.adapter.step_done()

    def facts(self) -> Any:
        return digest(self.model.state_dict(), torch.optim.SGD([torch.zeros(1)]))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    def begin(*given: Any, **options: Any) -> Job:
        return Job(tmp_path / "checkpoints", *given, **options).start(tmp_path / "pages")

    with making(begin, lambda job: job.adapter.source.close()) as start:
        yield start


KINDS: dict[str, tuple[Make, dict[str, bool]]] = {
    "container": (Container, {}),
    "accelerate": (lambda model: Delegate(AdamW(model.parameters())), {}),
    "accelerate around a container": (lambda model: Delegate(Container(model)), {}),
    "lookahead, state inside": (lambda model: LookaheadInside(Adam(model.parameters())), {"done": True}),
    "lookahead, given as extra state": (
        lambda model: Lookahead(Adam(model.parameters())),
        {"done": True, "extra": True},
    ),
    "sam with a closure": (lambda model: Sam(model.parameters()), {}),
    "no state needed": (lambda model: Sign(model.parameters()), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_with_its_bits(start: Callable[..., Job], tmp_path: Path, kind: str) -> None:
    make, options = KINDS[kind]
    job = start(make, **options)
    job.train(3)
    assert job.processor.gate.version == 3 and job.processor.gate.state().phase is Phase.IDLE
    path = save(job.adapter, job.processor, 3)
    job.processor.gate.open()
    torch.manual_seed(11)
    job.train(3)
    other = Job(tmp_path / "checkpoints", make, **options)
    other.done = False
    assert other.adapter.load(path, 0, 1, protected=False) == 3
    torch.manual_seed(11)
    other.train(3)
    assert other.facts() == job.facts()


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (
            lambda model: Lookahead(Adam(model.parameters())),
            {"done": True},
            r"Lookahead keeps tensors of its own \(\.state\), and a checkpoint holds only.* of Adam.*extra_state=",
        ),
        (
            lambda model: Hiding(model.parameters()),
            {},
            r"Hiding has stepped, its \.state is empty, and it keeps tensors in \.momenta.*self\.state\[parameter\]",
        ),
        (
            lambda model: LookaheadInside(Adam(model.parameters())),
            {},
            r"LookaheadInside wraps another optimizer.*Call ttp\.step_done\(\) at the end",
        ),
    ],
    ids=["slow weights", "hidden moments", "a step that cannot be seen"],
)
def test_what_would_be_forgotten_is_refused_right_away(
    start: Callable[..., Job], make: Make, options: dict[str, bool], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        start(make, **options).train(2)


def test_weights_moved_between_two_backward_passes_are_refused(start: Callable[..., Job]) -> None:
    job = start(lambda model: Sam(model.parameters()))
    job.backward()
    job.optimizer.first_step()
    with pytest.raises(UsageError, match=r"outside of optimizer\.step\(\).*optimizer\.step\(closure\)"):
        job.backward()
    assert job.processor.gate.version == 0


def test_accumulated_gradients_move_no_weights(start: Callable[..., Job]) -> None:
    job = start(lambda model: Adam(model.parameters()))
    for _ in range(3):
        for _ in range(3):
            job.model(torch.randn(6, 4)).square().mean().backward()
        job.optimizer.step()
    assert job.processor.gate.version == 3


def test_a_schedule_of_groups_that_are_not_saved_is_refused(tmp_path: Path) -> None:
    model = Net()
    container = Container(model)
    with pytest.raises(UsageError, match="make a scheduler for each optimizer inside"):
        TorchAdapter(container, model=model, scheduler=StepLR(container, 1), extra_state=None, scaler=None)


def test_an_optimizer_of_whose_steps_nobody_is_told_is_refused(start: Callable[..., Job]) -> None:
    class Silent(Base):  # type: ignore[misc]
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters)}]
            self.state: Any = {}

        def step(self, closure: Any = None) -> None:
            pass

    with pytest.raises(UsageError, match=r"Silent does not call torch\.optim\.Optimizer\.__init__\(\)"):
        start(lambda model: Silent(model.parameters()))
