"""What a loop changes after the step belongs to no version, and is told; what it changes elsewhere is not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.adapters.torch.going_on import Program, adamw, data, goes_on, net, plainly
from tests.adapters.torch.stub_processor import Loop

supports = pytest.mark.supports
Told = list[str]


class Box(SimpleNamespace):
    """State by the names of its attributes."""

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], Told]:
    """Return what messages say of objects of ``extra_state``."""
    return lambda: [each.getMessage() for each in caplog.records if each.getMessage().startswith("extra_state")]


def runs(
    directory: Path,
    state: Any,
    *,
    before: Callable[[int], Any] = lambda _: None,
    between: Callable[[int, Tensor], Any] = lambda *_: None,
    after: Callable[[int], Any] = lambda _: None,
    by_hand: bool = False,
    steps: int = 8,
    accumulates: int = 1,
) -> None:
    """Train; ``before`` is called in front of the forward pass, ``between`` with the loss in front of the backward
    pass, and ``after`` behind the step.
    """
    model = net()
    optimizer = adamw(model)
    adapter = Loop(directory, model, optimizer, extra_state=state).start(directory / "pages").adapter
    if by_hand:
        adapter.step_done()
    for number in range(steps):
        before(number)
        for _ in range(accumulates):
            loss = model(data()).square().mean()
            between(number, loss)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(number)
        if by_hand:
            adapter.step_done()


class TestToldOnce:
    """A run that resumes would lack the last change."""

    @supports("state of the loop (counters, losses)")
    def test_a_counter_and_losses(self, tmp_path: Path, told: Callable[[], Told]) -> None:
        """As in most trainers: with the counter the run makes an iteration twice."""
        state = Box(step=0, losses=[])

        def after(_number: int) -> None:
            state.step += 1
            state.losses.append(0.5)

        runs(tmp_path, state, after=after)
        (text,) = told()
        assert text.startswith("extra_state ('losses', 'step') changes after optimizer.step(): a checkpoint has it as ")
        assert "Change it before loss.backward(). Or call ttp.step_done()" in text

    def test_one_key_of_an_object_that_changes_in_time_too(self, tmp_path: Path, told: Callable[[], Told]) -> None:
        state = Box(step=0, losses=[])

        def after(_number: int) -> None:
            state.step += 1

        runs(tmp_path, {"loop": state}, between=lambda _, loss: state.losses.append(loss.item()), after=after)
        (text,) = told()
        assert text.startswith("extra_state['loop'] ('step') changes after optimizer.step()")

    def test_a_large_array(self, tmp_path: Path, told: Callable[[], Told]) -> None:
        """It is captured apart from the state that holds it."""
        state = Box(losses=np.zeros(1 << 14))

        def after(number: int) -> None:
            state.losses[number] = 1

        runs(tmp_path, state, after=after)
        (text,) = told()
        assert text.startswith("extra_state changes after optimizer.step()")

    def test_a_state_that_is_no_dict(self, tmp_path: Path, told: Callable[[], Told]) -> None:
        state = Listed()
        runs(tmp_path, state, after=state.values.append)
        assert len(told()) == 1

    def test_with_accumulated_gradients(self, tmp_path: Path, told: Callable[[], Told]) -> None:
        state = Box(step=0)
        runs(tmp_path, state, after=lambda number: setattr(state, "step", number + 1), accumulates=3)
        assert len(told()) == 1

    def test_an_average_that_begins_late_and_gives_copies(self, tmp_path: Path, told: Callable[[], Told]) -> None:
        model = nn.Sequential(nn.Linear(6, 600), nn.Linear(600, 600))
        state = Box(average={name: t.clone() for name, t in model.state_dict().items()})
        optimizer = adamw(model)
        Loop(tmp_path, model, optimizer, extra_state=state).start(tmp_path / "pages")
        for number in range(7):
            model(data()).square().mean().backward()
            optimizer.step()
            if number >= 4:
                for name, tensor in model.state_dict().items():
                    state.average[name].lerp_(tensor, 0.1)
        (text,) = told()
        assert "seems to be an average of the weights" in text

    @pytest.mark.parametrize("kind", ["scheduler", "scaler"])
    def test_what_has_an_argument_of_its_own(self, kind: str, tmp_path: Path, told: Callable[[], Told]) -> None:
        """Such an object cannot change before the backward pass."""
        model = net()
        optimizer = adamw(model)
        scaler = torch.amp.GradScaler("cpu", growth_interval=1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        state = {"scheduler": scheduler, "scaler": scaler}[kind]
        Loop(tmp_path, model, optimizer, extra_state={"it": state}).start(tmp_path / "pages")
        for _ in range(5):
            scaler.scale(model(data()).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        (text,) = told()
        assert text.startswith("extra_state['it'] (") and f"Give it to wrap_optimizer() as {kind}=" in text
        assert "Change it before" not in text

    def test_with_several_optimizers(self, tmp_path: Path, told: Callable[[], Told]) -> None:
        several(tmp_path, state := Box(step=0), after=lambda number: setattr(state, "step", number + 1))
        assert len(told()) == 1


class Listed:
    """A state that is a list."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def state_dict(self) -> list[int]:
        return list(self.values)

    def load_state_dict(self, values: list[int]) -> None:
        self.values = list(values)


class Loader:
    """Shards of five batches: the position changes with each batch, the shard with every fifth one."""

    def __init__(self) -> None:
        self.shard, self.place = 0, 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.shard, self.place = self.shard + self.place // 5, self.place % 5 + 1
            yield self.place

    def state_dict(self) -> dict[str, Any]:
        return {"shard": self.shard, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shard, self.place = state["shard"], state["place"]


def several(directory: Path, state: Any, after: Callable[[int], Any]) -> None:
    """Train two networks in turns."""
    nets = nn.ModuleDict({"one": net(), "two": net()})
    optimizers = [adamw(nets["one"]), adamw(nets["two"])]
    Loop(directory, nets, optimizers, extra_state=state).start(directory / "pages")
    for number in range(6):
        for each, optimizer in zip(nets.values(), optimizers, strict=True):
            each(data()).square().mean().backward()
            optimizer.step()
        after(number)


class TestNotTold:
    """A run that resumes makes the change again, or the checkpoint has it."""

    def test_a_loader_and_losses_before_the_backward_pass(self, tmp_path: Path, told: Callable[[], Told]) -> None:
        loader, losses = Loader(), Box(losses=[])
        batches = iter(loader)
        extra = {"loader": loader, "losses": losses}
        runs(tmp_path, extra, before=lambda _: next(batches), between=lambda _, loss: losses.losses.append(loss.item()))
        assert not told()

    @pytest.mark.parametrize("way", ["step_done", "between_backward_and_step"])
    def test_what_the_version_has(self, way: str, tmp_path: Path, told: Callable[[], Told]) -> None:
        state, model = Box(step=0, losses=[]), net()
        optimizer = adamw(model)
        adapter = Loop(tmp_path, model, optimizer, extra_state=state).start(tmp_path / "pages").adapter
        if way == "step_done":
            adapter.step_done()
        for _ in range(6):
            model(data()).square().mean().backward()
            if way != "step_done":
                state.step += 1
            optimizer.step()
            if way == "step_done":
                state.step += 1
                adapter.step_done()
        assert not told()

    def test_step_done_that_is_not_called_before_the_loop(self, tmp_path: Path, told: Callable[[], Told]) -> None:
        state, model = Box(step=0), net()
        optimizer = adamw(model)
        adapter = Loop(tmp_path, model, optimizer, extra_state=state).start(tmp_path / "pages").adapter
        for number in range(6):
            state.step = number  # at the top
            model(data()).square().mean().backward()
            optimizer.step()
            adapter.step_done()
        assert not told()

    def test_a_count_of_micro_batches(self, tmp_path: Path, told: Callable[[], Told]) -> None:
        state = Box(micro=0)
        runs(tmp_path, state, between=lambda *_: setattr(state, "micro", state.micro + 1), accumulates=3)
        assert not told()

    def test_what_changes_now_and_then(self, tmp_path: Path, told: Callable[[], Told]) -> None:
        """A loop over epochs of two steps, which counts them at its top."""
        state = Box(epoch=0, seen=0)

        def before(number: int) -> None:
            state.epoch, state.seen = number // 2, state.seen + 1

        runs(tmp_path, state, before=before)
        assert not told()

    def test_a_random_generator(self, tmp_path: Path, told: Callable[[], Told]) -> None:
        """One of its numbers changes with every second draw only."""
        generator = np.random.default_rng(1)
        state = Generator(generator)
        runs(tmp_path, state, before=lambda number: generator.integers(9, size=2 - number % 2, dtype=np.int32))
        assert not told()

    def test_a_half_of_a_draw_that_a_random_generator_keeps(self, tmp_path: Path, told: Callable[[], Told]) -> None:
        """The generator draws in each iteration, but the first one leaves no half of a draw, and later ones do."""
        rng = np.random.default_rng(1)

        def before(number: int) -> None:
            rng.integers(9, size=1 + (number > 0), dtype=np.int32)
            rng.integers(9, size=1, dtype=np.int32)

        runs(tmp_path, {"rng": rng}, before=before)
        assert told() == []

    def test_steps_that_a_scaler_skips(self, tmp_path: Path, told: Callable[[], Told]) -> None:
        state, model = Box(losses=[]), net()
        optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**120)
        Loop(tmp_path, model, optimizer, scaler=scaler, extra_state=state).start(tmp_path / "pages")
        for _ in range(12):
            loss = model(data()).square().mean()
            state.losses.append(loss.item())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert not told()

    @pytest.mark.parametrize("width", [6, 600])
    def test_best_weights_beside_losses(self, width: int, tmp_path: Path, told: Callable[[], Told]) -> None:
        """They are no average that changes: the losses do, before the backward pass."""
        model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, width))
        optimizer = adamw(model)
        state = Box(losses=[], best={name: t.clone() for name, t in model.state_dict().items()})
        adapter = Loop(tmp_path, model, optimizer, extra_state=state).start(tmp_path / "pages").adapter
        adapter.step_done()
        for _ in range(6):
            loss = model(data()).square().mean()
            state.losses.append(loss.item())
            loss.backward()
            optimizer.step()
            adapter.step_done()
        assert not told()


class Generator:
    """A generator of numpy, whose state is the state of the object."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return dict(self.generator.bit_generator.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.bit_generator.state = state


@supports("state of the loop (counters, losses)")
@goes_on
def test_changed_before_the_backward_pass_it_comes_back() -> Program:
    model, state = net(), Box(step=0)
    optimizer = adamw(model)

    def before() -> None:
        state.step += 1

    return Program(model, optimizer, plainly(model, optimizer, before=before), extra_state={"loop": state})
