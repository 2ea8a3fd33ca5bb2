"""The power-off checkpoint program of MindSpore's documentation (``mindio_ttp_case.py``), with its own imports.

It knows nothing of ttp: ``ttp run --mindspore --mindio`` provides ``nn.OptTFTWrapper`` and ``train.TFTRegister``. It
differs from the original only where a test needs it: CPU, smaller layers, the loss function given to the Model,
``init_epoch`` to its training, and epoch and step of the exception save as arguments instead of edits.
"""

# mypy: ignore-errors
# ruff: noqa: RET504 - a result has a name before it is returned: so the documentation has it
import argparse
import math
import os

import mindspore as ms
import mindspore.dataset as ds
from mindspore import Parameter, context, get_ckpt_path_with_strategy, nn, ops, train
from mindspore.common.initializer import HeUniform, initializer
from mindspore.communication import get_rank, init

parser = argparse.ArgumentParser(description="Mindio TTP test arguments")
parser.add_argument(
    "--is_recover",
    type=int,
    default=0,
    choices=[1, 0],
    help="Only used for resume from Mindio TTP checkpoint, default false.",
)
parser.add_argument("--cur_rank", type=int, default=0)
parser.add_argument("--cur_epoch", type=int, default=2)
parser.add_argument("--cur_step", type=int, default=1215)
parser.add_argument("--mode", choices=["graph", "pynative"], default="graph")
args_opt = parser.parse_args()

ms.set_context(mode=ms.GRAPH_MODE if args_opt.mode == "graph" else ms.PYNATIVE_MODE, jit_level="O1")
ms.set_device("CPU")
ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL)
init()
ms.set_auto_parallel_context(
    strategy_ckpt_config={"save_file": f"./src_pipeline_strategy/src_strategy_{get_rank()}.ckpt"}
)
HIDDEN = 64  # 5120


class MatMulCell(nn.Cell):
    """
    MatMulCell definition.
    """

    def __init__(self, param=None, shape=None):
        super().__init__()
        if shape is None:
            shape = [28 * 28, 512]
        weight_init = HeUniform(math.sqrt(5))
        self.param = Parameter(initializer(weight_init, shape), name="param")
        if param is not None:
            self.param = param
        self.matmul = ops.MatMul()

    def construct(self, x):
        out = self.matmul(x, self.param)
        return out


class Network(nn.Cell):
    """
    Network definition.
    """

    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = MatMulCell()
        self.relu1 = nn.ReLU()
        self.layer2 = nn.Dense(512, HIDDEN)
        self.relu2 = nn.ReLU()
        self.layer3 = nn.Dense(HIDDEN, HIDDEN)
        self.relu3 = nn.ReLU()
        self.layer4 = nn.Dense(HIDDEN, 512)
        self.relu4 = nn.ReLU()
        self.layer5 = nn.Dense(512, 10)

    def construct(self, x):
        x = self.flatten(x)
        x = self.layer1(x)
        x = self.relu1(x)
        x = self.layer2(x)
        x = self.relu2(x)
        x = self.layer3(x)
        x = self.relu3(x)
        x = self.layer4(x)
        x = self.relu4(x)
        logits = self.layer5(x)
        return logits


net = Network()


def create_dataset(batch_size):
    """create dataset"""
    dataset_path = os.getenv("DATA_PATH")
    dataset = ds.MnistDataset(dataset_path)
    image_transforms = [
        ds.vision.Rescale(1.0 / 255.0, 0),
        ds.vision.Normalize(mean=(0.1307,), std=(0.3081,)),
        ds.vision.HWC2CHW(),
    ]
    label_transform = ds.transforms.TypeCast(ms.int32)
    dataset = dataset.map(image_transforms, "image")
    dataset = dataset.map(label_transform, "label")
    dataset = dataset.batch(batch_size)
    return dataset


dataset = create_dataset(32)

optimizer = nn.SGD(net.trainable_params(), 1e-2)
# Configure TFT optimizer
optimizer_wrapper = nn.OptTFTWrapper(optimizer)

loss_fn = nn.CrossEntropyLoss()
net.set_train()
model = ms.Model(net, loss_fn=loss_fn, optimizer=optimizer_wrapper)

time_monitor = train.TimeMonitor(data_size=1)
loss_cb = train.LossMonitor(1)
# Set the TFT callback object
tft_cb = train.TFTRegister(0, "127.0.0.1", 30051, "./ttp_checkpoints/")

init_epoch = 0
if bool(args_opt.is_recover):
    cur_epoch = args_opt.cur_epoch  # Set to the epoch value of the exception save
    cur_step = args_opt.cur_step  # Set to the step value of the exception save
    ckpt_step = (cur_epoch - 1) * dataset.get_dataset_size() + cur_step
    if context.get_auto_parallel_context("parallel_mode") == "data_parallel":
        cur_rank = args_opt.cur_rank
        new_ckpt_file = (
            f"./ttp_checkpoints/tft_saved_checkpoints-step_{ckpt_step}/rank_{cur_rank}/"
            f"ttp_rank_{cur_rank}-{cur_epoch}_{cur_step}.ckpt"
        )
    else:
        cur_rank = get_rank()
        ckpt_file = (
            f"./ttp_checkpoints/tft_saved_checkpoints-step_{ckpt_step}/rank_{cur_rank}/"
            f"ttp_rank_{cur_rank}-{cur_epoch}_{cur_step}.ckpt"
        )
        strategy_file = f"./src_pipeline_strategy/src_strategy_{cur_rank}.ckpt"
        new_ckpt_file = get_ckpt_path_with_strategy(ckpt_file, strategy_file)
    param_dict = ms.load_checkpoint(new_ckpt_file)
    ms.load_param_into_net(net, param_dict)
    dataset.set_init_step(int(param_dict["step_num"]))
    init_epoch = int(param_dict["epoch_num"]) - 1

model.train(5, dataset, callbacks=[time_monitor, loss_cb, tft_cb], initial_epoch=init_epoch)
