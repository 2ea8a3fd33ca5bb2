"""Loops without ``Model.train``: with ``ms.jit`` or without, with a loss scale and an average beside the network."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from tests.adapters.mindspore.test_wrapper import MODES, Net, switched_on, whole_state_of
from tests.adapters.torch.stub_processor import INCARNATION, StubProcessor, save
from ttp.adapters.mindspore import OptTTPWrapper
from ttp.adapters.mindspore.adapter import MindSporeAdapter
from ttp.core.decide import How
from ttp.core.layout import Rank

pytestmark = [pytest.mark.xdist_group("mindspore"), pytest.mark.timeout(300)]

__all__ = ["switched_on"]

STEPS, SAVED = 8, 5


class Whole(nn.Cell):
    """The network with what the loop changes after the update: the loss scale, its counter, an average."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.scaler = ms.amp.DynamicLossScaler(64.0, 2, 2)
        self.scale, self.count = self.scaler.scale_value, self.scaler.counter
        self.average = ms.ParameterTuple(self.net.trainable_params()).clone(prefix="average", init="same")


class Loop:
    """A program's own training loop, which saves at the gate of the step after ``SAVED``."""

    def __init__(self, directory: Path, *, jit: bool) -> None:
        ms.set_seed(2)
        self.whole = whole = Whole()
        whole.net.set_train()
        self.optimizer = OptTTPWrapper(nn.Adam(whole.net.trainable_params(), nn.CosineDecayLR(0.001, 0.1, 9)))
        self.adapter = MindSporeAdapter(whole, self.optimizer)
        processor: Any = StubProcessor(directory / "checkpoints")
        (directory / "checkpoints").mkdir(exist_ok=True)
        self.processor = processor
        self.adapter.source.on_welcome(Rank(0), INCARNATION, directory / "pages")
        self.adapter.attach(processor)
        self.optimizer.reporter = self
        self.saved: list[Path | BaseException] = []
        self._step = 0
        loss, scaler, optimizer = nn.MSELoss(), whole.scaler, self.optimizer

        def forward(x: Any, y: Any) -> Any:
            return scaler.scale(loss(whole.net(x), y))

        grad = ms.value_and_grad(forward, None, whole.net.trainable_params())

        def step(x: Any, y: Any) -> Any:
            scaled, grads = grad(x, y)
            optimizer(scaler.unscale(grads))
            return scaled

        self.step = ms.jit(step) if jit else step

    def begin_update(self) -> None:
        if self._step == SAVED + 1:
            thread = threading.Thread(target=self._save)
            thread.start()
            thread.join()
            self.processor.gate.open()
        self.adapter.begin_update()

    def end_update(self) -> None:
        self.adapter.end_update()

    def _save(self) -> None:
        try:
            self.saved.append(save(self.adapter, self.processor, SAVED, How.AS_IS))
        except BaseException as problem:
            self.saved.append(problem)

    def train(self, first: int) -> dict[str, bytes]:
        rng = np.random.default_rng(1)
        x, y = (rng.standard_normal((STEPS, 8, width)).astype(np.float32) for width in (8, 4))
        for self._step in range(first + 1, STEPS + 1):
            self.step(ms.Tensor(x[self._step - 1]), ms.Tensor(y[self._step - 1]))
            self.whole.scaler.adjust(ms.Tensor(True))
            for average, weight in zip(self.whole.average, self.whole.net.trainable_params(), strict=True):
                average.set_data(average * 0.9 + weight * 0.1)
            self.adapter.step_done()
        return whole_state_of(self.whole) | whole_state_of(self.optimizer)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_who_goes_on_from_it_ends_where_the_other_ends(mode: str, jit: bool, tmp_path: Path) -> None:
    ms.set_context(mode=MODES[mode])
    first = Loop(tmp_path, jit=jit)
    unbroken = first.train(0)
    (checkpoint,) = first.saved
    assert isinstance(checkpoint, Path), checkpoint
    second = Loop(tmp_path, jit=jit)
    assert second.adapter.load(checkpoint, 0, 1, protected=True) == SAVED
    second.processor.gate.set_version(SAVED)
    assert second.train(SAVED) == unbroken
