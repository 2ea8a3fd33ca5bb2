"""One rank saves while it stands at the gate of the next update, and another network goes on from that, bit for bit.

The forward pass of the next step has run by then, so BatchNorm's averages are ahead of the saved version.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from mindspore import nn
from mindspore.train import Callback
from mindspore.train.callback import _InternalCallbackParam

from tests.adapters.mindspore.jobs import add_manifest
from tests.adapters.mindspore.test_wrapper import (
    MODES,
    OPTIMIZERS,
    STEPS_PER_EPOCH,
    Net,
    data,
    switched_on,
    whole_state_of,
)
from tests.adapters.torch.stub_processor import INCARNATION, StubProcessor, save
from tests.waiting import until
from ttp.adapters.mindspore import OptTTPWrapper, restore
from ttp.adapters.mindspore.adapter import MindSporeAdapter
from ttp.adapters.mindspore.callbacks import Protection, _place
from ttp.adapters.mindspore.local_state import LocalState, Position
from ttp.adapters.mindspore.memory import Memory
from ttp.adapters.mindspore.source import MindSporeSource
from ttp.core.decide import How
from ttp.core.layout import Rank, Version
from ttp.core.messages import Phase
from ttp.errors import CheckpointError, ConfigError, OtherModelError, UsageError
from ttp.mindspore_files.reshard import Wish, reshard
from ttp.processor import paged_source

pytestmark = pytest.mark.xdist_group("mindspore")

__all__ = ["switched_on"]

EPOCHS = 3
SAVED = 6
"""In the middle of the second epoch."""


class Training:
    """A model, its adapter and a processor without a controller."""

    def __init__(self, directory: Path, undo: str | None = None, net: nn.Cell | None = None) -> None:
        ms.set_seed(2)
        net = net or Net()
        self.wrapped = OptTTPWrapper(OPTIMIZERS["momentum, groups"](net), undo)
        loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
        self.model = ms.Model(net, loss, self.wrapped)
        self.adapter = MindSporeAdapter(self.model.train_network, self.wrapped)
        processor: Any = StubProcessor(directory / "checkpoints")
        self.processor = processor
        (directory / "checkpoints").mkdir(exist_ok=True)
        self.adapter.source.on_welcome(Rank(0), INCARNATION, directory / "pages")
        self.adapter.attach(processor)

    def train(self, callback: Driver, first: int = 0) -> dict[str, bytes]:
        rows = data(False)
        rows.set_init_step(first)
        self.model.train(EPOCHS, rows, [callback], dataset_sink_mode=False, initial_epoch=first // STEPS_PER_EPOCH)
        return whole_state_of(self.model.train_network)


def test_a_save_waits_for_the_evaluation_in_a_callback_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the state from before the callbacks is saved, although an average, for example, was made before it."""
    training = Training(tmp_path)
    source, clock = training.adapter.source, [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += 0.5
        source.in_step = clock[0] < evaluates_s

    monkeypatch.setattr(paged_source, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    for evaluates_s, done in ((8.0, True), (1000.0, False)):  # noqa: B007 - sleep() reads it
        clock[0], source.in_step = 0.0, True
        source.wait_post_step(lambda: False)
        assert source.post_step_done() is done and clock[0] <= 10.5
        assert ("is not in the checkpoint" in caplog.text) is not done
    gate = training.processor.gate
    gate.close()
    second = threading.Thread(target=gate.begin_update, daemon=True)  # of the same step, which may make several
    second.start()
    until(lambda: gate.state().parked)
    for broken in (False, True):  # the training function has raised
        training.processor.broken = broken
        clock[0], source.in_step = 0.0, True
        source.wait_post_step(lambda: False)
        assert clock[0] < 5.0, "the step cannot end"
        gate.open()
        second.join()


class Driver(Callback):
    """Reports like the package's callbacks, and saves on another thread at the gate of the step after ``SAVED``."""

    def __init__(self, training: Training, first: int = 0, how: How | None = None, version: int = SAVED) -> None:
        super().__init__()
        self._training, self._step, self._how, self._version = training, first, how, version
        self.saved = Future[Path]()
        if how is not None:
            training.wrapped.reporter = self

    def on_train_step_begin(self, run_context: Any) -> None:
        self._step += 1
        epoch = run_context.original_args().cur_epoch_num
        self._training.adapter.step_begins(Position(epoch, self._step, STEPS_PER_EPOCH))

    def on_train_step_end(self, run_context: Any) -> None:
        self._training.adapter.step_ends()

    def begin_update(self) -> None:
        if self._step == self._version + 1 and self._how is How.AS_IS:
            self._save()
        self._training.adapter.begin_update()
        if self._step == self._version + 1 and self._how is How.UNDO:
            self._training.processor.gate.mark_torn()
            self._save()

    def end_update(self) -> None:
        self._training.adapter.end_update()

    def _save(self) -> None:
        assert self._how is not None
        with ThreadPoolExecutor(1) as pool:
            self.saved = pool.submit(save, self._training.adapter, self._training.processor, self._version, self._how)
        self._training.processor.gate.open()


CASES = [("graph", How.AS_IS), ("pynative", How.AS_IS), ("graph", How.UNDO)]


def saved_by(training: Training) -> Path:
    """Train, and return the checkpoint that is saved meanwhile."""
    driver = Driver(training, how=How.AS_IS)
    training.train(driver)
    return driver.saved.result(0)


@pytest.mark.parametrize(("mode", "how"), CASES)
def test_who_goes_on_from_it_ends_where_the_other_ends(mode: str, how: How, tmp_path: Path) -> None:
    ms.set_context(mode=MODES[mode])
    first = Training(tmp_path, "preimage" if how is How.UNDO else None)
    driver = Driver(first, how=how)
    unbroken = first.train(driver)
    checkpoint = driver.saved.result(0)
    assert (checkpoint / "rank_0" / f"ttp_rank_0-2_{SAVED - STEPS_PER_EPOCH}.ckpt").exists()
    assert ms.restore_group_info_list(str(checkpoint / "rank_0" / "group_info.pb")) == [0]

    second = Training(tmp_path)
    assert second.adapter.load(checkpoint, 0, 1, protected=True) == SAVED
    assert second.adapter.position == Position(2, SAVED, STEPS_PER_EPOCH)
    second.processor.gate.set_version(SAVED)
    assert second.train(Driver(second, SAVED), SAVED) == unbroken


def test_a_parameter_that_the_program_moves_is_read_at_its_new_place() -> None:
    """``set_data`` moves a parameter; whatever a network has besides, the saver must not read the place it has left."""
    weights = [ms.Parameter(ms.Tensor([float(number)]), name=f"w{number}") for number in range(40)]
    memory = Memory(weights)
    for weight in weights:
        weight.set_data(ms.Tensor([-1.0]))
        memory.again()
        assert memory.of(weight.name).array.tolist() == [-1.0], weight.name


class Averaging(Driver):
    """Changes a parameter at the end of each epoch."""

    def on_train_epoch_end(self, run_context: Any) -> None:
        (average,) = (p for p in self._training.adapter.network.get_parameters() if p.name == "average")
        average.set_data(average * 2)


def test_what_callbacks_change_at_the_end_of_an_epoch_belongs_to_its_last_step(tmp_path: Path) -> None:
    def training() -> Training:
        net = Net()
        net.average = ms.Parameter(ms.Tensor(1.0, ms.float32), name="average", requires_grad=False)
        return Training(tmp_path, net=net)

    first = training()
    driver = Averaging(first, how=How.AS_IS, version=STEPS_PER_EPOCH)
    unbroken = first.train(driver)
    checkpoint = driver.saved.result(0)
    second = training()
    assert second.adapter.load(checkpoint, 0, 1, protected=True) == STEPS_PER_EPOCH
    second.processor.gate.set_version(STEPS_PER_EPOCH)
    assert second.train(Averaging(second, STEPS_PER_EPOCH), STEPS_PER_EPOCH) == unbroken


class Seen(Callback):
    """Records the first number of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[float] = []

    def on_train_step_end(self, run_context: Any) -> None:
        self.numbers.append(float(run_context.original_args().train_dataset_element[0].asnumpy().flat[0]))


@pytest.mark.parametrize("fast", [True, False])
def test_a_dataset_draws_the_same_numbers_again_without_mindspores_fast_recovery(
    fast: bool,
) -> None:
    """As docs/mindspore.md says of random operations of a dataset."""

    def numbers(first: int) -> list[float]:
        generator, seen, net = np.random.default_rng(9), Seen(), Net()
        rows = data(False).map(lambda x: (x + generator.random(x.shape, np.float32),), ["x"], num_parallel_workers=1)
        rows.set_init_step(first)
        loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
        model = ms.Model(net, loss, nn.SGD(net.trainable_params()))
        model.train(EPOCHS, rows, [seen], dataset_sink_mode=False, initial_epoch=first // STEPS_PER_EPOCH)
        return seen.numbers

    before = ds.config.get_fast_recovery()
    ds.config.set_fast_recovery(fast)
    try:
        assert (numbers(SAVED) == numbers(0)[SAVED:]) is not fast
    finally:
        ds.config.set_fast_recovery(before)


def test_a_checkpoint_of_another_network_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    checkpoint = saved_by(Training(tmp_path))
    other = Net()
    other.last = nn.Dense(16, 5)
    second = Training(tmp_path, net=other)
    before = whole_state_of(second.model.train_network)
    with pytest.raises(
        OtherModelError, match=r"another network: last.weight is Float32\[4, 16\] there and Float32\[5, 16\]"
    ):
        second.adapter.load(checkpoint, 0, 1, protected=False)
    assert whole_state_of(second.model.train_network) == before


@pytest.mark.parametrize("array", [np.ones(4, np.complex64), np.zeros(0, np.float32)])
def test_what_mindspore_could_not_load_is_refused_when_training_begins(array: Any, tmp_path: Path) -> None:
    net = Net()
    net.extra = ms.Parameter(ms.Tensor(array), name="extra", requires_grad=False)
    with pytest.raises(ConfigError, match=r"parameter 'extra' is .*, which mindspore.load_checkpoint cannot read"):
        Training(tmp_path, net=net)


def test_restore_needs_an_optimizer() -> None:
    with pytest.raises(UsageError, match="Model has no optimizer: give it one"):
        restore(ms.Model(Net()))


def test_what_reshard_makes_is_restored_with_its_position(tmp_path: Path) -> None:
    checkpoint = saved_by(Training(tmp_path))
    made = tmp_path / "made" / checkpoint.name
    reshard(Wish(checkpoint, made), lambda _what, _total: lambda _count: None)
    second = Training(tmp_path)
    assert second.adapter.load(made, 0, 1, protected=False) == SAVED
    assert second.adapter.position == Position(2, SAVED, STEPS_PER_EPOCH)


def test_without_a_position_nothing_is_changed(tmp_path: Path) -> None:
    training = Training(tmp_path)
    values = {held.name: (held.array + 1).astype(held.array.dtype) for held in training.adapter._memory.held.values()}
    (tmp_path / "step" / "rank_0").mkdir(parents=True)
    file = tmp_path / "step" / "rank_0" / "a.ckpt"
    ms.save_checkpoint([{"name": n, "data": ms.Tensor(v)} for n, v in values.items()], str(file), crc_check=True)
    add_manifest(tmp_path / "step", {"model": (0,)}, 6)
    before = whole_state_of(training.model.train_network)
    with pytest.raises(CheckpointError, match=r"does not tell its position in the data: .* no entry step_num"):
        training.adapter.load(tmp_path / "step", 0, 1, protected=False)
    assert whole_state_of(training.model.train_network) == before


def test_an_update_that_the_program_left_is_no_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its optimizer raised; the loop caught the exception and continues with the next step."""
    training = Training(tmp_path, "preimage")
    adapter, gate = training.adapter, training.processor.gate
    adapter.begin_update()
    gate.close()
    thread = threading.Thread(target=adapter.begin_update, daemon=True)
    thread.start()
    while not gate.state().parked:
        assert thread.is_alive()
    assert gate.state().phase is Phase.TORN and adapter.source.has_preimage
    gate.open()
    thread.join(10)
    adapter.end_update()
    assert gate.version == 2 and gate.state().phase is Phase.IDLE
    assert not adapter.source.has_preimage, "half an update is nothing to go back to"
    (record,) = caplog.records
    assert "the update after version 0 was left by an exception" in record.getMessage()


@pytest.mark.parametrize(("dtype", "kind", "scale"), [("Float32", np.float32, 1024.0), ("Float16", np.float16, 1.0)])
def test_files_of_ttp_and_of_the_program_have_the_loss_scale_of_the_version(
    dtype: str, kind: Any, scale: float, tmp_path: Path
) -> None:
    """A parameter of that name and another type is the program's own, and does not prevent the save."""
    source: Any = Training(tmp_path).adapter.source
    source.cb_params = _InternalCallbackParam()
    local = LocalState(Position(2, SAVED, 4), True, (b"",) * 4, b"", {"scale_sense": (dtype, (), kind(1024).tobytes())})
    told: list[dict[str, Any]] = []
    order: Any = SimpleNamespace(rank=Rank(0), shards=("whole",))
    assert source._by_the_program(lambda _, numbers: told.append(numbers), order, Version(SAVED), local) == []
    assert told[0]["loss_scale"] == scale
    assert source._append_dict(0, SAVED, local)["loss_scale"] == scale, "in a file of ttp too"


@pytest.mark.parametrize(("sinks", "epoch"), [(True, 3), (False, 1)])
def test_a_function_of_the_program_is_told_of_training_in_an_evaluation_too(
    sinks: bool, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``Model.fit`` evaluates with the ``cb_params`` of training, and counts its own steps in them."""
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "1")
    live: Any = _InternalCallbackParam(cur_step_num=1, cur_epoch_num=1, dataset_sink_mode=sinks, batch_num=1)
    live.train_dataset = data(False)
    source = MindSporeSource(Mock(), Mock(), ())
    source.cb_params = live
    adapter: Any = Mock(begun=True, position=_place(0, STEPS_PER_EPOCH), source=source)
    Protection("d")._begin(adapter, live)
    live.update(cur_step_num=9, cur_epoch_num=epoch, dataset_sink_mode=not sinks, mode="eval")
    told = source._parameters_at(_place(3, STEPS_PER_EPOCH))
    assert (told.cur_step_num, told.cur_epoch_num) == (3, epoch)
