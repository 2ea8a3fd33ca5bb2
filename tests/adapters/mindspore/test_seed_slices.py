"""The network of MindSpore's documentation of recovery from redundancy, cut by ``shard()`` for eight cards.

MindSpore compiles no such network on CPU. So MindSpore runs it as far as it can; beyond that the test calls what
MindSpore would call, with the values that it has on eight cards.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.common.initializer import initializer
from mindspore.train.model import _InternalCallbackParam

from tests.adapters.torch.stub_processor import INCARNATION, StubProcessor
from ttp import session
from ttp.adapters.mindspore import OptTFTWrapper, TFTRegister, adapter, restore
from ttp.core.decide import How
from ttp.core.layout import Layout, Rank, Version
from ttp.core.messages import SaverOrder
from ttp.errors import ConfigError

pytestmark = pytest.mark.xdist_group("mindspore")

CARDS, BATCH, BATCHES = 8, 32, 2
CUT = {
    "fc1_weight": [[2, 4], [0, -1], [196, 512], 0, True, ""],
    "fc2_weight": [[2, 4], [-1, -1], [512, 512], 0, True, ""],
    "fc3_weight": [[2, 4], [-1, -1], [512, 10], 0, True, ""],
}
"""As the compiled network has it: device matrix, tensor map, slice."""


class Network(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.flatten = ops.Flatten()
        self.fc1_weight = ms.Parameter(initializer("normal", [28 * 28, 512], ms.float32))
        self.fc2_weight = ms.Parameter(initializer("normal", [512, 512], ms.float32))
        self.fc3_weight = ms.Parameter(initializer("normal", [512, 10], ms.float32))
        self.matmul1 = ops.MatMul()
        self.relu1 = ops.ReLU()
        self.matmul2 = ops.MatMul()
        self.relu2 = ops.ReLU()
        self.matmul3 = ops.MatMul()

    def construct(self, x: Any) -> Any:
        x = self.flatten(x)
        x = self.matmul1(x, self.fc1_weight)
        x = self.relu1(x)
        x = self.matmul2(x, self.fc2_weight)
        x = self.relu2(x)
        return self.matmul3(x, self.fc3_weight)


def create_dataset() -> Any:
    rng = np.random.default_rng(1)
    images = rng.standard_normal((BATCHES * BATCH, 1, 28, 28)).astype(np.float32)
    labels = rng.integers(0, 10, BATCHES * BATCH).astype(np.int32)
    return ds.NumpySlicesDataset({"image": images, "label": labels}, shuffle=False).batch(BATCH)


class Job:
    """Eight ranks, of which this process is rank 0, without a controller."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processor: Any = None

    @property
    def joined(self) -> bool:
        return self.processor is not None

    def start(self, _env: Any, layout: Layout, source: Any, save_dir: Path, **_: Any) -> Any:
        self.processor = StubProcessor(save_dir, layout=layout)
        source.on_welcome(Rank(0), INCARNATION, self.directory / "pages")
        return self.processor


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    told = {"MS_ENABLE_TFT": "{TTP:1}", "MINDIO_FOR_MINDSPORE": "1", "RANK": "0", "WORLD_SIZE": str(CARDS)}
    for name, value in {**told, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adapter, "check_world", lambda ranks: None)
    monkeypatch.setattr(adapter, "UpdateBarrier", lambda *_: SimpleNamespace(wait=lambda: None, close=lambda: None))
    monkeypatch.setattr("mindspore.train._utils.get_rank", lambda: 0)
    started = Job(tmp_path)
    monkeypatch.setattr(
        session.Session, "start_processor", lambda _self, *given, **named: started.start(*given, **named)
    )
    session.reset()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.SEMI_AUTO_PARALLEL)
    yield started
    ms.reset_auto_parallel_context()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    session.reset()


def make_model() -> tuple[Any, Any]:
    net = Network()
    net.matmul1.shard(((2, 4), (4, 1)))
    net.relu1.shard(((4, 1),))
    optimizer = OptTFTWrapper(nn.SGD(net.trainable_params(), 1e-2))
    return ms.Model(net, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer), optimizer


def test_as_far_as_cpu_goes(job: Job) -> None:
    """``restore`` says that MindSpore could not compile the network, and why. Training fails as without ttp."""
    model, _ = make_model()
    with pytest.raises(ConfigError, match=r"only a compiled network has slices.*and MindSpore failed"):
        restore(model, create_dataset())
    with pytest.raises(Exception, match=r"CPU|init|device"):
        model.train(2, create_dataset(), dataset_sink_mode=False)
    assert not job.joined


def test_its_callbacks_save_a_slice_that_two_cards_hold(job: Job) -> None:
    """The first step compiles, so the job is joined after it. Ranks 0 and 4 hold the same slice, as documented."""
    model, optimizer = make_model()
    params = _InternalCallbackParam()
    params.update(
        train_network=model.train_network, network=model._network, optimizer=optimizer, cur_step_num=0,
        batch_num=BATCHES, train_dataset=create_dataset(), cur_epoch_num=1,
    )  # fmt: skip
    context = SimpleNamespace(original_args=lambda: params)
    callback = TFTRegister(0, "127.0.0.1", 30051, "./checkpoints/")
    callback.on_train_begin(context)
    assert not job.joined
    for step in range(1, 2 * BATCHES + 1):
        params.cur_step_num, params.cur_epoch_num = step, (step - 1) // BATCHES + 1
        callback.on_train_step_begin(context)
        if optimizer.reporter is not None:
            optimizer.reporter.begin_update()
        optimizer.global_step.set_data(ms.Tensor([step], ms.int32))
        if optimizer.reporter is not None:
            optimizer.reporter.end_update()
        model.train_network.parameter_layout_dict = CUT
        callback.on_train_step_end(context)
        assert job.joined and job.processor.gate.version == step
        check_saved(job, step)


def check_saved(job: Job, step: int) -> None:
    epoch, in_epoch = (step - 1) // BATCHES + 1, (step - 1) % BATCHES + 1
    registered: Any = session.current().adapter
    saved = job.directory / f"step_{step}"
    saved.mkdir()
    order = SaverOrder(Rank(0), job.processor.layout.shards_of(Rank(0)), How.AS_IS, (Rank(0),), True)
    pieces = registered.source.write_pieces(
        order=order, version=Version(step), draft=saved, generation=1, cancelled=lambda: False
    )
    assert [piece.shard for piece in pieces if piece.kind == "shard"] == ["slice_0"]
    found = ms.load_checkpoint(str(saved / "rank_0" / f"ttp_rank_0-{epoch}_{in_epoch}.ckpt"))
    assert int(found["step_num"].asnumpy()) == step and int(found["global_step"].asnumpy().item()) == step
    assert ms.restore_group_info_list(str(saved / "rank_0" / "group_info.pb")) == [0, 4]
