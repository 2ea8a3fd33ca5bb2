"""Updates that no rank could save are refused before they write."""

from __future__ import annotations

import gc
import sys
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import ttp
from tests.adapters.torch.hooked import Job
from tests.adapters.torch.stub_processor import StubProcessor, join, leave, registered
from ttp.adapters.torch.loop import hooks, misuse
from ttp.core.layout import Layout
from ttp.core.messages import Phase
from ttp.errors import ConfigError, UsageError

SGD: Any = torch.optim.SGD


@pytest.mark.supports("optimizer in backward")
class TestInBackward:
    @pytest.mark.filterwarnings("default")  # torch warns of itself when this is imported
    def test_known_at_start(self) -> None:
        in_backward: Any = pytest.importorskip("torch.distributed.optim")
        model = nn.Linear(2, 2)
        in_backward._apply_optimizer_in_backward(SGD, [model.bias], {"lr": 0.1})
        with pytest.raises(UsageError, match=r"optimizer of bias steps in the backward pass .* after backward\(\)"):
            misuse.refuse_in_backward(model)

    @pytest.mark.parametrize("each_its_own", [False, True])
    def test_of_a_registered_optimizer_or_one_for_each_parameter(self, each_its_own: bool) -> None:
        """The latter as in torch's tutorial. It cannot be seen before the first gradient exists."""
        job = Job()
        for parameter in job.model.parameters():
            optimizer = SGD([parameter], lr=0.1) if each_its_own else job.optimizer
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        before = job.model[0].weight.clone()
        with pytest.raises(UsageError, match=r"SGD.step\(\) was called by a hook in the backward pass"):
            job.backward()
        assert torch.equal(job.model[0].weight, before) and job.gate.state().phase is Phase.IDLE


@pytest.mark.supports("an optimizer that was not given")
class TestStrangers:
    def test_an_optimizer_of_the_model_that_is_not_registered(self) -> None:
        job = Job()
        other = SGD(job.model[0].parameters(), lr=0.1)
        before = job.model[0].weight.clone()
        job.backward()
        with pytest.raises(UsageError, match=r"not given to wrap_optimizer.*Give wrap_optimizer\(\) all optimizers"):
            other.step()
        assert torch.equal(job.model[0].weight, before)

    def test_of_another_model_it_is_nobodys_business(self) -> None:
        job = Job()
        other = nn.Linear(2, 2)
        optimizer = SGD(other.parameters(), lr=0.1)
        for _ in range(2):
            other(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert job.taken() == []

    def test_one_that_passes_calls_on(self) -> None:
        class Container(SGD):
            def step(self, closure: Any = None) -> Any:
                return self.inner[0].step()

        job = Job()
        container = Container(job.model.parameters(), lr=0.1)
        container.inner = [job.optimizer]
        job.backward()
        container.step()
        assert job.gate.version == 1

    def test_one_that_a_registered_one_calls(self) -> None:
        class Outer(SGD):
            def step(self, closure: Any = None) -> Any:
                return inner.step()

        job = Job(lambda parameters: Outer(parameters, lr=0.1))
        inner = SGD(job.model.parameters(), lr=0.1)
        job.optimizer.step()
        assert job.gate.version == 1

    def test_detached_nobody_is_looked_at(self) -> None:
        job = Job()
        job.detach()
        SGD(job.model.parameters(), lr=0.1).step()

    def test_a_job_that_is_gone_is_not_kept(self) -> None:
        """The hook is for all optimizers of the process."""
        model = nn.Linear(2, 2)
        strangers = misuse.Strangers([SGD(model.parameters(), lr=0.1)], model, lambda: False)
        kept = weakref.ref(strangers)
        del strangers
        gc.collect()
        assert kept() is None
        SGD(model.parameters(), lr=0.1).step()


@pytest.mark.supports("CUDA graphs (whole step)")
class TestGraphs:
    def test_a_step_that_is_captured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        job = Job()
        job.backward()
        job.taken()
        monkeypatch.setattr(misuse, "capturing", lambda: True)
        with pytest.raises(UsageError, match=r"captured in a CUDA graph.*make_graphed_callables"):
            job.optimizer.step()
        assert job.taken() == [] and job.gate.state().phase is Phase.IDLE

    def test_a_backward_pass_that_is_captured_is_noted_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """``LocalCapture`` queues nothing then, and trusts torch's counters of writes no longer."""
        job = Job()
        monkeypatch.setattr(hooks, "capturing", lambda: True)
        job.backward()
        assert job.taken() == [(1, "early")] and job.mark == 1, "the mark is that of the forward pass"

    def test_torch_is_asked_where_it_uses_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not misuse.capturing()
        monkeypatch.setattr(misuse, "_CUDA_BUILT", True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert misuse.capturing()


class TestGradientsWithoutABackwardPass:
    @pytest.fixture(autouse=True)
    def several_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        facts = {"is_available": True, "is_initialized": True, "get_world_size": 2, "get_rank": 0}
        for name, fact in facts.items():
            monkeypatch.setattr(torch.distributed, name, lambda fact=fact: fact)

    def test_they_are_told_once(self, caplog: pytest.LogCaptureFixture) -> None:
        job = Job()
        for _ in range(2):
            for parameter in job.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            job.optimizer.step()
        assert caplog.text.count("no backward pass of autograd has made") == 1

    def test_those_that_the_loop_hands_to_the_step_are_told_too(self, caplog: pytest.LogCaptureFixture) -> None:
        job = Job(lambda parameters: Functional(parameters, 0.1))
        for _ in range(2):
            job.optimizer.step([torch.ones_like(parameter) for parameter in job.model.parameters()])
        assert caplog.text.count("no backward pass of autograd has made") == 1

    @pytest.mark.parametrize("first", ["a backward pass", "a closure", "LBFGS", "no gradient"])
    def test_others_are_not(self, caplog: pytest.LogCaptureFixture, first: str) -> None:
        job = Job(
            lambda parameters: torch.optim.LBFGS(parameters, lr=0.1) if first == "LBFGS" else SGD(parameters, 0.1)
        )

        def closure() -> float:
            job.optimizer.zero_grad()
            job.backward()
            return 1.0

        if first == "a backward pass":
            job.backward()
        job.optimizer.step(closure if first in ("a closure", "LBFGS") else None)
        job.backward()
        job.optimizer.step(closure if first == "LBFGS" else None)
        assert "backward pass of autograd" not in caplog.text


class Functional(SGD):
    """Takes its gradients as an argument, as a loop of torch.func hands them over."""

    @torch.no_grad()
    def step(self, gradients: Any) -> None:
        for parameter, gradient in zip(self.param_groups[0]["params"], gradients, strict=True):
            parameter.sub_(gradient, alpha=0.1)


class Madgrads(SGD):
    """Makes its state at once, like MADGRAD and SPAM: a sum, the first weights, and a mask."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"sum": torch.zeros_like(p), "x0": p.detach().clone(), "mask": torch.ones(2) > 0}

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] += p.grad
        return super().step(closure)


@pytest.mark.supports("checkpoints of the program's own")
class TestStateOfEarlierUpdates:
    @pytest.mark.parametrize(
        "kind",
        [
            torch.optim.Adam,
            partial(torch.optim.SGD, momentum=0.9),  # counts no updates
            partial(torch.optim.Adagrad, initial_accumulator_value=0.1),  # makes its state at once
            Madgrads,
        ],
    )
    @pytest.mark.parametrize("earlier", [True, False])
    @pytest.mark.parametrize("asked", [True, False])
    def test_versions_are_counted_from_it_and_the_log_says_so(
        self, kind: Any, earlier: bool, asked: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = nn.Linear(3, 2)
        other = kind(model.parameters(), lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        other.step()
        optimizer = kind(model.parameters(), lr=0.1)
        if earlier:
            optimizer.load_state_dict(other.state_dict())
        adapter = registered(model, optimizer)
        adapter.layout(1)
        processor: Any = StubProcessor(tmp_path)
        adapter.attach(processor)
        optimizer.zero_grad()
        if asked and not optimizer.state:
            get_optimizer_state_dict(model, optimizer)  # for a checkpoint of the program's own; makes the state
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        said = [each for each in caplog.messages if "holds the state of earlier updates" in each]
        assert len(said) == earlier


@pytest.mark.supports("gradients reduced by hand")
class TestStepsThatWaitForOtherRanks:
    """Horovod's optimizer waits for the gradients in its step, before it writes."""

    class Horovods(SGD):
        def skip_synchronize(self) -> None:
            raise AssertionError("only looked for")

    @pytest.mark.parametrize("undo", [None, "preimage"])
    def test_they_are_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture, undo: str | None) -> None:
        model = nn.Linear(2, 2)
        adapter = registered(model, self.Horovods(model.parameters()), undo=undo)
        processor = StubProcessor(tmp_path, layout=Layout.data_parallel(2))
        join(adapter, processor, tmp_path / "pages")
        leave(adapter)
        assert ("Horovods.step() waits for the gradients of other ranks" in caplog.text) is (undo is None)


@pytest.mark.parametrize(
    ("sizes", "layout_given"), [((2, 1, 1), False), ((1, 1, 2), False), ((1, 1, 1), False), ((2, 1, 1), True)]
)
def test_a_plain_optimizer_of_a_model_that_megatron_shards_is_refused(
    sizes: tuple[int, int, int], layout_given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure in the first updates, all ranks would get the parts of one of them."""

    class Wrapped(nn.Module):  # as Megatron's DistributedDataParallel
        __module__ = "megatron.core.distributed"

        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)
            vars(self)["buffers"] = []  # as Megatron does

    tensor, pipeline, expert = sizes
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_world_size=lambda: tensor,
        get_pipeline_model_parallel_world_size=lambda: pipeline,
        get_expert_model_parallel_world_size=lambda: expert,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", cast("Any", state))
    model = Wrapped()
    if max(sizes) == 1 or layout_given:
        assert misuse.outside_megatron(model, layout_given=layout_given) is model.module
        return
    with pytest.raises(ConfigError, match="get_megatron_optimizer"):
        ttp.wrap_optimizer(SGD(model.parameters(), 0.1), model=model)
