"""The bracket around an update on real optimizers, and the moments at which it captures state."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from tests.adapters.torch.hooked import Job, exponential
from tests.adapters.torch.order_worker import CASES
from tests.adapters.torch.worlds import run_world
from ttp.adapters.torch.loop import hooks
from ttp.adapters.torch.loop.hooks import EVALUATING, Calls, gradient_triggers
from ttp.core.messages import Phase
from ttp.errors import UsageError

UPDATE = [(1, "again"), "begin", (1, "final"), "after", "end"]


class TestBracket:
    def test_one_update(self) -> None:
        job = Job()
        job.backward()
        assert job.taken() == [(1, "early")], "once, whatever the number of parameters"
        job.optimizer.step()
        assert job.taken() == UPDATE
        assert job.gate.version == job.fence.finished_version() == 1
        assert job.tail.done()

    def test_accumulated_gradients_are_one_version(self) -> None:
        job, marks = Job(scheduler=exponential), []
        for _ in range(3):
            job.backward()
            marks.append(job.mark)
        assert job.taken() == [(1, "early")] * 3, "each of them may be the one that is reduced"
        assert marks == [2, 4, 6], "a rank that hangs in the second of them is behind one that waits in the third"
        job.optimizer.step()
        assert job.gate.version == 1 and job.mark == 0

    def test_hooks_that_fire_twice_count_once(self) -> None:
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # patches the class, see Optimizer._patch_step_function

        class Twice(SGD):
            def step(self, closure: Any = None) -> Any:
                return super().step(closure)

        job = Job(lambda parameters: Twice(parameters, lr=0.1))
        fired: list[int] = []
        job.optimizer.register_step_pre_hook(lambda *_: fired.append(1))
        job.optimizer.step()
        assert len(fired) == 2, "otherwise this test shows nothing"
        assert job.taken() == UPDATE
        assert job.gate.version == 1

    def test_it_is_told_whether_a_step_calls_code_of_the_program(self) -> None:
        class Own(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                return super().step(closure)

        def alone(job: Job, *given: Any) -> bool:
            job.backward()
            job.optimizer.step(*given)
            return job.alone

        job = Job()
        assert alone(job)
        assert not alone(job, lambda: job.model(torch.ones(4, 3)).sum())
        handle = job.optimizer.register_step_post_hook(lambda *_: None)
        assert not alone(job)
        handle.remove()
        assert alone(job)
        assert not alone(Job(lambda parameters: Own(parameters, lr=0.1)))
        several = Job(optimizers=2)
        several.backward()
        for optimizer in several.optimizers:
            optimizer.step()
        assert several.taken()[-1] == "end" and not several.alone

    @pytest.mark.parametrize("given", [(), (None,)])  # Accelerate's optimizers hand on that there is no closure
    def test_a_step_without_gradients_before_the_loop_is_no_version(self, given: tuple[Any, ...]) -> None:
        """As loops make one, so that the first step of a scheduler does not warn. Rank 0 may have evaluated before."""
        job = Job(scheduler=exponential)
        with torch.no_grad():
            job.model(torch.ones(4, 3))
        job.optimizer.zero_grad()
        job.optimizer.step(*given)
        assert job.taken() == []
        for version in (1, 2):
            job.step()
            assert job.gate.version == version

    def test_a_rank_whose_parameters_are_all_frozen_counts_its_steps(self) -> None:
        """As the first stage of a network may be: its versions are those of the other ranks."""
        job = Job()
        job.model.requires_grad_(False)
        job.optimizer.step()
        assert job.taken() == UPDATE

    @pytest.mark.parametrize("kind", [SGD, torch.optim.Adam])
    def test_a_step_that_get_state_dict_makes_is_no_version(self, kind: Any) -> None:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        class Twice(kind):
            def step(self, closure: Any = None) -> Any:
                return super().step()

        job = Job(lambda parameters: Twice(parameters, lr=0.1))
        fired: list[int] = []
        job.optimizer.register_step_pre_hook(lambda *_: fired.append(1))
        for version in range(1, 3):
            get_optimizer_state_dict(job.model, job.optimizer)
            assert job.taken() == [], "torch makes a step without gradients to create the state of an optimizer"
            job.step()
            job.optimizer.zero_grad()
            assert job.gate.version == version
            job.taken()
        assert len(fired) > 2, "otherwise this test shows nothing"

    def test_what_comes_before_the_gate_and_what_behind_it(self) -> None:
        job = Job()
        note = job.log.append
        job.detach._calls = Calls(lambda: note("barrier"), lambda version, _: note(("copy of", version)))
        job.step()
        assert job.taken() == [(1, "early"), (1, "again"), "barrier", "begin", ("copy of", 0), (1, "final"), "end"]

    def test_a_barrier_that_fails_leaves_the_bracket_as_it_was(self) -> None:
        job = Job()

        def fail() -> None:
            raise RuntimeError("gloo: connection closed by peer")

        job.backward()
        before = job.detach._calls
        job.detach._calls = before._replace(before_gate=fail)
        with pytest.raises(RuntimeError, match="connection closed"):
            job.optimizer.step()
        assert job.gate.state().phase is Phase.IDLE
        job.detach._calls = before
        job.taken()
        job.optimizer.step()
        assert job.taken() == UPDATE

    def test_detached_nothing_is_left(self) -> None:
        job = Job(scheduler=exponential)
        job.detach()
        job.step()
        assert job.taken() == []
        assert type(job.scheduler) is torch.optim.lr_scheduler.ExponentialLR
        assert not job.model._forward_pre_hooks

    def test_what_follows_the_schedule_may_fail(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        job = Job()

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("mine")

        for name in ("at_gate", "update_finished"):
            monkeypatch.setattr(job.tail, name, fail)
        for _ in range(3):
            job.step()
        assert job.gate.version == 3
        assert [record.levelno for record in caplog.records] == [logging.WARNING]


class TestForward:
    def test_an_evaluation_does_not_end_it(self) -> None:
        job = Job(scheduler=exponential)
        job.step()
        with torch.no_grad():
            job.model(torch.ones(4, 3))
        job.model.eval()(torch.ones(4, 3))
        job.scheduler.step()
        assert job.scheduler_state(1)["last_epoch"] == 1
        job.model.train()(torch.ones(4, 3))
        job.scheduler.step()
        assert job.scheduler_state(1)["last_epoch"] == 1

    @pytest.mark.parametrize("container", [False, True])
    def test_it_settles_the_tail_and_of_a_container_the_parts_are_called(self, container: bool) -> None:
        job = Job(averages=True)
        part = job.model
        if container:
            job.detach()
            job.model = nn.ModuleDict({"it": part})
            job.connect()
        part(torch.ones(4, 3)).sum().backward()
        job.optimizer.step()
        assert not job.tail.done()
        with torch.no_grad():
            part(torch.ones(4, 3))
        assert job.activity == EVALUATING
        part(torch.ones(4, 3))
        assert job.tail.done() and job.mark == 1 and job.activity == ""

    @pytest.mark.supports("scripted modules")
    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_the_module_can_be_traced_and_exported_in_training(self) -> None:
        job, data = Job(), torch.ones(4, 3)
        for number in range(2):
            job.step()
            expected = job.model.eval()(data)
            assert torch.equal(torch.jit.trace(job.model, data)(data), expected)
            assert torch.allclose(torch.export.export(job.model, (data,)).module()(data), expected)
            job.model.train()
            assert job.gate.version == number + 1


class TestMarks:
    def test_every_point_of_a_step_is_one_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        job, at_gate = Job(scheduler=exponential), list[int]()
        begin = job.begin_update

        def at_the_gate(again: bool) -> None:
            at_gate.append(job.mark)
            begin(again)

        monkeypatch.setattr(job, "begin_update", at_the_gate)
        for _ in range(2):
            loss = job.model(torch.ones(4, 3)).sum()
            assert job.mark == 1
            loss.backward()
            assert job.mark == 2
            job.optimizer.step()
            assert job.mark == 0 and at_gate.pop() == 3

    def test_an_evaluation_is_said_and_is_no_point(self) -> None:
        job = Job(scheduler=exponential)
        job.step()
        with torch.no_grad():
            job.model(torch.ones(4, 3))
            assert job.activity == EVALUATING and job.mark == 0
            job.model(torch.ones(4, 3))
        job.scheduler.step()
        assert job.activity == EVALUATING, "what follows may be more of it"
        job.model(torch.ones(4, 3))
        assert job.activity == "" and job.mark == 1
        loss = job.model(torch.ones(4, 3)).sum()
        with torch.no_grad():
            job.model(torch.ones(4, 3))
        assert job.activity == EVALUATING
        loss.backward()
        assert job.activity == "", "a backward pass ends it too"

    @pytest.mark.parametrize("mine", ["generation", ""])
    def test_what_the_user_says_stays(self, mine: str) -> None:
        job = Job(scheduler=exponential)
        job.activity = mine
        with torch.no_grad():
            job.model(torch.ones(4, 3))
        job.activity = mine
        job.backward()
        assert job.activity == mine
        job.activity = "generation"
        job.backward()
        assert job.activity == "generation"

    def test_a_model_that_is_being_compiled_is_not_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        job = Job(scheduler=exponential)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        monkeypatch.setattr(hooks, "_is_compiling", lambda: True)
        job.backward()
        assert job.mark == 1, "the backward pass alone"

    @pytest.mark.slow
    @pytest.mark.filterwarnings("default")
    def test_a_compiled_model_is_compiled_once(self) -> None:
        dynamo: Any = pytest.importorskip("torch._dynamo")
        job = Job(scheduler=exponential)
        compiled = torch.compile(job.model, backend="eager")
        before = dynamo.utils.counters["stats"]["unique_graphs"]  # of tests in this process
        for _ in range(5):
            compiled(torch.ones(4, 3)).sum().backward()
            job.optimizer.step()
            job.scheduler.step()
        assert dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


class TestByHand:
    def test_the_first_call_completes_a_version_and_the_others_end_theirs(self) -> None:
        job = Job(scheduler=exponential)
        job.step()
        job.scheduler.step()
        job.taken()
        job.detach.step_done()
        assert job.taken() == [(1, "final")]
        assert job.tail.done() and job.gate.version == 1
        job.step()
        job.scheduler.step()
        assert job.taken() == [(2, "early"), (2, "again"), "begin"]
        assert job.gate.state().phase is Phase.UPDATING
        job.detach.step_done()
        assert job.taken() == [(2, "final"), "after", "end"]
        assert job.scheduler_state(2)["last_epoch"] == 2 and job.tail.done()
        job.detach.step_done()
        assert job.taken() == [] and job.gate.version == 2, "without an update nothing ends"

    def test_not_inside_a_step(self) -> None:
        class Inside(SGD):
            def step(self, closure: Any = None) -> Any:
                job.detach.step_done()

        job = Job(lambda parameters: Inside(parameters, lr=0.1))
        with pytest.raises(UsageError, match="end of the iteration"):
            job.optimizer.step()


class TestTriggers:
    def test_every_parameter_outside_of_ddp(self) -> None:
        model = nn.Linear(2, 2)
        model.bias.requires_grad_(False)
        model.number = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
        assert gradient_triggers(model, []) == [model.weight, model.bias]

    def test_one_that_is_frozen_at_first_is_heard_when_it_is_trained(self) -> None:
        job = Job()
        job.detach()
        job.model.requires_grad_(False)
        job.connect()
        assert not any(parameter.requires_grad for parameter in job.model.parameters())
        job.model[2].requires_grad_(True)
        job.backward()
        assert job.taken() == [(1, "early")]

    def test_an_unused_parameter_does_not_matter(self) -> None:
        job = Job()
        job.model[2](torch.ones(4, 3)).sum().backward()
        assert job.taken() == [(1, "early")]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what two ranks saw, by case: rank 0 sleeps in its captures, rank 1 measures whether that delays it."""
    return run_world(tmp_path_factory.mktemp("order"), "tests.adapters.torch.order_worker", "everything", size=2)


@pytest.mark.xdist_group("captures")  # they share one run
@pytest.mark.parametrize("case", CASES)
def test_the_capture_comes_before_the_reduction_and_ranks_pass_the_same_points(
    seen: list[dict[str, Any]], case: str
) -> None:
    holder, other = (rank[case] for rank in seen)
    assert holder["held"] == [1, 2, 3], "one capture before each update, of its version"
    assert other["early"] == 0, "the other rank had a reduced gradient although the first had not captured yet"
    points = 3  # the forward pass of the DistributedDataParallel, that of the module inside, the backward pass
    assert holder["marks"] == other["marks"] == [2 * points if case in ("accumulate", "nosync") else points] * 3
