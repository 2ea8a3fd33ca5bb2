"""Finds the DistributedDataParallel that reduces the gradients of a model, inside, around or outside of it."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.adapters.torch.going_on import Program, assert_goes_on_with_its_bits, plainly
from tests.adapters.torch.stub_processor import registered
from ttp.adapters.torch.loop.hooks import gradient_triggers
from ttp.adapters.torch.saving.job_state import JobState
from ttp.adapters.torch.sharding import data_parallel
from ttp.adapters.torch.sharding.data_parallel import (
    LayoutWatch,
    apply_layouts,
    ddps_of,
    hook_refusal,
    not_replicated,
)
from ttp.adapters.torch.sharding.ddp_buckets import apply_bucket_layout, renew_reducer
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.adapters.versions import numbers
from ttp.errors import ConfigError

pytestmark = pytest.mark.usefixtures("world_of_one")

Ddp: Any = DistributedDataParallel


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


@pytest.mark.supports("the module inside DDP as model=")
class TestWhereItIsFound:
    def test_itself_and_inside_and_around_the_module_given(self) -> None:
        model = layers()
        ddp = Ddp(model)
        outside = nn.ModuleDict({"main": ddp, "loss": nn.Linear(1, 1)})
        assert ddps_of(ddp) == ddps_of(model) == ddps_of(outside) == [ddp]
        assert ddps_of(layers()) == [], "not that of another model"

    def test_around_parts_of_it_and_around_what_is_around_it(self) -> None:
        generator, critic = layers(), layers()
        both = nn.ModuleDict({"generator": generator, "critic": critic})
        one, other = Ddp(nn.Sequential(critic, nn.ReLU())), Ddp(generator)
        assert ddps_of(both) == [other, one], "in the order of the model"
        assert ddps_of(critic) == [one]

    def test_not_one_that_is_garbage(self) -> None:
        model = layers()
        gc.disable()
        try:
            first: Any = Ddp(model)
            first.cycle = first
            del first
            second = Ddp(model)
            assert ddps_of(model) == [second]
        finally:
            gc.enable()

    def test_without_a_process_group_nothing_is_searched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: False)
        monkeypatch.setattr(gc, "get_objects", lambda: pytest.fail("searched"))
        assert ddps_of(layers()) == []


def test_one_hook_is_enough_for_the_backward_pass_of_a_ddp_around_the_module() -> None:
    model = layers()
    ddp = Ddp(model)
    assert gradient_triggers(model, ddps_of(model)) == [model[0].weight]
    assert gradient_triggers(ddp, ddps_of(ddp)) == [model[0].weight]


class TestLayouts:
    """Bucket layouts, which torch does not show here because the world has one rank."""

    @pytest.fixture
    def shown(self, monkeypatch: pytest.MonkeyPatch) -> dict[Any, str]:
        """Return a function that gives the layout of a DDP as if its buckets had been rebuilt."""
        found: dict[Any, str] = {}

        class Watch:
            def __init__(self, ddp: Any) -> None:
                self.layout = self.previous = found.get(ddp)

        monkeypatch.setattr(data_parallel, "BucketWatch", Watch)
        monkeypatch.setattr(data_parallel, "missing_layout", lambda _ddp: "no layout")
        monkeypatch.setattr(data_parallel, "apply_bucket_layout", lambda ddp, layout: found.update({ddp: layout}))
        return found

    def test_of_one_it_is_what_it_always_was(self, shown: dict[Any, str]) -> None:
        model = layers()
        ddp = Ddp(model)
        names = ModelNames(model, None)
        shown[ddp] = "1 0"
        saved = LayoutWatch([ddp], names).layout
        assert saved == "1 0"
        shown.clear()
        assert apply_layouts([ddp], names, saved) == [] and shown == {ddp: "1 0"}

    def test_of_several_by_name(self, shown: dict[Any, str]) -> None:
        model = nn.ModuleDict({"generator": Ddp(layers()), "critic": Ddp(layers())})
        names, ddps = ModelNames(model, None), ddps_of(model)
        assert LayoutWatch(ddps, names).layout is None
        shown[ddps[1]] = "1 0"
        saved = LayoutWatch(ddps, names).layout
        assert saved == {"critic.0.weight": "1 0"}
        saved = JobState.decode(JobState(3, ddp_buckets=saved).encode()).ddp_buckets
        shown.clear()
        assert apply_layouts(ddps, names, "1 0") == ["no layout"] * 2 and shown == {}, "a layout of one DDP"
        assert apply_layouts(ddps, names, saved) == ["no layout"], "the generator's was not known"
        assert shown == {ddps[1]: "1 0"}

    def test_one_made_late_is_noticed_and_said(self, shown: dict[Any, str], caplog: pytest.LogCaptureFixture) -> None:
        model = layers()
        names = ModelNames(model, None)
        fresh, resumed = LayoutWatch([], names), LayoutWatch([], names)
        ddp = Ddp(model)
        shown[ddp] = "1 0"
        with caplog.at_level(logging.WARNING):
            assert fresh.look_again(model, resumed=False) == []
            assert not caplog.messages, "there was no layout to be kept"
            assert resumed.look_again(model, resumed=True) == []
        assert "made after ttp.restore()" in caplog.text
        assert fresh.layout == resumed.layout == "1 0"

    def test_one_made_late_may_leave_nothing_alone(self, shown: dict[Any, str]) -> None:
        model = layers()
        watch = LayoutWatch([], ModelNames(model, None))
        Ddp._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
        ddp = Ddp(model)
        (problem,) = watch.look_again(model, resumed=False)
        assert "that ignores 1.weight was made after wrap_optimizer()" in problem and ddp is not None


JOIN = "join() lets ranks make different numbers of updates"


class Feedback:
    """The example of docs/support.md."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        names = "error_dict", "p_memory_dict", "q_memory_dict", "iter"
        return {name: getattr(self.state, name) for name in names} | {"rng": self.state.rng.get_state(legacy=False)}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self.state.rng.set_state(kept.pop("rng"))
        for name, value in kept.items():
            setattr(self.state, name, value)


class TestHooksWithState:
    @pytest.mark.supports("PowerSGD")
    @pytest.mark.parametrize("feedback", [True, False])
    def test_error_feedback_is_said_to_be_lost(self, feedback: bool, caplog: pytest.LogCaptureFixture) -> None:
        """Compression without it keeps no state."""
        ddp = Ddp(layers())
        ddp.register_comm_hook(*((PowerSGDState(None), powerSGD_hook) if feedback else (None, fp16_compress_hook)))
        LayoutWatch([ddp], ModelNames(ddp, None)).close()
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warned) == feedback
        assert all("powerSGD_hook keeps state of its own (PowerSGDState" in text for text in warned)
        assert hook_refusal([ddp]) == ""

    @pytest.mark.supports("PowerSGD")
    def test_error_feedback_as_extra_state_comes_back(self, tmp_path: Path) -> None:
        states: list[Any] = []

        def make() -> Program:
            state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
            model = Ddp(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
            model.register_comm_hook(state, powerSGD_hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            states.append(state)
            return Program(model, optimizer, plainly(model, optimizer), extra_state={"feedback": Feedback(state)})

        assert_goes_on_with_its_bits(tmp_path, make)
        assert any(float(error.abs().max()) for error in states[1].error_dict.values()), "else this shows nothing"

    @pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
    def test_those_in_torch_itself_go_on_with_a_restored_layout(self, kind: str) -> None:
        library: Any = dist
        hook = getattr(library.BuiltinCommHookType, kind)
        ddp = Ddp(layers())
        ddp._register_builtin_comm_hook(hook)
        before = ddp.reducer
        assert apply_bucket_layout(ddp, "2 3, 1 0") is None
        assert ddp.reducer is not before and ddp._get_ddp_logging_data()["comm_hook"] == str(hook)
        for _ in range(3):
            ddp(torch.ones(1, 4)).sum().backward()

    @pytest.mark.supports("post-local SGD")
    def test_weights_that_differ_between_averagings_are_refused(self) -> None:
        """At the start, and not at the save, when it would be too late."""
        ddp = Ddp(layers())
        state: Any = PostLocalSGDState
        ddp.register_comm_hook(state(None, None, 10), post_localSGD_hook)
        with pytest.raises(ConfigError, match="post_localSGD_hook lets the weights of ranks differ"):
            registered(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)).layout(1)

    @pytest.mark.filterwarnings("default")  # torch warns of itself when this is imported
    @pytest.mark.supports("optimizer in backward")
    def test_a_hook_that_updates_the_weights_is_refused(self) -> None:
        ddp = Ddp(layers())
        ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
        with pytest.raises(ConfigError, match="a communication hook updates the weights in the backward pass"):
            registered(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)).layout(1)

    @pytest.mark.supports("uneven inputs (join)")
    @pytest.mark.parametrize("together", [True, False])
    def test_ranks_that_make_different_numbers_of_updates_are_refused(self, together: bool) -> None:
        ddp = Ddp(layers())
        watch = LayoutWatch([ddp], ModelNames(ddp, None))
        with ddp.join(throw_on_early_termination=together):
            found = watch.look_again(ddp, resumed=False)
        assert [text.partition(",")[0] for text in found] == [JOIN] * (not together)


class TestFrozen:
    def test_before_it_was_made(self) -> None:
        """The new reducer would wait for gradients that never come: torch ends the second step with an error."""
        model = layers()
        model[0].requires_grad_(False)
        ddp = Ddp(model)
        assert "is not for the 2 parameters of this" in str(apply_bucket_layout(ddp, "2 3, 1 0"))
        for _ in range(3):
            ddp(torch.ones(1, 4)).sum().backward()

    @pytest.mark.parametrize("layer", [0, 1])
    def test_by_the_turn_of_a_gan_in_which_its_ranks_go_on(self, layer: int) -> None:
        model = layers()
        ddp = Ddp(model)
        model[layer].requires_grad_(False)
        renew_reducer(ddp)
        assert ddp._get_ddp_logging_data()["num_parameter_tensors"] == 4, "else those of this layer are not reduced"
        assert [parameter.requires_grad for parameter in model[layer].parameters()] == [False, False]


class TestLeftAlone:
    def test_what_it_was_told_to_ignore_but_not_what_another_one_reduces(self) -> None:
        model = layers()
        inner = Ddp(model[1])
        Ddp._set_params_and_buffers_to_ignore_for_model(model, ["1.weight", "1.bias"])
        outer = Ddp(model)
        assert not_replicated([outer]) == [*model[1].parameters()]
        assert not_replicated([outer, inner]) == []

    def test_not_what_is_reduced_later(self) -> None:
        model = layers()
        late = [("1.weight", model[1].weight)]
        ddp = Ddp(model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=model[0].weight)
        assert not_replicated([ddp]) == []


class TestTrialPassesOfAPipeline:
    """A PipelineStage that has to learn its shapes runs its module once more than the program, in each launch."""

    @staticmethod
    def said(module: nn.Module, caplog: pytest.LogCaptureFixture, **shapes: Any) -> list[str]:
        """Make one step of a pipeline of one stage, and return what is said about it at the first update."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B
        from torch.distributed.pipelining import stage as library

        if not hasattr(library, "InferenceMode"):  # an older torch: ttp says nothing there
            pytest.skip("stages of this torch do not tell whether they make a trial pass")
        stage = PipelineStage(module, 0, 1, torch.device("cpu"), **shapes)
        Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss).step(torch.ones(4, 4), target=torch.ones(4, 2))
        watch = LayoutWatch(ddps_of(module), ModelNames(module, None))
        with caplog.at_level(logging.WARNING, logger="ttp"):
            assert watch.look_again(module, resumed=False) == []
        watch.close()
        return [record.getMessage() for record in caplog.records if record.name.startswith("ttp")]

    @staticmethod
    def known() -> dict[str, Any]:
        return {"input_args": torch.ones(2, 4, requires_grad=True), "output_args": torch.ones(2, 2, requires_grad=True)}

    def test_the_first_microbatch_is_reduced_on_its_own(self, caplog: pytest.LogCaptureFixture) -> None:
        said = self.said(Ddp(layers()), caplog)
        assert len(said) == 1
        assert "pipeline stage 0 made a trial pass" in said[0]
        assert "reduces gradients of the first microbatch" in said[0]

    def test_statistics_count_it(self, caplog: pytest.LogCaptureFixture) -> None:
        """Before torch 2.15, which restores them after the trial pass."""
        model = layers().append(nn.BatchNorm1d(2))
        told = "it changes the running statistics" in "".join(self.said(model, caplog))
        assert model[2].num_batches_tracked == (3 if told else 2)
        assert told == (numbers(torch.__version__) < (2, 15))

    def test_a_stage_that_knows_its_shapes_makes_none(self, caplog: pytest.LogCaptureFixture) -> None:
        model = layers().append(nn.BatchNorm1d(2))
        assert self.said(Ddp(model), caplog, **self.known()) == []
        assert model[2].num_batches_tracked == 2

    def test_one_that_leaves_nothing_behind_is_not_told(self, caplog: pytest.LogCaptureFixture) -> None:
        assert self.said(layers(), caplog) == []
