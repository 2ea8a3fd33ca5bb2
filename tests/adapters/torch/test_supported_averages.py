"""Averages of the weights are saved and restored with their bits; see ``test_supported``."""

from __future__ import annotations

import contextlib
import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.adapters.torch.going_on import Program, adamw, data, goes_on, net, plainly
from tests.adapters.torch.stub_processor import Loop, registered
from ttp.errors import UsageError

supports = pytest.mark.supports


@supports("EMA")
@pytest.mark.parametrize("use_buffers", [True, False])
@goes_on
def test_an_averaged_model(use_buffers: bool) -> Program:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = net(nn.BatchNorm1d(8))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
    optimizer = adamw(model)
    after = functools.partial(average.update_parameters, model)
    return Program(model, optimizer, plainly(model, optimizer, after=after), extra_state={"ema": average})


@supports("EMA")
def test_statistics_in_an_average_are_told() -> None:
    """Each rank computes them from its own batches, and a checkpoint has those of one rank."""
    from ttp.adapters.torch.local_state.extra_state import ExtraState

    plain, synced = net(nn.BatchNorm1d(8)), nn.SyncBatchNorm.convert_sync_batchnorm(net(nn.BatchNorm1d(8)))
    (note,) = ExtraState({"ema": plain}).notes()
    assert note.startswith("extra_state['ema'] holds statistics of BatchNorm (3), which differ between ranks")
    assert ExtraState({"ema": synced}).notes() == ExtraState({"ema": net()}).notes() == []
    (note,) = ExtraState({"hits": Hits()}).notes()
    assert note.startswith("extra_state['hits'] is a module without parameters. Modules count as equal on all ranks")


class Hits(nn.Module):
    """A metric."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))


class Rounded(nn.Module):
    """An average that counts its updates and draws random numbers of its own, as timm's ``ModelEmaV3`` in bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.average = copy.deepcopy(model)
        self.updates, self.generator = 0, torch.Generator()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for own, live in zip(self.average.parameters(), model.parameters(), strict=True):
            own.lerp_(live, 1 / self.updates).add_(torch.rand((), generator=self.generator), alpha=1e-3)


class Counts:
    """The object for ``extra_state`` that the message asks for."""

    def __init__(self, rounded: Rounded) -> None:
        self.rounded, self.generator = rounded, rounded.generator

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.rounded.updates, "stream": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounded.updates = state["updates"]
        self.generator.set_state(state["stream"])


@supports("EMA")
@pytest.mark.parametrize("kept", [False, True])
def test_what_an_average_keeps_beside_its_tensors_is_told_once(
    kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint has the tensors of a module only: a resumed job would begin to count, and to draw, anew."""
    model = net()
    average, optimizer = Rounded(model), adamw(model)
    extra = {"ema": average} | ({"counts": Counts(average)} if kept else {})
    Loop(tmp_path, model, optimizer, extra_state=extra).start(tmp_path / "pages")
    step = plainly(model, optimizer, after=lambda: average.update(model))
    for number in range(4):
        step(number)
    said = [text.split(" changes")[0] for text in caplog.messages if "is in no checkpoint" in text]
    assert said == ([] if kept else ["Rounded.generator, Rounded.updates"])


class Late(nn.Module):
    """An average that is made at the first update."""

    def update(self, model: nn.Module) -> None:
        if not hasattr(self, "average"):
            self.average = copy.deepcopy(model)


class Forgiving(Late):
    def load_state_dict(self, state_dict: Any, *_: Any) -> Any:
        """Take what a checkpoint has."""


class Loading(Late):
    def _load_from_state_dict(self, *_: Any) -> None:
        """Make what a checkpoint has."""


class Hooked(Late):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda *_: None)


@supports("EMA")
@pytest.mark.parametrize("kind", [Late, Forgiving, Loading, Hooked])
def test_an_average_that_is_made_late_is_refused_while_nothing_is_lost(kind: type[Late], tmp_path: Path) -> None:
    model, average = net(), kind()
    optimizer = adamw(model)
    Loop(tmp_path, model, optimizer, extra_state={"ema": average}).start(tmp_path / "pages")
    step = plainly(model, optimizer, after=lambda: average.update(model))
    step(0)
    with (
        pytest.raises(UsageError, match=r"extra_state\['ema'\].average.0.weight, .* were made after wrap_optimizer\(\)")
        if kind is Late
        else contextlib.nullcontext()
    ):
        step(1)


class OwnAverage:
    """An average of the weights, by name, that is not a module."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.shadow = model, {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.shadow[name].lerp_(parameter, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


@supports("EMA")
@goes_on
def test_an_average_that_is_no_module() -> Program:
    """It is changed after the step: step_done() says when."""
    model = net()
    average, optimizer = OwnAverage(model), adamw(model)
    program = Program(model, optimizer, lambda _number: None, extra_state={"ema": average})

    def after() -> None:
        average.update()
        program.step_done()

    program.step = plainly(model, optimizer, after=after)
    return program


class Rows:
    """A replay buffer: it changes at the top of an iteration, which a resumed run makes again."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {"rows": torch.zeros(4, 6)}

    def update(self) -> None:
        self.shadow["rows"] += 1

    state_dict, load_state_dict = OwnAverage.state_dict, OwnAverage.load_state_dict


class Returns(Rows):
    """The mean of the returns, which falls before an iteration's forward pass; as small as SAC's temperature."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {"rows": torch.zeros(1)}


def test_a_single_number_is_no_average_of_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, temperature = net(), nn.Parameter(torch.zeros(1))
    returns, optimizers = Returns(model), [adamw(model), torch.optim.Adam([temperature])]
    both = nn.ModuleDict({"model": model, "temperature": nn.ParameterList([temperature])})
    Loop(tmp_path, both, optimizers, extra_state=returns).start(tmp_path / "pages")
    for _ in range(4):
        returns.update()
        (model(data()).square().mean() + temperature.sum()).backward()
        for each in optimizers:
            each.step()
    assert not [text for text in caplog.messages if "seems to be an average" in text]


@supports("EMA")
@pytest.mark.parametrize(("kind", "done", "told"), [(OwnAverage, False, 1), (OwnAverage, True, 0), (Rows, False, 0)])
def test_an_average_that_changes_after_its_version_is_told_once(
    kind: Any, done: bool, told: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of diffusers, if the loop does not call ``step_done()``."""
    model = net()
    average, optimizer = kind(model), adamw(model)
    loop = Loop(tmp_path, model, optimizer, extra_state=average).start(tmp_path / "pages")
    average.update()  # before the first update: no version has ended
    step = plainly(model, optimizer, after=average.update)
    for number in range(4):
        step(number)
        if done:
            loop.adapter.step_done()
    said = [text for text in caplog.messages if text.startswith("extra_state")]
    assert ["a resumed run lacks the last change" in text for text in said] == [True] * told


def averaged(directory: Path, average: Any) -> Any:
    """Return a loop with a model that is sharded, and an average of its weights if there is one."""
    model = net()
    fully_shard(model)
    adamw_ = torch.optim.AdamW(model.parameters())
    return Loop(directory, model, adamw_, extra_state=average and {"ema": average}).start(directory / "pages")


@pytest.mark.usefixtures("world_of_one")
def test_a_sharded_average_comes_back_in_its_shards(tmp_path: Path) -> None:
    """Each rank reads what it holds of it, and no rank needs the memory for the whole."""
    average, other = net(), net()
    for each in (average, other):
        fully_shard(each)
    path = averaged(tmp_path, average).save(0)
    whole: Any = {name: value.to_local().clone() for name, value in average.state_dict().items()}
    again = registered(model := net(), adamw(model), extra_state={"ema": other})
    assert again.load(path, 0, 1, protected=False) == 0
    for name, value in other.named_parameters():
        assert isinstance(value, DTensor) and torch.equal(value.to_local(), whole[name]), name


@pytest.mark.usefixtures("world_of_one")
def test_an_average_that_a_program_has_only_now_begins_as_the_program_makes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, other = averaged(tmp_path, None).save(0), net()
    before = copy.deepcopy(other.state_dict())
    model = net()
    fully_shard(model)
    registered(model, adamw(model), extra_state={"ema": other}).load(path, 0, 1, protected=False)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "extra_state['ema'] is not in the checkpoint: it keeps its initial value" in warned
