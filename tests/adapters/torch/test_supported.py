"""The features of training programs one by one: saved, restored into a program with another state, and trained on.

Weights, moments, settings, schedules, random streams and losses end with the bits of the program that was never
stopped. In one process, without a controller. docs/support.md names these tests.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from tests.adapters.torch.going_on import (
    UPDATES,
    Program,
    adamw,
    assert_goes_on_with_its_bits,
    data,
    goes_on,
    in_mid_run,
    net,
    plainly,
    program_of,
)
from tests.adapters.torch.stub_processor import save
from tests.making import making
from ttp.testing.digests import digest

supports = pytest.mark.supports


@supports("gradient accumulation and no_sync")
@goes_on
def test_accumulated_gradients() -> Program:
    model = net()
    optimizer = adamw(model)

    def step(_number: int) -> Any:
        for _ in range(3):
            loss = model(data()).square().mean() / 3
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Program(model, optimizer, step)


@supports("gradient clipping")
@pytest.mark.parametrize("foreach", [True, False])
@goes_on
def test_clipping(foreach: bool) -> Program:
    model = net()
    optimizer = adamw(model, foreach=foreach)
    clip = functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()), 0.1, foreach=foreach)
    return Program(model, optimizer, plainly(model, optimizer, clip))


@supports("AMP and GradScaler")
@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
@goes_on
def test_a_gradient_scaler(kind: dict[str, Any]) -> Program:
    model = net()
    optimizer = adamw(model, **kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def step(_number: int) -> Any:
        optimizer.zero_grad()
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            loss = model(data()).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Program(model, optimizer, step, scaler=scaler)


@supports("bf16 with own master weights")
@goes_on
def test_own_master_weights() -> Program:
    """The optimizer holds the master weights; the copy to the model belongs to the update."""
    model = net().bfloat16()
    masters = nn.ParameterList([p.detach().float() for p in model.parameters()])
    optimizer = adamw(masters)
    program = Program(nn.ModuleDict({"model": model, "masters": masters}), optimizer, lambda _number: None)

    def step(_number: int) -> Any:
        loss = model(data().bfloat16()).float().square().mean()
        model.zero_grad()
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()  # type: ignore[union-attr] # backward() has made it
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        program.step_done()
        return loss

    program.step = step
    return program


@supports("torch.compile")
@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("what", ["model", "model in place", "optimizer", "autograd"])
def test_compiled(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "autograd":
        monkeypatch.setattr("torch._dynamo.config.compiled_autograd", True)

    def make() -> Program:
        torch.compiler.reset()
        model: Any = net()
        if what == "model in place":
            model.compile(backend="aot_eager")
        elif what != "optimizer":
            model = torch.compile(model, backend="aot_eager")
        optimizer = adamw(model)
        stepped = plainly(model, optimizer)
        if what == "optimizer":
            compiled = torch.compile(optimizer.step, backend="eager")
            stepped = plainly(model, SimpleNamespace(zero_grad=optimizer.zero_grad, step=compiled))
        return Program(model, optimizer, stepped)

    assert_goes_on_with_its_bits(tmp_path, make)


@supports("activation checkpointing")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(tmp_path: Path, use_reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(6, 6), net(nn.BatchNorm1d(8))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, self.first(x), use_reentrant=use_reentrant)

    assert_goes_on_with_its_bits(tmp_path, program_of(Recomputed))


class Counting(nn.Linear):
    """A layer whose extra state changes in its forward pass, as the scales of FP8 do."""

    passes = 0

    def forward(self, x: Tensor) -> Any:
        self.passes += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"passes": self.passes}

    def set_extra_state(self, state: Any) -> None:
        self.passes = state["passes"]


@supports("extra states of modules")
def test_an_extra_state_that_the_forward_pass_changes(tmp_path: Path) -> None:
    make = program_of(lambda: net(Counting(8, 8)))
    assert_goes_on_with_its_bits(tmp_path, make)
    one, adapter, processor = in_mid_run(tmp_path / "waits", make)
    one.model(data()).sum().backward()  # of the next step: the rank waits for one that is dead, and is saved
    saved, other = save(adapter, processor, UPDATES), make()
    other.register().load(saved, 0, 1, protected=False)
    assert (one.model[3].passes, other.model[3].passes) == (UPDATES + 1, UPDATES)


@pytest.mark.parametrize("parts", [False, True])
def test_an_extra_state_is_captured_before_anything_waits_for_other_ranks(tmp_path: Path, parts: bool) -> None:
    """A hook of FSDP gathers weights before the forward pass. The model may also be a list whose parts are called."""

    class Parts(nn.ModuleList):
        def __call__(self, x: Tensor) -> Any:
            return self[0](x)

    def make() -> nn.Module:
        model: nn.Module = net(Counting(8, 8))
        model.register_forward_pre_hook(lambda module, _: gathers(module[3]), prepend=True)
        return Parts([model]) if parts else model

    def gathers(layer: Any) -> None:
        layer.passes += 100

    one, adapter, _ = in_mid_run(tmp_path, program_of(make))
    one.model(data())
    states: Any = adapter.source.module_states.values(UPDATES)
    assert [state["passes"] for state in states.values()] == [101 * UPDATES]


@supports("frozen and tied parameters")
@pytest.mark.parametrize("registered", ["trained only", "all"])
def test_frozen_and_tied_parameters(tmp_path: Path, registered: str) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
        model[1].weight = model[0].weight
        model[2].weight.requires_grad_(False)
        return model

    assert_goes_on_with_its_bits(tmp_path, program_of(tied, adamw if registered == "all" else of_trained))


def of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@supports("LoRA")
def test_adapters_on_a_frozen_base(tmp_path: Path) -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, base.in_features))
            self.b = nn.Parameter(torch.zeros(base.out_features, 2))
            self.dropout = nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Any:
            return self.base(x) + self.dropout(x) @ self.a.T @ self.b.T

    def adapted() -> nn.Module:
        return nn.Sequential(Adapted(nn.Linear(6, 8)), nn.ReLU(), Adapted(nn.Linear(8, 3)))

    assert_goes_on_with_its_bits(tmp_path, program_of(adapted, of_trained))


@supports("8-bit optimizers")
def test_an_optimizer_with_quantised_moments(tmp_path: Path) -> None:
    """As bitsandbytes keeps them: bytes, a table of their values, and the largest value of each block."""

    class Adam8bit(torch.optim.Optimizer):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    if not state:
                        state["step"], state["qmap1"] = 0, torch.linspace(-1, 1, 256)
                        state["state1"] = torch.full_like(parameter, 128, dtype=torch.uint8)
                        state["absmax1"] = torch.zeros(1)
                    moment = state["qmap1"][state["state1"].int()] * state["absmax1"]
                    moment = 0.9 * moment + 0.1 * parameter.grad
                    state["absmax1"] = moment.abs().max().view(1)
                    scaled = moment / state["absmax1"].clamp_min(1e-12)
                    state["state1"].copy_(((scaled + 1) * 127.5).round())
                    state["step"] += 1
                    parameter.sub_(group["lr"] * moment)

    assert_goes_on_with_its_bits(tmp_path, program_of(net, lambda model: Adam8bit(model.parameters(), lr=0.1)))


@supports("BatchNorm and SyncBatchNorm")
@goes_on
def test_batch_statistics() -> Program:
    """SyncBatchNorm trains on a device only: here its statistics are changed by hand, and then used."""
    model: Any = nn.SyncBatchNorm.convert_sync_batchnorm(net(nn.BatchNorm1d(8)))
    assert isinstance(model[3], nn.SyncBatchNorm)
    model[3].eval()
    optimizer = adamw(model)

    def before() -> None:
        model[3].running_mean.lerp_(torch.randn(8), 0.1)
        model[3].num_batches_tracked.add_(1)

    return Program(model, optimizer, plainly(model, optimizer, before))


class Numbers(IterableDataset[Tensor]):
    """A data set whose workers draw their own numbers, and can begin anywhere."""

    begin = 0

    def __iter__(self) -> Iterator[Tensor]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        for number in range(self.begin + worker.id, 10**6, worker.num_workers):
            yield torch.randn(8, 6, generator=torch.Generator().manual_seed(number))


class StatefulLoader:
    """A loader with the two methods of torchdata's StatefulDataLoader, and workers that fetch ahead."""

    def __init__(self) -> None:
        self.given, self._batches = 0, iter(())

    def __next__(self) -> Tensor:
        if not self.given or not isinstance(self._batches, torch.utils.data.dataloader._BaseDataLoaderIter):
            dataset = Numbers()
            dataset.begin = self.given
            self._batches = iter(DataLoader(dataset, None, num_workers=2, generator=torch.Generator()))
        batch = next(self._batches)
        self.given += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]

    def end(self) -> None:
        """End the workers. If garbage collection ended their queues first, torch would wait 5 s for each worker."""
        self._batches = iter(())


@supports("StatefulDataLoader with workers")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_loader_that_knows_its_place(tmp_path: Path) -> None:
    """Batches that workers have fetched ahead are neither lost nor given twice."""

    def make() -> Program:
        model = net()
        loader, optimizer = make_loader(), adamw(model)
        step = plainly(lambda _: model(next(loader)), optimizer)
        return Program(model, optimizer, step, extra_state={"loader": loader})

    with making(StatefulLoader, StatefulLoader.end) as make_loader:
        assert_goes_on_with_its_bits(tmp_path, make)


@pytest.mark.slow  # 18,000 values are written and read one by one
@supports("1,000 param groups")
@goes_on
def test_a_thousand_param_groups() -> Program:
    model = nn.ParameterList([torch.randn(2) for _ in range(1000)])
    groups = [{"params": [p], "lr": 1e-3 * (1 + n % 7), "depth": n} for n, p in enumerate(model)]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(_number: int) -> Any:
        optimizer.zero_grad()
        loss = sum((p * torch.randn(2)).square().sum() for p in model)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return Program(model, optimizer, step, scheduler=scheduler)


@supports("model deepcopy and pickling")
@goes_on
def test_a_copy_of_the_model_is_made_in_training(tmp_path: Path) -> Program:
    model = net()
    scheduler_of = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    optimizer = adamw(model)
    scheduler = scheduler_of(optimizer)

    def after() -> None:
        scheduler.step()
        copied = copy.deepcopy(model)
        assert digest(copied.state_dict()) == digest(model.state_dict())
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert digest(loaded.state_dict()) == digest(model.state_dict())
        loaded.eval()(torch.ones(1, 6)).sum().backward()  # trains on its own, and tells nobody

    return Program(model, optimizer, plainly(model, optimizer, after=after), scheduler=scheduler)
