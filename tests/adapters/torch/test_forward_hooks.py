"""The beginning of a forward pass is seen where the loop begins it, before a wrapper of the model waits for others."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.adapters.torch import stub_processor
from ttp.adapters.torch.loop import forward_hooks
from ttp.adapters.torch.loop.bracket import EVALUATING, HAD_AN_ERROR
from ttp.adapters.torch.loop.forward_hooks import ForwardHooks
from ttp.adapters.torch.loop.post_step_state import PostStepState

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("default")]
dynamo: Any = torch._dynamo


class Waiting(DistributedDataParallel):
    """Notes, where it would wait for other ranks, whether the save of a version would wait for this rank's loop."""

    over: Callable[[], bool]
    seen: list[bool]

    def _pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(self.over())
        return super()._pre_forward(*args, **kwargs)


class Job(stub_processor.Loop):
    """A loop with an average of the weights, for which a save waits until the next forward pass begins."""

    call: Callable[[Tensor], Any]

    def __init__(self, directory: Any, model: nn.Module, call: Any = None) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        super().__init__(directory, model, optimizer, extra_state={"average": nn.ModuleList([copy.deepcopy(model)])})
        self.call = model if call is None else call

    def wrap(self, model: nn.Module) -> Waiting:
        ddp = Waiting(model)
        ddp.over, ddp.seen = self.source.post_step_done, []
        return ddp

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.call(torch.randn(6, 4)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


class Named(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.head = module, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.module(x))


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    dynamo.reset()
    yield
    dynamo.reset()


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


class Parts(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return sum((part(x) for part in self.parts), torch.zeros(()))


@pytest.mark.supports("the module inside DDP as model=")
def test_of_a_ddp_around_the_model(start: Any) -> None:
    model = layers()
    ddp = Waiting(model)
    job = start(model, ddp)
    ddp.over, ddp.seen = job.source.post_step_done, []
    job.train(3)
    assert ddp.seen == [True, True, True]


def test_of_a_ddp_that_is_made_after_wrap_optimizer_from_the_second_pass_on(start: Any) -> None:
    job = start(layers())
    job.call = ddp = job.wrap(job.model)
    job.train(3)
    assert ddp.seen == [True, True, True], "no version has ended before the first pass"


def test_of_a_ddp_that_is_made_again_from_its_second_pass_on(start: Any) -> None:
    model = layers()
    job = start(model, DistributedDataParallel(model))
    job.train(5)
    for _ in range(4):  # the search after an iteration without a call is made each time
        job.call = ddp = job.wrap(model)
        job.train(3)
        assert ddp.seen == [False, True, True]


def test_of_the_registered_ddp_that_is_made_again(start: Any) -> None:
    model = layers()
    job = start(DistributedDataParallel(model))
    job.train(5)
    job.call = ddp = job.wrap(model)
    job.train(3)
    assert ddp.seen == [False, True, True]


def test_of_parts_that_have_ddps_of_their_own(start: Any) -> None:
    parts = nn.ModuleDict({"generator": layers(), "critic": layers()})
    job = start(parts)
    generator, critic = job.wrap(parts["generator"]), job.wrap(parts["critic"])
    job.call = lambda x: generator(x) + critic(x)
    job.train(3)
    assert generator.seen == critic.seen == [True, True, True]


def test_of_a_ddp_around_several_registered_parts(start: Any) -> None:
    one, other = layers(), layers()
    job = start(nn.ModuleList([one, other]))
    job.call = ddp = job.wrap(Parts(one, other))
    job.train(3)
    assert ddp.seen == [True, True, True]


def test_of_a_ddp_in_a_model_whose_own_forward_pass_is_not_called(start: Any) -> None:
    ddp = Waiting(layers())
    job = start(Parts(ddp), ddp)
    ddp.over, ddp.seen = job.source.post_step_done, []
    job.train(3)
    assert ddp.seen == [True, True, True], "the first pass ends no version, and shows that the model is not called"


@pytest.mark.supports("torch.compile")
@pytest.mark.parametrize("given", ["inside", "ddp", "compiled"])
def test_of_a_compiled_ddp(start: Any, given: str) -> None:
    model, over = layers(), list[bool]()
    ddp = DistributedDataParallel(model)
    compiled: Any = torch.compile(ddp, backend="eager")
    job = start({"inside": model, "ddp": ddp, "compiled": compiled}[given], compiled)
    job.train(1)  # this pass ends no version, and shows that the compiled object is called
    compiled.register_forward_pre_hook(lambda *_: over.append(job.source.post_step_done()))
    job.train(2)
    assert over == [True, True]


@pytest.mark.supports("torch.compile")
def test_of_a_compiled_module_in_a_ddp(start: Any) -> None:
    model = layers()
    job = start(model)
    job.call = ddp = job.wrap(torch.compile(model, backend="eager"))
    job.train(3)
    assert ddp.seen == [True, True, True]


@pytest.mark.parametrize("wrap", [functools.partial(torch.compile, backend="eager"), DistributedDataParallel])
def test_of_the_module_inside_that_is_evaluated_without_its_wrapper(start: Any, wrap: Any) -> None:
    """Its batches may have other shapes, for which it would be compiled again; or other ranks take no part."""
    model = layers()
    job = start(wrap(model))
    job.train(1)
    with torch.no_grad():
        model(torch.randn(6, 4))
    assert job.processor.activity == EVALUATING, "else an evaluation on one rank looks like a hang"
    assert job.source.post_step_done(), "else a save waits for what may follow the update"
    assert job.processor.activity == EVALUATING, "else an evaluation on one rank looks like a hang"


def test_of_a_ddp_around_a_model_with_a_frozen_part_of_a_usual_name(start: Any) -> None:
    model = Named(layers())
    model.module.eval()
    job = start(model)
    job.call = ddp = job.wrap(model)
    ddp.over = lambda: job.adapter._post_step._stage.name == "OVER"
    job.train(3)
    assert ddp.seen == [True, True, True]


def test_before_hooks_that_wait_as_those_of_fsdp_do(start: Any) -> None:
    model, over, jobs = layers(), list[bool](), list[Any]()
    model.register_forward_pre_hook(lambda *_: over.append(jobs[0].source.post_step_done()), prepend=True)
    jobs.append(job := start(model))
    job.train(3)
    assert over == [True, True, True]


def test_an_evaluation_of_the_module_inside_ends_no_post_step(start: Any) -> None:
    model = layers()
    job = start(model, DistributedDataParallel(model))
    job.train(1)
    model.eval()  # the mode of the wrapper does not change
    job.call(torch.randn(6, 4))
    assert job.adapter._post_step._stage.name == "ENTERED"


def test_of_a_pass_that_the_wrapper_has_noted_the_module_inside_only_passes_a_point(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, noted = layers(), list[bool]()
    job = start(model, DistributedDataParallel(model))
    job.train(2)
    monkeypatch.setattr(PostStepState, "forward_entered", lambda _self, training: noted.append(training))
    for call, marks, found in ((job.call, 2, [True]), (model, 1, [True]), (job.call, 2, [True])):
        before = job.processor.mark
        call(torch.randn(6, 4))
        assert (job.processor.mark - before, noted) == (marks, found)
        noted.clear()
    with torch.no_grad():
        job.call(torch.randn(6, 4))
    assert noted == [False, False]


class TestTheSearch:
    @pytest.fixture
    def searches(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        made: list[int] = []

        def search(_model: nn.Module) -> list[Any]:
            made.append(1)
            return []

        monkeypatch.setattr(forward_hooks, "ddps_around", search)
        return made

    def test_is_not_made_while_a_hooked_module_is_called(self, start: Any, searches: list[int]) -> None:
        model = layers()
        start(model, DistributedDataParallel(model)).train(5)
        assert searches == []

    def test_is_made_more_and_more_seldom(self, start: Any, searches: list[int]) -> None:
        model = layers()
        start(model, model.__class__.forward.__get__(model)).train(20)
        assert len(searches) == 5, "after 1, 2, 4, 8 and 16 iterations in which no hook was called"

    def test_an_error_of_it_does_not_reach_the_program(
        self, start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(forward_hooks, "instances_of", lambda _kind: [object()])  # half made on another thread
        model = layers()
        start(model, model.__class__.forward.__get__(model)).train(3)
        assert HAD_AN_ERROR in [each.getMessage() for each in caplog.records]


def test_a_wrapper_is_not_kept_alive_and_loses_the_hooks_when_the_adapter_leaves(start: Any) -> None:
    model = layers()
    hooks, calls = ForwardHooks(model), list[nn.Module]()
    old, new = DistributedDataParallel(model), DistributedDataParallel(model)
    hooks.wrapped([old])
    remove = hooks.register(lambda module, _args: calls.append(module))
    hooks.wrapped([old, new])
    new(torch.randn(6, 4))
    assert calls == [model, model], "once for the wrapper and once for the model, each time with the model"
    remove()
    new(torch.randn(6, 4))
    assert len(calls) == 2 and hooks.outside
    del old
    gc.collect()
    hooks.register(lambda *_: None)
