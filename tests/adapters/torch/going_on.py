"""Small training programs, and a check that one goes on with its bits in the place of another. See
test_supported.py.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.adapters.torch.stub_processor import StubProcessor, join, leave, registered, save
from ttp.adapters.torch.adapter import TorchAdapter
from ttp.core.layout import Version
from ttp.processor.kept_state import KeptState
from ttp.testing.digests import digest

UPDATES = 5
"""Before the save, and after it. In the first four, all state is read more often than in the later ones."""


@dataclass
class Program:
    """What a program registers, and one of its steps.

    Args:
        model: and ``optimizer``, ``scheduler``, ``scaler``, ``extra_state``, ``undo``: as for ``wrap_optimizer``.
        step: makes the step with this number and returns the loss.
        also: other state that has to be equal.
    """

    model: Any
    optimizer: Any
    step: Callable[[int], Any]
    scheduler: Any = None
    scaler: Any = None
    extra_state: Any = None
    undo: str | None = None
    also: Mapping[str, Any] = field(default_factory=dict)
    adapter: TorchAdapter | None = None

    def register(self) -> TorchAdapter:
        given = {name: getattr(self, name) for name in ("scheduler", "scaler", "extra_state", "undo")}
        self.adapter = registered(self.model, self.optimizer, **given)
        return self.adapter

    def step_done(self) -> None:
        assert self.adapter is not None
        self.adapter.step_done()  # as ttp.step_done()

    def state(self) -> dict[str, str]:
        objects = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler, **self.also}
        objects |= dict(self.extra_state or {})
        objects |= {f"scheduler {n}": each for n, each in enumerate(_several(self.scheduler))}
        found = {name: digest(one.state_dict()) for name, one in objects.items() if hasattr(one, "state_dict")}
        found |= {f"optimizer {n}": digest(each.state_dict()) for n, each in enumerate(_several(self.optimizer))}
        streams = (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False))
        return found | {"random streams": digest(streams)}


def _several(given: Any) -> Sequence[Any]:
    return given if isinstance(given, list | tuple) else [] if given is None else [given]


Make = Callable[[], Program]


def seed(number: int) -> None:
    for each in (torch.manual_seed, random.seed, np.random.seed):
        each(number)


def in_mid_run(directory: Path, make: Make) -> tuple[Program, Any, StubProcessor]:
    """Return a program that has made some updates, its adapter and its stub processor."""
    seed(1)
    one = make()
    adapter, processor = one.register(), StubProcessor(directory)
    join(adapter, processor, directory / "pages")
    for step in range(UPDATES):
        one.step(step)
    return one, adapter, processor


def assert_goes_on_with_its_bits(directory: Path, make: Make) -> None:
    """Save one program in the middle, restore another one, and compare all further steps."""
    one, adapter, processor = in_mid_run(directory, make)
    assert processor.gate.version == UPDATES
    saved = save(adapter, processor, UPDATES)
    at_save = one.state()
    processor.gate.open()
    expected = [digest(one.step(step)) for step in range(UPDATES, 2 * UPDATES)]
    leave(adapter)

    seed(2)
    other = make()
    assert other.state() != at_save, "nothing may be right by chance"
    assert other.register().load(saved, 0, 1, protected=False) == UPDATES
    assert other.state() == at_save
    assert [digest(other.step(step)) for step in range(UPDATES, 2 * UPDATES)] == expected
    assert other.state() == one.state()
    assert_hands_over_its_bits(directory / "kept", make, expected)


def goes_on(make: Callable[..., Program]) -> Callable[..., None]:
    """Make a test, with the same parameters, that saves a program in the middle and lets another one go on."""
    own = inspect.signature(make)

    def test(**given: Any) -> None:
        assert_goes_on_with_its_bits(given["tmp_path"], lambda: make(**{name: given[name] for name in own.parameters}))

    every = {"tmp_path": inspect.Parameter("tmp_path", inspect.Parameter.KEYWORD_ONLY), **own.parameters}
    test.__dict__ |= {"__signature__": own.replace(parameters=sorted(every.values(), key=lambda each: each.kind))}
    test.__name__, test.__qualname__, test.__doc__ = make.__name__, make.__qualname__, make.__doc__
    test.__module__ = make.__module__
    return test


def assert_hands_over_its_bits(directory: Path, make: Make, expected: Sequence[str]) -> None:
    """Check the same for a process that goes on: another program gets the first one's tensors, or reads all."""
    one, adapter, processor = in_mid_run(directory, make)
    saved, at_save = save(adapter, processor, UPDATES), one.state()
    adapter.source.inspect(Version(UPDATES))
    kept = KeptState()
    kept.keep(adapter, "x")
    leave(adapter)

    seed(2)
    other = make()
    assert other.register().load_going_on(saved, 0, 1, kept, lambda: None) == UPDATES
    assert kept.way
    assert other.state() == at_save
    assert [digest(other.step(step)) for step in range(UPDATES, 2 * UPDATES)] == expected


def net(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), *more, nn.Linear(8, 3))


def data() -> Tensor:
    return torch.randn(8, 6)


def adamw(model: nn.Module, **settings: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)


def program_of(make_model: Callable[[], Any], make_optimizer: Callable[[Any], Any] = adamw) -> Make:
    """Return a function that makes a program with nothing but a model and its optimizer."""

    def make() -> Program:
        model = make_model()
        optimizer = make_optimizer(model)
        return Program(model, optimizer, plainly(model, optimizer))

    return make


def plainly(model: Any, optimizer: Any, before: Callable[[], Any] = lambda: None, after: Any = lambda: None) -> Any:
    """Return a plain training step."""

    def step(_number: int) -> Any:
        optimizer.zero_grad()
        loss = model(data()).square().mean()
        loss.backward()
        before()
        optimizer.step()
        after()
        return loss

    return step
