"""CUDA graphs: forward and backward pass may be one; a graph of the whole step, in which no hook runs, is refused."""

from __future__ import annotations

from typing import Any

import torch

import ttp
from tests.gpu.stand import Stand, assert_same, saved_tensors
from tests.gpu.training import Plain, Training, references


def forward_and_backward(stand: Stand) -> None:
    """The update is outside of the graph, so nothing differs for ttp."""

    def graphed(model: torch.nn.Module) -> Any:
        if not stand.real:
            return model
        make: Any = torch.cuda.make_graphed_callables
        return make(model, (torch.zeros(16, 32, device=stand.device),))

    def plain() -> torch.nn.Module:
        model = Plain()
        model.drop.p = 0.0  # a graph of dropout draws other numbers than an eager pass
        return model

    def make() -> Training:
        return Training(stand, make=plain, wrap=graphed)

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


def whole_step(stand: Stand) -> None:
    """The capture of the graph fails with an error that names what to do."""
    if not stand.real:
        return  # nothing can be captured
    training = Training(stand, "adam-capturable")
    with stand.protected():
        training.protect()
        cuda: Any = torch.cuda
        stream = cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                training.step()
        torch.cuda.current_stream().wait_stream(stream)
        problem = _capture(training)
        assert isinstance(problem, (ttp.ConfigError, ttp.UsageError)), f"not refused: {problem!r}"
        assert "graph" in str(problem)
        stand.numbers["refusal"] = str(problem)


def _capture(training: Training) -> BaseException | None:
    """Capture a step and return the first error; ending a broken capture may raise another."""
    graph: Any = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            training.gradient()
            training.optimizer.step()
    except Exception as problem:
        first: BaseException = problem
        while first.__context__ is not None:
            first = first.__context__
        return first
    return None
