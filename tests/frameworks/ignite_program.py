"""A training of pytorch-ignite, as docs/frameworks.md shows it; see ``ttp.testing.kit``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import DeterministicEngine, Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver, EMAHandler, PiecewiseLinear
from ignite.metrics import Loss
from ignite.utils import manual_seed
from torch import nn
from torch.utils.data import TensorDataset

import ttp
from ttp.testing import kit


def data(length: int) -> TensorDataset:
    source = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(length, 16, generator=source), torch.randint(0, 4, (length,), generator=source))


@ttp.ttp_to_persist
def train(epochs: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    seed = 7 + idist.get_rank()
    manual_seed(seed)
    loader = idist.auto_dataloader(data(40), batch_size=8, shuffle=True, drop_last=True)
    tests = idist.auto_dataloader(data(16), batch_size=8, shuffle=False)
    layers = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
    model = idist.auto_model(nn.Sequential(*layers))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    scheduler = PiecewiseLinear(optimizer, "lr", [(0, 0.0), (4, 0.1), (epochs * len(loader), 0.0)])
    criterion = nn.CrossEntropyLoss()

    def update(_engine: Engine, batch: Any) -> float:
        model.train()
        loss = criterion(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss)

    trainer = DeterministicEngine(update)
    trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)
    average = EMAHandler(model.module, momentum=0.1)
    average.attach(trainer)
    evaluator = create_supervised_evaluator(model, {"loss": Loss(criterion)})
    own = Checkpoint({"trainer": trainer, "model": model}, DiskSaver(save_dir.parent / "own", require_empty=False))

    @trainer.on(Events.ITERATION_COMPLETED)
    def _(engine: Engine) -> None:
        kit.at("iteration")
        report(engine.state.iteration, engine.state.output)

    @trainer.on(Events.EPOCH_COMPLETED)
    def _(_engine: Engine) -> None:
        evaluator.run(tests)
        own(trainer)
        kit.at("saved")

    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: kit.at("evaluation"))
    own_state = {"trainer": trainer, "scheduler": scheduler, "average": average.ema_model}
    ttp.wrap_optimizer(optimizer, model=model, save_dir=save_dir, extra_state=own_state)
    done = ttp.restore()
    manual_seed(seed)  # the engine draws from it what decides the order of the data
    if done < epochs * len(loader):
        trainer.run(loader, max_epochs=epochs)
    ended = {"scheduler": scheduler.state_dict(), "iteration": trainer.state.iteration}
    return {"model": model, "optimizer": optimizer, "average": average.ema_model, **ended}


def main(steps: int, save_dir: Path, report: Callable[[int, Any], None]) -> dict[str, Any]:
    idist.sync()  # with the process group that exists
    return train(steps // 5, save_dir, report)
