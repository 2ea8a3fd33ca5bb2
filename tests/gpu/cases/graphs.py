"""CUDA graphs: forward and backward pass may be one; a graph of the whole step, in which no hook runs, is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import ttp
from tests.gpu.cases.steady import Statistics
from tests.gpu.pages import written
from tests.gpu.stand import Stand, assert_same, same_bytes, saved_tensors
from tests.gpu.training import Plain, Training, references
from ttp.adapters.torch.local_state.image import decode


def still() -> torch.nn.Module:
    """Make a model without dropout: a graph of it draws other numbers than an eager pass."""
    model = Plain()
    model.drop.p = 0.0
    return model


def forward_and_backward(stand: Stand) -> None:
    """The update is outside of the graph, so nothing differs for ttp."""

    def graphed(model: torch.nn.Module) -> Any:
        if not stand.real:
            return model
        make: Any = torch.cuda.make_graphed_callables
        return make(model, (torch.zeros(16, 32, device=stand.device),))

    def make() -> Training:
        return Training(stand, make=still, wrap=graphed)

    wanted = references(make, 5)
    training = make()
    with stand.protected():
        training.protect()
        for _ in range(4):
            training.step()
        version, checkpoint = stand.save()
        assert version == 4
        assert_same(saved_tensors(checkpoint), wanted[4])
        training.step()
        assert_same(training.state(), wanted[5])


def captured_late(stand: Stand) -> None:
    """A graph that is captured in mid-run writes to buffers, large ones too, and torch counts none of these writes."""
    training = Training(stand, make=Statistics)
    with stand.protected():
        training.protect()
        for _ in range(6):
            training.step()
        with _captured(stand, training) as replay:
            training.gradient()
        for version in (7, 8, 9):
            replay()
            training.update()
            found = decode(written(0, version).data).buffers
            for name, buffer in stand.host_copy(dict(training.module.named_buffers())).items():
                assert same_bytes(found[name], buffer), f"page of version {version}: {name}"


def of_the_compiler(stand: Stand) -> None:
    """Each replay of the graphs that ``torch.compile`` makes uses their memory again, also that of the buffers."""

    def settled() -> torch.nn.Module:
        model = Statistics()
        model.drop.p = 0.0
        return model

    def compiled(model: torch.nn.Module) -> Any:
        how: dict[str, Any] = {"mode": "reduce-overhead"} if stand.real else {"backend": "eager"}
        return torch.compile(model, **how)

    def make() -> Training:
        return Training(stand, make=settled, wrap=compiled)

    wanted = references(make, 9)
    training = make()
    buffers = [name for name, _ in training.module.named_buffers()]
    with stand.protected():
        training.protect()
        training.gradient()
        for version in range(1, 9):
            training.update()
            training.gradient()
            found = decode(written(0, version).data).buffers
            differ = [name for name in buffers if not same_bytes(found[name], wanted[version][f"model.{name}"])]
            assert not differ, f"page of version {version}: {differ}"
        version, checkpoint = stand.save()
        assert version == 8
        assert_same(saved_tensors(checkpoint), wanted[8])
        training.update()
        assert_same(training.state(), wanted[9])


def saved_meanwhile(stand: Stand) -> None:
    """A save asks the device for its events, on other threads, while a graph is captured, and may not break it.

    Nor may what ttp does in the first updates: it looks at buffers and at parameters that no optimizer trains.
    """

    def watched() -> torch.nn.Module:
        model = still()
        model.register_buffer("kept", torch.ones(8))
        model.teacher = torch.nn.Parameter(torch.ones(8), requires_grad=False)
        return model

    wanted = references(lambda: Training(stand, make=watched), 4)
    training = Training(stand, make=watched)
    with stand.protected():
        training.protect()
        for _ in range(3):
            training.step()
        with _captured(stand, training) as replay:
            version, checkpoint = stand.save()
            training.evaluate()
            training.gradient()
        assert version == 3
        assert_same(saved_tensors(checkpoint), wanted[3])
        replay()
        training.update()
        assert_same(training.state(), wanted[4])


@contextlib.contextmanager
def _captured(stand: Stand, training: Training) -> Iterator[Callable[[], None]]:
    """Capture a graph of the block, which calls ``training.gradient``; yields what replays it."""
    if stand.made_up is not None:
        with stand.made_up.device.capture() as replay:
            yield replay
        return
    if not stand.real:
        yield training.gradient
        return
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        yield graph.replay


def whole_step(stand: Stand) -> None:
    """The capture of the graph fails with an error that names what to do."""
    if not stand.hangs:
        return  # nothing can be captured
    training = Training(stand, "adam-capturable")
    with stand.protected():
        training.protect()
        with _beside(stand):
            for _ in range(3):
                training.step()
        problem = _capture(stand, training)
        assert isinstance(problem, (ttp.ConfigError, ttp.UsageError)), f"not refused: {problem!r}"
        assert "graph" in str(problem)
        stand.numbers["refusal"] = str(problem)


@contextlib.contextmanager
def _beside(stand: Stand) -> Iterator[None]:
    """Let this thread work on another stream, as torch wants it before a capture."""
    if not stand.real:
        yield
        return
    cuda: Any = torch.cuda
    stream = cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _capture(stand: Stand, training: Training) -> BaseException | None:
    """Capture a step and return the first error; ending a broken capture may raise another."""
    try:
        with _captured(stand, training):
            training.gradient()
            training.optimizer.step()
    except Exception as problem:
        first: BaseException = problem
        while first.__context__ is not None:
            first = first.__context__
        return first
    return None
