"""Train five layers on MNIST, data parallel, with the power-off checkpoint, as in MindSpore's documentation.

    export MS_ENABLE_TFT='{TTP:1}' MINDIO_FOR_MINDSPORE=1
    ttp run --mindspore --nproc-per-node 4 examples/mindspore_mnist/train_mnist.py

Kill any worker, also rank 0 (``kill -9``): the other workers save the last finished step. With ``--max-restarts`` the
job then continues with the next step; or start it again by hand with ``--is_recover=1``. ``DATA_PATH`` is the directory
with MNIST's files; without it the script writes scikit-learn's digits in MNIST's format and uses them.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
from mindspore import Parameter, nn, ops, train
from mindspore.common.initializer import HeUniform, initializer
from mindspore.communication import get_group_size, get_rank, init

sys.path.insert(0, str(Path(__file__).parent))

import mnist_files

from ttp.adapters.mindspore import OptTTPWrapper, TFTRegister, restore

SEED = 1


class MatMulCell(nn.Cell):
    def __init__(self, shape: list[int]) -> None:
        super().__init__()
        self.param = Parameter(initializer(HeUniform(math.sqrt(5)), shape), name="param")
        self.matmul = ops.MatMul()

    def construct(self, x: Any) -> Any:
        return self.matmul(x, self.param)


class Network(nn.Cell):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = MatMulCell([28 * 28, 512])
        self.relu1 = nn.ReLU()
        self.layer2 = nn.Dense(512, hidden)
        self.relu2 = nn.ReLU()
        self.layer3 = nn.Dense(hidden, hidden)
        self.relu3 = nn.ReLU()
        self.layer4 = nn.Dense(hidden, 512)
        self.relu4 = nn.ReLU()
        self.layer5 = nn.Dense(512, 10)

    def construct(self, x: Any) -> Any:
        x = self.flatten(x)
        x = self.relu1(self.layer1(x))
        x = self.relu2(self.layer2(x))
        x = self.relu3(self.layer3(x))
        x = self.relu4(self.layer4(x))
        return self.layer5(x)


def create_dataset(path: Path, batch_size: int) -> Any:
    """Return this rank's share of the data, shuffled: the order differs between epochs, and is equal in all runs."""
    ds.config.set_seed(SEED)
    dataset = ds.MnistDataset(str(path), shuffle=True, num_shards=get_group_size(), shard_id=get_rank())
    image = [
        ds.vision.Rescale(1.0 / 255.0, 0),
        ds.vision.Normalize(mean=(0.1307,), std=(0.3081,)),
        ds.vision.HWC2CHW(),
    ]
    dataset = dataset.map(image, "image")
    dataset = dataset.map(ds.transforms.TypeCast(ms.int32), "label")
    return dataset.batch(batch_size, drop_remainder=True)


class Journal(train.Callback):
    """Prints one line per step: its number, the bits of its loss, and a digest of the weights after it."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.step = first
        self.losses: list[str] = []

    def on_train_step_end(self, run_context: Any) -> None:
        cb_params = run_context.original_args()
        self.step += 1
        outputs = cb_params.net_outputs
        loss = float((outputs[0] if isinstance(outputs, (tuple, list)) else outputs).asnumpy())
        weights = hashlib.sha256(b"".join(p.asnumpy().tobytes() for p in cb_params.train_network.get_parameters()))
        place = f"epoch {cb_params.cur_epoch_num}"
        print(f"rank {get_rank()} step {self.step} {place} {loss.hex()} {weights.hexdigest()[:16]}", flush=True)


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--is_recover", type=int, choices=[0, 1], default=0, help="go on from what was saved")
    parser.add_argument("--mode", choices=["graph", "pynative"], default="graph")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=5120, help="width of the middle layers")
    parser.add_argument("--optimizer", choices=["sgd", "momentum", "adam"], default="sgd")
    parser.add_argument("--images", type=int, default=1797, help="of scikit-learn's digits")
    parser.add_argument("--checkpoints", default="./ttp_checkpoints/")
    parser.add_argument("--data", default="./MNIST_Data/train", help="where digits are written without DATA_PATH")
    return parser.parse_args(argv)


def make_optimizer(name: str, parameters: Any, steps: int) -> Any:
    if name == "sgd":
        return nn.SGD(parameters, 1e-2)
    if name == "momentum":
        return nn.Momentum(parameters, nn.cosine_decay_lr(0.0, 1e-2, steps, steps, 1), 0.9, weight_decay=1e-4)
    return nn.Adam(parameters, 1e-3)


def main(argv: Sequence[str] | None = None, callbacks: Sequence[train.Callback] = ()) -> None:
    arguments = options(argv)
    ms.set_context(mode=ms.GRAPH_MODE if arguments.mode == "graph" else ms.PYNATIVE_MODE)
    ms.set_device(os.environ.get("DEVICE_TARGET", "CPU"))
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    init()
    ms.set_seed(SEED)
    path = os.environ.get("DATA_PATH")
    data = Path(path) if path else mnist_files.write(Path(arguments.data), arguments.images)
    dataset = create_dataset(data, arguments.batch)

    network = Network(arguments.hidden)
    steps = arguments.epochs * dataset.get_dataset_size()
    optimizer = OptTTPWrapper(make_optimizer(arguments.optimizer, network.trainable_params(), steps))
    model = ms.Model(network, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer)
    tft_cb = TFTRegister(0, "127.0.0.1", 30051, arguments.checkpoints)

    first, initial_epoch = 0, 0
    if arguments.is_recover or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        resumed = restore(model, dataset, arguments.checkpoints)
        first, initial_epoch = resumed.step, resumed.initial_epoch
    print(f"rank {get_rank()} begins after step {first}.", flush=True)
    if initial_epoch < arguments.epochs:
        model.train(
            arguments.epochs,
            dataset,
            callbacks=[*callbacks, Journal(first), tft_cb],
            dataset_sink_mode=False,
            initial_epoch=initial_epoch,
        )
    print(f"rank {get_rank()} trained", flush=True)


if __name__ == "__main__":
    main()
