"""Loops without ``Model.train``: with ``ms.jit`` or without, with a loss scale and an average beside the network."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from mindspore import nn

from tests.adapters.mindspore.test_wrapper import MODES, Net, switched_on, whole_state_of
from tests.adapters.torch.stub_processor import INCARNATION, StubProcessor, commit, save, write
from ttp.adapters.mindspore import OptTTPWrapper, local_state
from ttp.adapters.mindspore.adapter import MindSporeAdapter
from ttp.adapters.mindspore.local_state import BEGAN, STREAMS, LocalState, Position, decode, digests
from ttp.core.decide import How
from ttp.core.layout import Layout, Rank
from ttp.processor.sampling import Blocks

pytestmark = [pytest.mark.xdist_group("mindspore"), pytest.mark.timeout(300)]

__all__ = ["switched_on"]

STEPS, SAVED = 6, 4
LARGE = 20_000
"""Elements of a parameter that is not copied in each step."""


class DiedError(Exception):
    """The process ends here."""


class Whole(nn.Cell):
    """The network with what the loop changes beside it: the loss scale, its counter, an average, sums, a critic with an
    optimizer of its own, and a large table that it first changes in the step ``SAVED``. Large weights are frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.scaler = ms.amp.DynamicLossScaler(64.0, 2, 2)
        self.scale, self.count = self.scaler.scale_value, self.scaler.counter
        self.average = ms.ParameterTuple(self.net.trainable_params()).clone(prefix="average", init="same")
        self.sum = ms.Parameter(ms.Tensor(np.zeros(LARGE, np.float32)), "sum", requires_grad=False)
        large = np.random.default_rng(3).standard_normal((LARGE, 2)).astype(np.float32)
        self.frozen, self.table = (
            ms.Parameter(ms.Tensor(large[:, at]), name, requires_grad=False)
            for at, name in enumerate(("frozen", "table"))
        )
        self.passes = ms.Parameter(ms.Tensor(np.zeros(1, np.float32)), "passes", requires_grad=False)
        self.critic = nn.Dense(4, 1)
        self.critic_optimizer = nn.Momentum(self.critic.trainable_params(), 0.01, 0.9)


class Loop:
    """A program's own training loop, which saves at the gate of the step after ``SAVED``.

    Ranks differ in BatchNorm's averages, and in a sum that is set to zero at the end of each step. With ``dies`` the
    process ends in the step ``SAVED``: before the ``gate``, ``in`` the update, or ``after`` it. If ``driven``, the loop
    tells when a step begins, as ``Model.train`` does, and its forward passes are counted.
    """

    def __init__(
        self, directory: Path, *, jit: bool, rank: int = 0, ranks: int = 1, dies: str = "", driven: bool = False
    ) -> None:
        ms.set_seed(2)
        self.whole = whole = Whole()
        whole.net.set_train()
        whole.net.norm.moving_mean.set_data(whole.net.norm.moving_mean + rank)
        self.rank, self.ranks, self.dies, self.driven, self.drawn = rank, ranks, dies, driven, list[float]()
        self.optimizer = OptTTPWrapper(nn.Adam(whole.net.trainable_params(), nn.CosineDecayLR(0.001, 0.1, 9)))
        self.adapter = MindSporeAdapter(whole, self.optimizer)
        processor: Any = StubProcessor(directory / "checkpoints", rank=rank, layout=Layout.data_parallel(ranks))
        (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
        self.processor = processor
        self.adapter.source.on_welcome(Rank(rank), INCARNATION, directory / "pages")
        self.adapter.attach(processor)
        self.optimizer.reporter = self
        self.saved = Future[Path]()
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
            pages = tuple(map(Rank, range(self.ranks)))
            with ThreadPoolExecutor(1) as pool:
                self.saved = pool.submit(save, self.adapter, self.processor, SAVED, How.AS_IS, pages=pages)
            self.processor.gate.open()
        self._die("gate")
        self.adapter.begin_update()
        self._die("in")

    def end_update(self) -> None:
        self.adapter.end_update()

    def _die(self, place: str) -> None:
        if (self._step, self.dies) == (SAVED, place):
            raise DiedError

    def train(self, first: int) -> dict[str, bytes]:
        rng = np.random.default_rng(1)
        x, y = (rng.standard_normal((STEPS, 8, width)).astype(np.float32) for width in (8, 4))
        for self._step in range(first + 1, STEPS + 1):
            if self.driven:
                self.adapter.step_begins(Position(step=self._step))
                self.whole.passes.set_data(self.whole.passes + 1)
            self.whole.sum.set_data(ms.Tensor(np.full(LARGE, self._step + self.rank, np.float32)))
            self.whole.critic_optimizer((ms.Tensor(y[self._step - 1][:1]), ms.Tensor(y[self._step - 1][0, :1])))
            self.step(ms.Tensor(x[self._step - 1]), ms.Tensor(y[self._step - 1]))
            self._die("after")
            self.drawn.append(np.random.random())
            self.whole.sum.set_data(ms.Tensor(np.zeros(LARGE, np.float32)))
            if self._step >= SAVED:
                self.whole.table.set_data(self.whole.table + 1)
            self.whole.scaler.adjust(ms.Tensor(True))
            for average, weight in zip(self.whole.average, self.whole.net.trainable_params(), strict=True):
                average.set_data(average * 0.9 + weight * 0.1)
            self.adapter.step_done()
        return whole_state_of(self.whole) | whole_state_of(self.optimizer)

    def go_on(self, checkpoint: Path) -> dict[str, bytes]:
        assert self.adapter.load(checkpoint, self.rank, self.ranks, protected=True) == SAVED
        self.processor.gate.set_version(SAVED)
        return self.train(SAVED)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_who_goes_on_from_it_ends_where_the_other_ends(mode: str, jit: bool, tmp_path: Path) -> None:
    ms.set_context(mode=MODES[mode])
    first = Loop(tmp_path, jit=jit)
    unbroken = first.train(0)
    checkpoint = first.saved.result(0)
    assert Loop(tmp_path, jit=jit).go_on(checkpoint) == unbroken


def test_what_is_drawn_or_seeded_between_restore_and_training_does_not_count(tmp_path: Path) -> None:
    """But between the trainings of a loop over epochs it belongs to the training."""
    first = Loop(tmp_path, jit=False)
    first.train(0)
    checkpoint = first.saved.result(0)
    second = Loop(tmp_path, jit=False)
    for several, size in ((False, SAVED), (True, SAVED + 1)):
        second.adapter.load(checkpoint, 0, 1, protected=True)
        assert (kept := second.adapter._capture.restored) and not kept.beside, "it may be large"
        second.adapter.position = Position(step=SAVED, batch_num=size)
        np.random.seed(1)
        second.adapter.training_begins(several=several)
        assert np.random.random() == first.drawn[SAVED]
        np.random.seed(1)
        second.adapter.training_begins(several=several)
        assert np.random.random() == np.random.RandomState(1).random(), "another training of the same process"
    second.adapter.load(checkpoint, 0, 1, protected=True)
    second.adapter.position = Position(step=SAVED, batch_num=SAVED)
    np.random.seed(1)
    second.adapter.training_begins(several=True)
    assert np.random.random() == np.random.RandomState(1).random()


def test_frozen_weights_are_saved_once_and_not_with_each_rank(tmp_path: Path) -> None:
    first = Loop(tmp_path, jit=False, ranks=2)
    Loop(tmp_path, jit=False, rank=1, ranks=2, dies="after").adapter.step_begins(Position(step=1))
    first.train(0)
    checkpoint = first.saved.result(0)
    (local,) = checkpoint.glob("rank_local_*")
    assert 2 * 4 * LARGE < local.stat().st_size < 3 * 4 * LARGE, "the sum, and the table, which has changed"
    again = Loop(tmp_path / "again", jit=False)
    again.whole.frozen.set_data(ms.Tensor(np.zeros(LARGE, np.float32)))
    again.adapter.load(checkpoint, 0, 2, protected=True)
    assert np.array_equal(again.whole.frozen.asnumpy(), first.whole.frozen.asnumpy())


def test_frozen_weights_that_change_late(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From the first change on they are copied. The value before it is not: a save of that version says so."""
    loop = Loop(tmp_path, jit=False)

    def image() -> LocalState:
        return decode(loop.adapter.source.read_pages((Rank(0),), loop.processor.gate.version).data[Rank(0)])

    assert {*image().unchanged} == {"frozen", "table"} and "frozen" not in image().beside
    loop.whole.frozen.asnumpy()[:] = 1  # a view on CPU
    save(loop.adapter, loop.processor, 0, How.AS_IS, pages=(Rank(0),))
    loop.processor.gate.open()
    (note,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert note.startswith("frozen had not changed since training began"), note
    loop.adapter.step_begins(Position(step=1))
    loop.adapter.step_ends()
    loop.adapter.begin_update()
    loop.adapter.end_update()
    assert {*image().unchanged} == {"table"} and "frozen" in image().beside


def test_restored_values_of_each_rank_are_copied_though_they_stay_as_they_were(tmp_path: Path) -> None:
    """A program begins with its own values, not with those that its rank has restored."""

    def launch(number: int, restored: Path | None) -> list[Loop]:
        loops = [Loop(tmp_path / str(number), jit=False, rank=rank, ranks=2) for rank in range(2)]
        for loop in loops:
            if restored is None:
                loop.whole.table.set_data(loop.whole.table + 1 + loop.rank)
            else:
                loop.adapter.load(restored, loop.rank, 2, protected=True)
                loop.processor.gate.set_version(number)
            loop.adapter.begin_update()
            loop.adapter.end_update()
        return loops

    def saved(loops: list[Loop], version: int) -> Path:
        checkpoint = save(loops[0].adapter, loops[0].processor, version, How.AS_IS, pages=(Rank(0), Rank(1)))
        loops[0].processor.gate.open()
        return checkpoint

    first = launch(0, None)
    last = launch(2, saved(launch(1, saved(first, 1)), 2))
    for before, after in zip(first, last, strict=True):
        assert np.array_equal(after.whole.table.asnumpy(), before.whole.table.asnumpy())


def test_of_large_weights_that_stay_unchanged_a_sample_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_state, "blocks_of", lambda *_args, **_named: Blocks(4, 2, LARGE, 8))
    loop = Loop(tmp_path, jit=False)
    capture = loop.adapter._capture

    def unchanged_after(elements: slice, versions: int) -> bool:
        capture.begin_anew()
        for version in range(versions):
            capture.capture(version, Position(step=version), final=True)
        value = loop.whole.frozen.asnumpy().copy()
        value[elements] += 1
        loop.whole.frozen.set_data(ms.Tensor(value))
        loop.adapter._memory.again()
        capture.capture(versions, Position(step=versions), final=True)
        assert capture._unchanged is not None
        return "frozen" in capture._unchanged

    assert unchanged_after(slice(100, 101), 6), "elements outside of the sample"
    assert not unchanged_after(slice(100, 101), 2), "at first all are read"
    assert not unchanged_after(slice(None), 6)


def test_a_rank_that_dies_in_its_step_gets_what_the_rest_of_the_step_made_of_replicas(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And keeps what the rest of the step does not change, such as BatchNorm's averages."""
    reference = Loop(tmp_path / "unbroken", jit=False, rank=1, ranks=2)
    unbroken = reference.train(0)
    for dies in ("in", "after"):
        caplog.clear()
        dead = Loop(tmp_path / dies, jit=False, rank=1, ranks=2, dies=dies)
        with pytest.raises(DiedError):
            dead.train(0)
        alive = Loop(tmp_path / dies, jit=False, rank=0, ranks=2)
        assert alive.train(0) != unbroken
        again = Loop(tmp_path / dies / "again", jit=False, rank=1, ranks=2)
        assert again.go_on(alive.saved.result(0)) == unbroken
        assert again.drawn == reference.drawn[SAVED:]
        (note,) = (each.getMessage() for each in caplog.records if "before the end of its step" in each.getMessage())
        assert note.endswith(": sum"), note


def in_two_pieces(adapter: Any, processor: Any, version: int, how: How, *, pages: tuple[Rank, ...]) -> Path:
    """Save as ``save`` does, with the page of rank 1 in a piece of its own: its launcher has sent it later."""
    processor.gate.close()
    pieces = write(adapter, processor, version, processor.layout.groups, how, pages=pages[:1])
    pieces += write(adapter, processor, version, (), how, pages=pages[1:], job_state=False, generation=2)
    return commit(adapter, processor, version, pieces)


@pytest.mark.parametrize("save_it", [save, in_two_pieces])
def test_what_only_forward_passes_change_comes_from_replicas_that_began_with_the_same(
    save_it: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that died before its gate had an older count of them. Where ranks differ (BatchNorm) it keeps its own."""
    monkeypatch.setattr(sys.modules[__name__], "save", save_it)
    dead = Loop(tmp_path, jit=False, rank=1, ranks=2, dies="gate", driven=True)
    with pytest.raises(DiedError):
        dead.train(0)
    alive = Loop(tmp_path, jit=False, rank=0, ranks=2, driven=True)
    alive.train(0)
    again = Loop(tmp_path / "again", jit=False, rank=1, ranks=2)
    again.adapter.load(alive.saved.result(0), 1, 2, protected=True)
    assert int(again.whole.passes.asnumpy()[0]) == SAVED
    assert "rank 1 died before the end of its step" in caplog.text, "averages and streams are behind"
    own = abs(again.whole.net.norm.moving_mean.asnumpy() - dead.whole.net.norm.moving_mean.asnumpy())
    assert own.max() < 0.5, "the averages of the ranks are 1 apart"


@pytest.mark.parametrize("passed", [False, True])
def test_what_a_step_began_with_has_its_own_names_on_a_rank_that_finished_it(passed: bool, tmp_path: Path) -> None:
    """What the forward pass has made of BatchNorm's averages depends on the rank's data."""
    images: list[bytes] = []

    class Page:
        def write(self, _version: int, _final: bool, image: list[Any], large: list[Any]) -> bool:
            images.append(b"".join([*map(bytes, image), *(bytes(part) for _, part in large)]))
            return False

    capture: Any = Loop(tmp_path, jit=False).adapter._capture
    capture.open_page(Page())
    capture.capture(1, Position(step=1), final=False, passed=passed)
    (image,) = images
    both, began = digests(image, False), {BEGAN + name for name in decode(image).beside}
    assert began < both.keys() > {STREAMS}
    assert digests(image, True).keys() == (both.keys() - began if passed else began)


def test_sigterm_reaches_python_though_threads_of_a_dataset_take_it(tmp_path: Path) -> None:
    """They would end the process at once, and nothing would be saved."""
    loop = Loop(tmp_path, jit=False)
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    pythons = handler_in_c()
    source = [np.zeros(2, np.float32)] * 8
    dataset = ds.GeneratorDataset(source, ["x"], num_parallel_workers=2, python_multiprocessing=False)
    assert sum(1 for _ in dataset.create_tuple_iterator(num_epochs=1)) == len(source)
    assert handler_in_c() != pythons, "MindSpore leaves the signal alone now"
    loop.adapter.step_begins(Position(step=1))
    assert handler_in_c() == pythons


def test_without_ttp_the_handler_of_sigterm_is_left_alone(tmp_path: Path) -> None:
    """``faulthandler.register``, for example, sets one that Python does not know."""
    adapter = Loop(tmp_path, jit=False).adapter
    adapter._processor = None
    faulthandler.register(signal.SIGTERM)
    try:
        its = handler_in_c()
        adapter.step_begins(Position(step=1))
        assert handler_in_c() == its
    finally:
        faulthandler.unregister(signal.SIGTERM)


def handler_in_c() -> bytes:
    """Return the address of the function that the kernel calls for SIGTERM."""
    action = ctypes.create_string_buffer(256)
    assert ctypes.CDLL(None).sigaction(int(signal.SIGTERM), None, action) == 0
    return action.raw[: ctypes.sizeof(ctypes.c_void_p)]
