"""The names of entries in a checkpoint are those of stock torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from tests.adapters.torch.checkpoints import Counting
from tests.adapters.torch.stub_processor import registered
from ttp.adapters.torch.loop.hook import Hook
from ttp.adapters.torch.saving.flatten_state import leaves
from ttp.adapters.torch.saving.state import model_state, optimizer_state
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.errors import CheckpointError, ConfigError


class Tied(nn.Module):
    """A model with tied weights, a frozen layer, a saved buffer, an unsaved buffer, and a buffer that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.body[0].bias.requires_grad_(False)
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(self.embed(x)))
        return result


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        model(torch.arange(5) % 6 + 0 * step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapped(kind: str, model: Any) -> Any:
    if kind == "compiled":
        return torch.compile(model, backend="eager")
    if kind == "activation checkpointing":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model.body[0] = checkpoint_wrapper(model.body[0])
    return model


@pytest.mark.parametrize("kind", ["plain", "compiled", "activation checkpointing"])
def test_names_and_tensors_are_those_of_stock_torch(kind: str) -> None:
    model = wrapped(kind, Tied())
    optimizer = torch.optim.AdamW(model.parameters())
    if kind != "compiled":  # the compiler takes seconds
        trained(model, optimizer)
    names = ModelNames(model, optimizer)
    stock: Any = get_model_state_dict(model)
    ours = model_state(names, {})
    assert ours.keys() == stock.keys()
    assert all(ours[key].data_ptr() == stock[key].data_ptr() for key in ours)
    stock = get_optimizer_state_dict(model, optimizer)
    ours = optimizer_state(names, optimizer)
    assert {path for path, _, _ in leaves(ours)} == {path for path, _, _ in leaves(stock)}
    assert ours["param_groups"] == stock["param_groups"]
    assert "body.0.bias" not in ours["state"]


def test_data_parallel_prefixes_vanish_wherever_the_wrapper_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    monkeypatch.setattr("ttp.adapters.torch.sharding.names.DistributedDataParallel", Wrapper)
    model = nn.ModuleDict({"a": Wrapper(nn.Linear(2, 2)), "b": nn.Linear(2, 2)})
    names = ModelNames(model, torch.optim.SGD(model.parameters()))
    assert list(names.parameters) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert names.canonical("a.module.weight") == "a.weight"


def test_a_parameter_that_the_model_lacks_is_a_config_error() -> None:
    model, loss = nn.Linear(2, 2), nn.Linear(3, 5)
    with pytest.raises(ConfigError, match=r"2 parameters .*group 1, position 0, shape \(5, 3\).*ModuleDict"):
        ModelNames(model, torch.optim.SGD([{"params": model.parameters()}, {"params": loss.parameters()}]))


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("lazy", [nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)])
def test_a_layer_without_a_shape_is_a_config_error(lazy: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(2, 2), lazy)
    with pytest.raises(ConfigError, match=r"1\.\w+ has no shape yet.*call the model once with a batch"):
        registered(model, torch.optim.SGD(model.parameters()))


def test_a_layer_added_after_registration_is_found_at_save_time() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    names = ModelNames(model, optimizer)
    model.append(nn.Linear(2, 1))
    optimizer.add_param_group({"params": list(model[1].parameters())})
    assert optimizer_state(names, optimizer)["param_groups"][1]["params"] == ["1.weight", "1.bias"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
    with pytest.raises(CheckpointError, match=r"\(7,\)"):
        optimizer_state(names, optimizer)


def test_captured_buffers_win_and_only_what_belongs_is_stored() -> None:
    tied = Tied()
    model = nn.Sequential(tied, Counting(2, 2))
    names = ModelNames(model, torch.optim.SGD(model.parameters()))
    captured = torch.full((4,), 9.0)
    state = model_state(names, {"0.body.1.running_mean": captured, "0.cache": captured, "0.head.weight": captured})
    assert state["0.body.1.running_mean"] is captured
    assert state["0.head.weight"] is tied.embed.weight
    assert "0.cache" not in state and "0.nothing" not in state
    assert state["1._extra_state"] == {"steps": 3}
    assert model_state(names, {"1._extra_state": 5})["1._extra_state"] == 5
    tied.mask = torch.zeros(3)
    assert model_state(names, {})["0.mask"] is tied.mask, "as it is now"


@pytest.mark.supports("scripted modules")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torch_says_how_to_script_a_module_that_is_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_forward_pre_hook(Hook(print))
    with pytest.raises(AttributeError, match="Make a new module, load the weights of this one into it"):
        torch.jit.script(model)


@pytest.mark.supports("scripted modules")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("inside", [True, False])
def test_a_scripted_module_is_refused(inside: bool) -> None:
    scripted: Any = torch.jit.script(nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), scripted) if inside else scripted
    with pytest.raises(
        ConfigError, match=("1" if inside else "the model") + r" is made by torch\.jit\.script\(\) or torch"
    ):
        ModelNames(model, None)


def test_a_tensor_that_is_no_parameter_and_how_to_make_it_one() -> None:
    """As the entropy coefficient of SAC."""
    model, log_alpha = nn.Linear(2, 2), torch.zeros(1, requires_grad=True)

    def given(coefficient: Tensor, **parts: Any) -> Any:
        optimizers = torch.optim.Adam(model.parameters()), torch.optim.Adam([coefficient])
        return registered(nn.ModuleDict({"model": model, **parts}), optimizers)

    with pytest.raises(ConfigError, match=r"alpha = nn\.Parameter\(\.\.\.\).*nn\.ParameterList\(\[alpha\]\)"):
        given(log_alpha)
    parameter = nn.Parameter(log_alpha.detach())
    assert given(parameter, alpha=nn.ParameterList([parameter])).layout(1)
