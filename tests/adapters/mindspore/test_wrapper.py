"""The wrapped optimizer trains bit for bit like the optimizer alone, and reports each update exactly when it
happens.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.nn.optim import lamb
from mindspore.train import Callback

from ttp.adapters.mindspore import OptTTPWrapper

pytestmark = pytest.mark.xdist_group("mindspore")

BATCH, STEPS_PER_EPOCH, EPOCHS = 8, 4, 2
MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
OVERFLOWS = 1
"""The step of each epoch whose data make the loss infinite."""


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.relu, self.last = nn.Dense(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dense(16, 4)

    def construct(self, x: Any) -> Any:
        return self.last(self.relu(self.norm(self.first(x))))


class SkippingStep(nn.TrainOneStepCell):
    """A step that skips the update when a gradient overflows, and halves the loss scale."""

    def __init__(self, network: nn.Cell, optimizer: nn.Optimizer) -> None:
        super().__init__(network, optimizer)
        self.scale = ms.Parameter(ms.Tensor(1024.0, ms.float32), name="loss_scale", requires_grad=False)
        self.finite = ops.IsFinite()

    def construct(self, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, self.scale)
        good = self.finite(grads[0]).all()
        for grad in grads:
            good = ops.logical_and(good, self.finite(grad).all())
        scaled: Any = ()
        for grad in grads:
            scaled += (grad / self.scale,)
        if good:
            loss = ops.depend(loss, self.optimizer(scaled))
        else:
            ops.assign(self.scale, self.scale / 2)
        return loss


@dataclass
class Recorder:
    """Records the state at each report."""

    network: Any = None
    told: list[tuple[str, str]] = field(default_factory=list)

    def begin_update(self) -> None:
        self.told.append(("begin", state_of(self.network)))

    def end_update(self) -> None:
        self.told.append(("end", state_of(self.network)))


class Steps(Callback):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.losses: list[str] = []

    def on_train_step_begin(self, run_context: Any) -> None:
        self._recorder.told.append(("step", state_of(self._recorder.network)))

    def on_train_step_end(self, run_context: Any) -> None:
        self.losses.append(float(run_context.original_args().net_outputs.asnumpy()).hex())
        self._recorder.told.append(("stepped", state_of(self._recorder.network)))


def state_of(network: nn.Cell) -> str:
    """Return the state, without BatchNorm's averages and the loss scale, which change in the forward pass."""
    known = sorted((p.name, p.asnumpy().tobytes()) for p in network.get_parameters())
    return hashlib.sha256(
        b"".join(data for name, data in known if "moving" not in name and name != "loss_scale")
    ).hexdigest()[:12]


def whole_state_of(network: nn.Cell) -> dict[str, bytes]:
    return {p.name: p.asnumpy().tobytes() for p in network.get_parameters()}


def data(overflow: bool) -> Any:
    rng = np.random.default_rng(0)
    rows = BATCH * STEPS_PER_EPOCH
    x, y = rng.standard_normal((rows, 8)).astype(np.float32), rng.integers(0, 4, rows).astype(np.int32)
    if overflow:
        x[BATCH * OVERFLOWS] = 3e38
    return ds.NumpySlicesDataset({"x": x, "y": y}, shuffle=False).batch(BATCH)


def groups(net: nn.Cell, rate: Any) -> list[dict[str, Any]]:
    weights = [p for p in net.trainable_params() if "weight" in p.name]
    others = [p for p in net.trainable_params() if "weight" not in p.name]
    return [{"params": weights, "lr": rate, "weight_decay": 0.01}, {"params": others}]


def schedule() -> Any:
    return nn.cosine_decay_lr(0.0, 0.05, STEPS_PER_EPOCH * EPOCHS, STEPS_PER_EPOCH, EPOCHS)


OPTIMIZERS: dict[str, Callable[[nn.Cell], nn.Optimizer]] = {
    "momentum": lambda net: nn.Momentum(net.trainable_params(), 0.05, 0.9, weight_decay=1e-3),
    "momentum, loss scale": lambda net: nn.Momentum(net.trainable_params(), 0.05, 0.9, loss_scale=1024.0),
    "momentum, groups": lambda net: nn.Momentum(groups(net, 0.01), 0.05, 0.9),
    "sgd": lambda net: nn.SGD(net.trainable_params(), 0.05),
    "sgd, schedule": lambda net: nn.SGD(net.trainable_params(), schedule(), momentum=0.5, weight_decay=1e-3),
    "adam": lambda net: nn.Adam(net.trainable_params(), 0.01),
    "adam, groups with schedules": lambda net: nn.Adam(groups(net, nn.ExponentialDecayLR(0.01, 0.9, 4)), schedule()),
    "adam weight decay": lambda net: nn.AdamWeightDecay(net.trainable_params(), 0.01, weight_decay=0.1),
    "adam weight decay, groups": lambda net: nn.AdamWeightDecay(groups(net, 0.02), schedule()),
    "adafactor": lambda net: nn.AdaFactor(net.trainable_params(), learning_rate=None, beta1=0.9),
    "asgd": lambda net: nn.ASGD(net.trainable_params(), 0.01, t0=2.0),
}


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:1}")
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def trained(name: str, recorder: Recorder | None, skip: bool = False) -> tuple[list[str], dict[str, bytes]]:
    """Return losses and final state of a training; with a recorder its optimizer is wrapped."""
    ms.set_seed(1)
    net = Net()
    optimizer = OPTIMIZERS[name](net)
    if recorder is not None:
        optimizer = OptTTPWrapper(optimizer)
        optimizer.reporter = recorder
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    if skip:
        step = SkippingStep(nn.WithLossCell(net, loss), optimizer)
        step.set_train()
        model = ms.Model(step)
    else:
        model = ms.Model(net, loss, optimizer)
    recorder = recorder or Recorder()
    recorder.network = model.train_network
    steps = Steps(recorder)
    model.train(EPOCHS, data(skip), callbacks=[steps], dataset_sink_mode=False)
    return steps.losses, whole_state_of(model.train_network)


def check(name: str, mode: str, skip: bool = False) -> list[tuple[str, str]]:
    ms.set_context(mode=MODES[mode])
    recorder = Recorder()
    alone, wrapped = trained(name, None, skip), trained(name, recorder, skip)
    assert wrapped[0] == alone[0]
    assert wrapped[1].keys() == alone[1].keys()
    assert wrapped[1] == alone[1]
    return recorder.told


QUICK = [("graph", "momentum"), ("graph", "adam, groups with schedules"), ("pynative", "adam weight decay, groups")]


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        pytest.param(mode, name, marks=[] if (mode, name) in QUICK else pytest.mark.slow)
        for mode in MODES
        for name in OPTIMIZERS
    ],
)
def test_losses_and_state_are_those_of_the_optimizer_alone(mode: str, name: str) -> None:
    told = check(name, mode)
    assert [word for word, _ in told] == ["step", "begin", "end", "stepped"] * (STEPS_PER_EPOCH * EPOCHS)
    for first in range(0, len(told), 4):
        before, begin, end, after = (state for _, state in told[first : first + 4])
        assert before == begin != end == after  # nothing was written before the one report, nothing after the other


@pytest.mark.parametrize("mode", ["graph", pytest.param("pynative", marks=pytest.mark.slow)])
def test_an_update_that_is_skipped_is_not_reported(mode: str) -> None:
    told = check("momentum", mode, skip=True)
    steps = "".join({"step": "(", "begin": "b", "end": "e", "stepped": ")"}[word] for word, _ in told)
    assert steps == "(be)()(be)(be)" * EPOCHS


def test_nothing_is_reported_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MS_ENABLE_TFT")
    monkeypatch.delenv("TTP_PORT", raising=False)
    recorder = Recorder()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    trained("sgd", recorder)
    assert {word for word, _ in recorder.told} == {"step", "stepped"}


LAMBS: dict[str, Callable[[nn.Cell], nn.Optimizer]] = {
    "lamb": lambda net: nn.Lamb(net.trainable_params(), 0.01, weight_decay=0.1),
    "lamb, groups": lambda net: nn.Lamb(groups(net, 0.02), schedule()),
}


def lamb_by_other_kernels() -> Any:
    """Return a stand-in for MindSpore's operator, which has no CPU kernel: the same arithmetic."""

    def update(
        weight: Any, m: Any, v: Any, rate: Any, beta1: Any, beta2: Any, eps: Any, decay: Any, step: Any, grad: Any
    ) -> Any:
        m_new, v_new = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad * grad
        count = step.astype(ms.float32)
        scaled = m_new / (1 - beta1**count) / (ops.sqrt(v_new / (1 - beta2**count)) + eps) + decay * weight
        trust = ops.sqrt((weight * weight).sum() + eps) / ops.sqrt((scaled * scaled).sum() + eps)
        weight_new = weight - rate * trust * scaled
        return ops.depend(ops.assign(weight, weight_new), (ops.assign(m, m_new), ops.assign(v, v_new)))

    return update


@pytest.fixture
def lambs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in LAMBS.items():
        monkeypatch.setitem(OPTIMIZERS, name, make)


@pytest.mark.parametrize("mode", ["graph", pytest.param("pynative", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("lambs")
def test_lamb_has_no_kernel_on_cpu_with_or_without_the_wrapper(mode: str) -> None:
    """If a new MindSpore has one, move ``LAMBS`` into ``OPTIMIZERS``."""
    ms.set_context(mode=MODES[mode])
    for recorder in (None, Recorder()):
        with pytest.raises(RuntimeError, match=r"Unsupported op \[Lamb\] on CPU"):
            trained("lamb", recorder)
        assert recorder is None or "end" not in [word for word, _ in recorder.told]


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        pytest.param(mode, name, marks=[] if (mode, name) == ("graph", "lamb") else pytest.mark.slow)
        for mode, name in itertools.product(MODES, LAMBS)
    ],
)
@pytest.mark.usefixtures("lambs")
def test_lamb_with_another_kernel_trains_as_alone(mode: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of ``nn.Lamb`` except the one operator: its state, groups and schedules."""
    stand_in = ModuleType("lamb_stand_in")
    vars(stand_in)["Lamb"] = lamb_by_other_kernels
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)  # the compiler looks for it there
    monkeypatch.setattr(lamb, "inner", stand_in)
    told = check(name, mode)
    assert [word for word, _ in told] == ["step", "begin", "end", "stepped"] * (STEPS_PER_EPOCH * EPOCHS)
    assert len({state for _, state in told}) == STEPS_PER_EPOCH * EPOCHS + 1
