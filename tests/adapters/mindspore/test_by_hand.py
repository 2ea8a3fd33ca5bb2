"""The version that a training begins with, however its state was loaded: its saves must not look older than
they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import pytest
from mindspore import nn
from mindspore.train import Callback

from tests.adapters.mindspore.test_wrapper import STEPS_PER_EPOCH, Net, data
from tests.adapters.torch.stub_processor import INCARNATION, StubProcessor, save
from ttp import session
from ttp.adapters.mindspore import OptTTPWrapper, TFTRegister, TrainFaultTolerance, callbacks, joining, read, resuming
from ttp.adapters.mindspore.adapter import MindSporeAdapter
from ttp.core.decide import How
from ttp.core.layout import Rank, Version
from ttp.core.messages import SaverOrder
from ttp.errors import CheckpointError, ConfigError, UsageError

pytestmark = pytest.mark.xdist_group("mindspore")

EPOCHS = 3
STEPS = EPOCHS * STEPS_PER_EPOCH
LAYOUT = {"l1.w": [[2, 4], [-1, 0], [784, 16], 0, True, ""]}


class Training:
    """A model whose callback joins a job without a controller."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ms.set_seed(2)
        self.directory = directory
        self.optimizer = OptTTPWrapper(nn.Momentum((net := Net()).trainable_params(), 0.05, 0.9))
        loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
        self.model = ms.Model(net, loss, self.optimizer)
        self.joined: list[MindSporeAdapter] = []
        (directory / "checkpoints").mkdir()
        for module in (callbacks, resuming):
            monkeypatch.setattr(module, "join", self.join)

    def join(self, network: Any, optimizer: Any, save_dir: Any, **_: Any) -> MindSporeAdapter:
        processor: Any = StubProcessor(self.directory / "checkpoints")
        self.joined.append(adapter := MindSporeAdapter(network, optimizer))
        adapter.source.on_welcome(Rank(0), INCARNATION, self.directory / f"pages{len(self.joined)}")
        self.processor = processor
        adapter.attach(processor)
        return adapter

    def train(self, callback: Callback, *more: Callback, first: int = 0, epochs: int = EPOCHS, **given: Any) -> None:
        rows = data(False)
        if first:
            rows.set_init_step(first)
        initial = given.pop("initial_epoch", first // STEPS_PER_EPOCH)
        self.model.train(epochs, rows, [*more, callback], dataset_sink_mode=False, initial_epoch=initial)

    @property
    def reached(self) -> tuple[int, int]:
        """The version and the step at the end."""
        return self.processor.gate.version, self.joined[-1].position.step


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"MS_ENABLE_TFT": "{TTP:1}", "MINDIO_FOR_MINDSPORE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    session.reset()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    session.reset()


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(tmp_path, monkeypatch)


def counted(training: Training, updates: int) -> None:
    """Set the optimizer's count of updates, as loading its state does."""
    training.optimizer.global_step.set_data(ms.Tensor([updates], ms.int32))


def register(directory: str = "d") -> TFTRegister:
    return TFTRegister(0, "127.0.0.1", 30051, directory)


# ------------------------------------------------------------------------------------------------- by hand, and again


@pytest.mark.parametrize(
    ("updates", "given", "reached"),
    [
        (0, {"first": 6}, (STEPS, STEPS)),  # as the documentation does it: only the network is loaded
        (5, {"first": 6}, (STEPS - 1, STEPS)),  # one of the six steps was skipped because of an overflow
        (0, {"initial_epoch": 1}, (STEPS, STEPS)),
        (0, {}, (STEPS, STEPS)),
    ],
    ids=["the dataset", "the optimizer", "the first epoch", "nothing is loaded"],
)
def test_what_knows_where_it_goes_on(
    training: Training, updates: int, given: Any, reached: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    counted(training, updates)
    training.train(register(), **given)
    assert training.reached == reached and "counts as older" not in caplog.text


def test_the_program_may_say_it(training: Training) -> None:
    training.train(TrainFaultTolerance("d", initial_step=1215))
    assert training.reached == (1215 + STEPS, 1215 + STEPS)


def test_a_second_training_of_a_process_goes_on_from_the_first(training: Training) -> None:
    training.train(register(), first=6)
    training.train(register(), epochs=1)
    assert len(training.joined) == 2
    assert training.reached == (STEPS + STEPS_PER_EPOCH, STEPS_PER_EPOCH)  # its data begin anew


def test_the_adapter_is_told_that_training_begins(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(MindSporeAdapter, "training_begins", lambda _, *, several: told.append(several))
    training.train(register(), epochs=1)
    assert told == [False]


def test_older_than_what_is_there_is_said(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    saved = training.directory / "checkpoints" / "tft_saved_checkpoints-step_1215"
    saved.mkdir()
    (saved / "manifest.json").touch()
    training.train(register(), epochs=1)
    assert "holds step 1215, and this training begins with step 0: what it saves counts as older" in caplog.text


def test_who_restores_before_ttp_is_on_is_heard_when_it_is(training: Training) -> None:
    """``restore`` may come before the callback, which knows the controller's address."""
    adapter = MindSporeAdapter(training.model.train_network, training.optimizer)
    adapter.begin(Version(6), callbacks._place(6, STEPS_PER_EPOCH))
    processor: Any = StubProcessor(training.directory / "checkpoints")
    adapter.attach(processor)
    assert processor.gate.version == 6


# ------------------------------------------------------------------------------------------------------- a late join


class SaveAfterFirst(Callback):
    """Saves the version of the first step as soon as the job is joined."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self._training = training
        self.saved: Path | None = None

    def on_train_step_end(self, run_context: Any) -> None:
        if self.saved is None:
            version = self._training.processor.gate.version
            self.saved = save(self._training.joined[0], self._training.processor, version)
            self._training.processor.gate.open()


@pytest.mark.parametrize(("first", "loaded"), [(0, 0), (6, 6), (6, 0)])
def test_a_network_that_is_cut_when_it_is_compiled_joins_after_its_first_step(
    first: int, loaded: int, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callback runs as in ``semi_auto_parallel``, which MindSpore does not compile on CPU."""
    monkeypatch.setattr(callbacks, "parallel_mode", lambda: "semi_auto_parallel")
    counted(training, loaded)
    saving = SaveAfterFirst(training)
    training.model.train(EPOCHS, rows_from(first), [register(), saving], initial_epoch=first // STEPS_PER_EPOCH)
    assert training.reached == (STEPS, STEPS)
    assert saving.saved is not None and saving.saved.name == f"tft_saved_checkpoints-step_{first + 1}"
    epoch, step = divmod(first, STEPS_PER_EPOCH)
    found = ms.load_checkpoint(str(saving.saved / "rank_0" / f"ttp_rank_0-{epoch + 1}_{step + 1}.ckpt"))
    assert (int(found["step_num"].asnumpy()), int(found["epoch_num"].asnumpy())) == (first + 1, epoch + 1)


def rows_from(first: int) -> Any:
    rows = data(False)
    rows.set_init_step(first)
    return rows


def test_a_first_step_that_was_skipped_is_no_update(training: Training) -> None:
    adapter = training.join(training.model.train_network, training.optimizer, "d")
    adapter.begin_by_hand(callbacks._place(1, STEPS_PER_EPOCH), 0, made=1)
    assert training.processor.gate.version == 0


# ------------------------------------------------------------------------------------------- the program's own loading


def loaded(training: Training, **numbers: Any) -> dict[str, Any]:
    """Return what ``ckpt_load_fn`` loads: the network's parameters, and these numbers."""
    state = {p.name: ms.Parameter(p.value(), name=p.name) for p in training.model.train_network.get_parameters()}
    return state | {n: ms.Parameter(ms.Tensor(value, ms.int32), name=n) for n, value in numbers.items()}


@pytest.mark.parametrize("shaped", [int, lambda value: [value]], ids=["scalars", "of one element"])
def test_what_ckpt_load_fn_has_loaded_can_be_saved_at_once(training: Training, shaped: Callable[[int], Any]) -> None:
    """The page exists before the first update, in which a rank may die."""
    numbers = {"epoch_num": 2, "step_num": 6, "batch_num": STEPS_PER_EPOCH}
    state = loaded(training, global_step=[6], **{name: shaped(value) for name, value in numbers.items()})
    resumed = resuming.restore(training.model, rows_from(0), ckpt_load_fn=lambda: (state, False))
    assert (resumed.version, resumed.step, resumed.initial_epoch) == (6, 6, 1)
    saved = save(training.joined[0], training.processor, 6)
    assert (saved / "rank_0" / "ttp_rank_0-2_2.ckpt").exists()


@pytest.mark.parametrize("step", [6, 2 * STEPS_PER_EPOCH])
def test_without_the_dataset_a_finished_epoch_is_not_trained_again(training: Training, step: int) -> None:
    """Its last step belongs to it, but training continues with the next one."""
    epoch = callbacks._place(step, STEPS_PER_EPOCH).epoch
    state = loaded(training, epoch_num=epoch, step_num=step, batch_num=STEPS_PER_EPOCH, global_step=[step])
    resumed = resuming.restore(training.model, ckpt_load_fn=lambda: (state, False))
    assert (resumed.version, resumed.step, resumed.initial_epoch) == (step, step, step // STEPS_PER_EPOCH)


def test_a_state_of_ckpt_load_fn_that_lacks_parameters_is_refused(training: Training) -> None:
    """The parameters that it lacks would keep the values of a new network."""
    state = loaded(training, step_num=6)
    lost = next(p.name for p in training.model.train_network.trainable_params())
    del state[lost]
    with pytest.raises(UsageError, match=lost):
        resuming.restore(training.model, ckpt_load_fn=lambda: (state, False))


def test_parameters_of_which_each_rank_saved_a_part_are_sent_by_mindspore(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``load()`` tells with its second value that the file lacks what other ranks have."""
    told: list[Any] = []

    def load_param_into_net(net: Any, state: Any, **settings: Any) -> Any:
        told.append(settings["remove_redundancy"])
        return ["sent by another rank"], []

    monkeypatch.setattr(ms, "load_param_into_net", load_param_into_net)
    state = {"step_num": ms.Parameter(ms.Tensor(6, ms.int32), name="step_num")}
    resuming.restore(training.model, ckpt_load_fn=lambda: (state, True))
    assert told == [True]


def test_a_function_of_the_program_cannot_save_the_state_before_an_update(training: Training) -> None:
    """It would save the parameters after the update, as those of the step before."""
    training.optimizer.undo = "preimage"
    with pytest.raises(UsageError, match=r"undo='preimage' .* is not for TrainFaultTolerance\(ckpt_save_fn=\)"):
        training.train(TrainFaultTolerance(ckpt_save_fn=lambda *_: None))
    assert training.joined == []


@pytest.mark.parametrize(("first", "on_device"), [(0, False), (5, True)])
def test_a_function_of_the_program_is_told_of_the_saved_step_not_of_the_running_one(
    training: Training, first: int, on_device: bool
) -> None:
    """MindFormers names its file, and the step in it, after ``cb_params``: with the running step it would skip data."""
    told: list[Any] = []

    def saved(cb_params: Any, append_dict: dict[str, Any]) -> None:
        told.append((append_dict["step_num"], cb_params.cur_step_num, cb_params.cur_epoch_num))
        told.append(append_dict.get("__exception_save__"))

    class Running(Callback):
        def on_train_step_begin(self, run_context: Any) -> None:
            if first + (live := run_context.original_args()).cur_step_num == 9:  # the first step of the third epoch
                source: Any = training.joined[-1].source
                source._memory.on_host = not on_device
                order = SaverOrder(Rank(0), training.processor.layout.shards_of(Rank(0)), How.AS_IS, (Rank(0),), True)
                how = {"version": Version(8), "draft": training.directory, "generation": 1, "cancelled": lambda: False}
                for shards in (order.shards, ()):
                    assert source.write_pieces(order=replace(order, shards=shards), **how) == []
                source._memory.on_host = True
                told.append((live.cur_step_num, live.cur_epoch_num))

    training.train(TrainFaultTolerance(ckpt_save_fn=saved, initial_epoch=1), Running(), first=first)
    # On a device this makes MindSpore copy on a stream of its own; on CPU it would wait for a stream for ever.
    assert told == [(8, 8 - first, 2), on_device or None, (9 - first, 3)]


# ---------------------------------------------------------------------------------- where the controller is


def in_job(monkeypatch: pytest.MonkeyPatch, rank: int, address: str = "pod-0") -> None:
    told = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank), "MS_WORKER_NUM": "4", "MASTER_ADDR": address}
    for name, value in told.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("said", "launcher", "home"),
    [
        ("10.0.0.9", {"MASTER_ADDR": "pod-0"}, "10.0.0.9"),
        ("127.0.0.1", {"MASTER_ADDR": "pod-0"}, "pod-0"),  # as in the documentation's program, on several hosts
        ("127.0.0.1", {"MS_SCHED_HOST": "10.0.0.7"}, "10.0.0.7"),
        ("127.0.0.1", {}, "127.0.0.1"),
        ("", {}, "127.0.0.1"),
    ],
)
def test_the_controller_is_where_the_program_says(
    said: str, launcher: dict[str, str], home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_job(monkeypatch, 3)
    monkeypatch.delenv("MASTER_ADDR")
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    joining.meet_at(said, 30051, 2)
    assert session.current().config.port == 30051
    assert os.environ.pop("MASTER_ADDR") == home


@pytest.mark.parametrize(
    ("rank", "address", "why"),
    [(4, "127.0.0.1", "the job has 4 workers"), (2, "203.0.113.7", "the controller would run nowhere")],
)
def test_a_controller_that_nobody_could_start_is_refused(
    rank: int, address: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_job(monkeypatch, 2)
    with pytest.raises(ConfigError, match=why):
        joining.meet_at(address, 30051, rank)


def test_the_launchers_controller_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    in_job(monkeypatch, 2)
    monkeypatch.setenv("TTP_PORT", "18000")
    joining.meet_at("203.0.113.7", 30051, 2)
    assert session.current().config.port == 18000
    assert os.environ["MASTER_ADDR"] == "pod-0"


# ------------------------------------------------------------------------------------------- slices, before compiling


class Sliced:
    """A stand-in for a model in a mode that cuts parameters, as far as ``restore`` looks at it."""

    def __init__(self, compile_it: Callable[[Any], Any], layout: Any = None) -> None:
        self.train_network = SimpleNamespace(parameter_layout_dict=layout)
        self.infer_train_layout = compile_it
        self._optimizer = self._network = None


def refuses(_dataset: Any) -> Any:
    raise RuntimeError("Currently dataset sink mode is not supported when the device target is CPU")


def test_a_network_is_compiled_before_slices_are_restored_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "parallel_mode", lambda: "semi_auto_parallel")
    rows = object()
    given: list[Any] = []

    def compile_it(dataset: Any) -> Any:
        given.append(dataset)
        return LAYOUT

    assert resuming._compiled(Sliced(compile_it), rows) == LAYOUT and given == [rows]
    assert resuming._compiled(Sliced(refuses, LAYOUT), rows) == LAYOUT  # it is compiled already
    with pytest.raises(ConfigError, match=r"Call model\.infer_train_layout\(dataset\).*sink mode is not supported"):
        resuming._compiled(Sliced(refuses), rows)
    with pytest.raises(ConfigError, match=r"or give restore\(\) the dataset"):
        resuming._compiled(Sliced(compile_it), None)
    monkeypatch.setattr(resuming, "parallel_mode", lambda: "data_parallel")
    assert resuming._compiled(Sliced(refuses), rows) is None


def test_restore_compiles_the_network_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """An uncompiled network has whole parameters, so the job would get a wrong layout."""

    class JoinedError(Exception):
        pass

    def join(*_args: Any, compiled: Any, **_more: Any) -> Any:
        assert compiled == LAYOUT
        raise JoinedError

    monkeypatch.setattr(resuming, "parallel_mode", lambda: "semi_auto_parallel")
    monkeypatch.setattr(resuming, "join", join)
    monkeypatch.setattr(resuming, "optimizer_of", lambda *_: None)
    model: Any = Sliced(lambda _dataset: LAYOUT)
    with pytest.raises(JoinedError):
        resuming.restore(model, object(), "d")


@pytest.mark.parametrize(("mode", "said"), [("semi_auto_parallel", "not compiled yet"), ("data_parallel", "another")])
def test_a_slice_and_a_whole_parameter_are_told_from_another_network(
    mode: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "parallel_mode", lambda: mode)
    memory: Any = SimpleNamespace(held={"w": SimpleNamespace(dtype="Float32", shape=(8, 4))})
    with pytest.raises(CheckpointError, match=said):
        read._check_fits(memory, {"w": SimpleNamespace(dtype="Float32", shape=(4, 4))}, Path("rank_0.ckpt"))
