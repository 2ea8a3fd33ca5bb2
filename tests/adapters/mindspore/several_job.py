"""A program that calls ``Model.train`` once per epoch and evaluates in between. Run by the launcher.

``JOB_KILLS``: for each launch a list of ``[rank, epoch, how]``, as JSON: what happens to the rank in that evaluation.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "mindspore_mnist"))

import mindspore as ms
import mnist_files
import train_mnist
from mindspore import nn
from mindspore.communication import get_rank, init

import ttp
from ttp.adapters.mindspore import OptTTPWrapper, TFTRegister, restore

EPOCHS = 3


def evaluate(epoch: int) -> None:
    launches, launch = json.loads(os.environ["JOB_KILLS"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    for rank, when, how in launches[launch] if launch < len(launches) else []:
        if when == epoch:
            while rank != get_rank():  # the others still evaluate
                time.sleep(1.0)
            if how == "raise":
                raise ValueError("the evaluation failed")
            os.kill(os.getpid(), signal.SIGKILL)


@ttp.ttp_to_persist
def train() -> None:
    ms.set_seed(train_mnist.SEED)
    dataset = train_mnist.create_dataset(mnist_files.write(Path("MNIST_Data/train"), 256), 16)
    network = train_mnist.Network(32)
    optimizer = OptTTPWrapper(nn.Momentum(network.trainable_params(), 1e-2, 0.9))
    model = ms.Model(network, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer)
    resumed = restore(model, dataset, "./ttp_checkpoints/")
    print(f"rank {get_rank()} begins after step {resumed.step}.", flush=True)
    protection = TFTRegister(0, "127.0.0.1", 30051, "./ttp_checkpoints/")
    size, step = dataset.get_dataset_size(), resumed.step
    for epoch in range(resumed.initial_epoch, EPOCHS):
        dataset.set_init_step(step)
        callbacks = [train_mnist.Journal(step), protection]
        model.train(epoch + 1, dataset, callbacks=callbacks, dataset_sink_mode=False, initial_epoch=epoch)
        step = (epoch + 1) * size
        evaluate(epoch)


if __name__ == "__main__":
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        init()
        sys.exit()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    init()
    train()
