"""A hybrid parallel job: two slices of a hidden layer, each on two of four workers. Run by the launcher; see
``mnist_job``.

Ranks 0 and 2 hold the first half of the hidden layer, ranks 1 and 3 the second half. Ranks 0 and 1 see the same data,
and so do 2 and 3.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import create_group, get_rank, init

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "mindspore_mnist"))

from mnist_job import kills  # type: ignore[import-not-found] # beside this file
from train_mnist import Journal

from ttp.adapters.mindspore import OptTTPWrapper, TFTRegister, restore

SLICES = [[0, 2], [1, 3]]
TOGETHER = [[0, 1], [2, 3]]
WIDTH, HIDDEN, CLASSES, BATCH, ROWS = 16, 32, 4, 8, 64


def group_of(rank: int, groups: list[list[int]], name: str) -> str:
    """Return the group of this rank; only its members make it."""
    mine = next(index for index, ranks in enumerate(groups) if rank in ranks)
    create_group(f"{name}{mine}", groups[mine])
    return f"{name}{mine}"


class Sliced(nn.Cell):
    """A layer with half of the hidden units; the other half is on other ranks, and the results are added."""

    def __init__(self, half: int, together: str) -> None:
        super().__init__()
        rng = np.random.default_rng(7)
        first = rng.standard_normal((WIDTH, HIDDEN)).astype(np.float32) * 0.2
        second = rng.standard_normal((HIDDEN, CLASSES)).astype(np.float32) * 0.2
        mine = slice(half * HIDDEN // 2, (half + 1) * HIDDEN // 2)
        self.first = Parameter(Tensor(first[:, mine].copy()), name="first", layerwise_parallel=True)
        self.second = Parameter(Tensor(second[mine].copy()), name="second", layerwise_parallel=True)
        self.bias = Parameter(Tensor(np.zeros(CLASSES, np.float32)), name="bias")
        self.matmul, self.relu = ops.MatMul(), nn.ReLU()
        self.add_up = ops.AllReduce(group=together)

    def construct(self, x: Any) -> Any:
        hidden = self.relu(self.matmul(x, self.first))
        return self.add_up(self.matmul(hidden, self.second)) + self.bias


class HybridStep(nn.TrainOneStepCell):
    """Averages gradients of a slice over the ranks that hold it, and other gradients over all ranks."""

    def __init__(self, network: nn.Cell, optimizer: nn.Optimizer, replicas: str) -> None:
        super().__init__(network, optimizer)
        self.average = ops.AllReduce(group=replicas)
        self.own = tuple(bool(parameter.layerwise_parallel) for parameter in self.weights)

    def construct(self, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        sens = ops.fill(loss.dtype, loss.shape, self.sens)
        grads = self.grad_reducer(self.grad(self.network, self.weights)(*inputs, sens))
        averaged: Any = ()
        for index in range(len(self.own)):
            grad = grads[index]
            if self.own[index]:
                grad = self.average(grad) / 2
            averaged += (grad,)
        return ops.depend(loss, self.optimizer(averaged))


def data(rank: int) -> Any:
    ds.config.set_seed(3)
    rng = np.random.default_rng(next(i for i, ranks in enumerate(TOGETHER) if rank in ranks))
    x, y = rng.standard_normal((ROWS, WIDTH)).astype(np.float32), rng.integers(0, CLASSES, ROWS).astype(np.int32)
    return ds.NumpySlicesDataset({"x": x, "y": y}, shuffle=True).batch(BATCH)


def main(mode: str, undo: str | None) -> None:
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    ms.set_device("CPU")
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.HYBRID_PARALLEL, gradients_mean=True)
    init()
    rank = get_rank()
    together, replicas = group_of(rank, TOGETHER, "together"), group_of(rank, SLICES, "replicas")
    network = Sliced(rank % 2, together)
    optimizer = OptTTPWrapper(nn.Momentum(network.trainable_params(), 0.05, 0.9), undo)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    step = HybridStep(nn.WithLossCell(network, loss), optimizer, replicas)
    step.set_train()
    model = ms.Model(step)
    dataset = data(rank)
    callback = TFTRegister(0, "127.0.0.1", 30051, "./ttp_checkpoints/", replicas=SLICES)
    resumed = restore(model, dataset, "./ttp_checkpoints/", replicas=SLICES)
    print(f"rank {rank} begins after step {resumed.step}.", flush=True)
    model.train(
        3, dataset, callbacks=[*kills(), Journal(resumed.step), callback], dataset_sink_mode=False,
        initial_epoch=resumed.initial_epoch,
    )  # fmt: skip
    print(f"rank {rank} trained", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
