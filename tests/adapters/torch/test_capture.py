"""Buffers, ``extra_state`` and random streams are written to a page and restored from it."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.adapters.torch.pages import hashed_from_now_on, read, written
from tests.adapters.torch.stub_processor import Stateful
from ttp.adapters.torch.local_state import buffers as buffers_module
from ttp.adapters.torch.local_state.capture import LocalCapture
from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.adapters.torch.local_state.image import decode
from ttp.errors import CheckpointError, OtherModelError, UsageError
from ttp.processor.local_state.pages import PageWriter

LARGE = buffers_module.LARGE_BYTES // 4  # floats


class Cursor(Stateful):
    def __init__(self) -> None:
        super().__init__(index=0, seen=(1, 2))


class Constant(Cursor):
    ttp_constant = True


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.BatchNorm1d(4))


class TestRoundTrip:
    def test_everything_comes_back(self, page: PageWriter) -> None:
        model, cursor = network(), Cursor()
        capture = LocalCapture(model, ExtraState({"data": cursor}), page=page)
        model(torch.randn(8, 4))
        cursor.state["index"] = 7
        capture.capture(3, final=True)
        expected = {name: tensor.clone() for name, tensor in model.named_buffers()}
        numbers = [random.random(), float(torch.rand(()))]
        model(torch.randn(8, 4))
        cursor.state["index"] = 9

        fresh, other = network(), Cursor()
        restored = LocalCapture(fresh, ExtraState({"data": other}))
        assert restored.restore(read(page, 3)) == []
        assert [random.random(), float(torch.rand(()))] == numbers
        assert other.state == {"index": 7, "seen": (1, 2)}
        for name, tensor in fresh.named_buffers():
            assert torch.equal(tensor, expected[name]), name
        assert not capture.problem

    def test_a_page_made_again_gets_all_although_nothing_has_changed(self, page: PageWriter, tmp_path: Path) -> None:
        capture = LocalCapture(network(), page=page)
        capture.capture(3, final=False)
        again = PageWriter(tmp_path / "again", 0)
        capture.open_page(again)
        capture.capture(3, final=True)
        assert read(again, 3).buffers.keys() == read(page, 3).buffers.keys()
        again.close()

    def test_wrappers_leave_no_trace_in_the_names(self, page: PageWriter) -> None:
        LocalCapture(nn.ModuleDict({"_checkpoint_wrapped_module": network()}), page=page).capture(1, final=True)
        assert set(read(page, 1).buffers) == {name for name, _ in network().named_buffers()}

    def test_every_dtype_and_shape(self, page: PageWriter) -> None:
        model = nn.Module()
        made = {
            "brain": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            "flag": torch.tensor([[True], [False]]),
            "scalar": torch.tensor(7),
            "imaginary": torch.tensor([1 + 2j]),
            "empty": torch.empty(0, 3),
            "transposed": torch.arange(6.0).reshape(2, 3).t(),
            "strided": torch.arange(6)[::2],
        }
        made |= {"conjugated": made["imaginary"].conj(), "negated": made["imaginary"].conj().imag}
        for name, tensor in made.items():
            model.register_buffer(name, tensor)
        model.register_buffer("none", None)
        LocalCapture(model, page=page).capture(1, final=True)
        back = read(page, 1).buffers
        assert set(back) == set(made)
        for name, tensor in made.items():
            assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name

    def test_without_a_page_nothing_happens(self) -> None:
        capture = LocalCapture(network())
        capture.capture(1, final=True)
        assert not capture.problem


@pytest.mark.parametrize(("moves", "told"), [((True, True), True), ((True, False), False), ((False,) * 3, False)])
def test_streams_that_move_behind_the_backward_pass_are_told(
    page: PageWriter, caplog: pytest.LogCaptureFixture, moves: tuple[bool, ...], told: bool
) -> None:
    capture = LocalCapture(network(), page=page)
    for version, moved in enumerate(moves, 1):
        random.random()  # the forward pass of any program draws
        capture.capture(version, final=False)
        if moved:
            random.random()
        capture.look_again(version)
        capture.look_again(version)  # a second optimizer's gate, behind its forward pass
        random.random()  # in the update
        capture.capture(version, final=True)
    assert ("random streams move between loss.backward()" in caplog.text) == told


class TestBuffersChange:
    """The page has a buffer's present value, in whatever way the buffer was changed."""

    WAYS = (
        lambda m: m.b.add_(1),
        lambda m: m.b.data.add_(1),
        lambda m: setattr(m, "b", m.b + 1),
        lambda m: setattr(m.b, "data", m.b.data + 1),
        lambda m: m.b.set_(m.b + 1),
    )

    @pytest.mark.parametrize("size", [3, LARGE, LARGE + 5])
    @pytest.mark.parametrize("way", range(len(WAYS)))
    def test_at_every_update(self, page: PageWriter, size: int, way: int) -> None:
        model: Any = nn.Module()
        model.register_buffer("b", torch.zeros(size))
        capture = LocalCapture(model, page=page)
        with torch.no_grad():
            for version in range(1, 20):
                for final in (False, True):
                    self.WAYS[way](model)
                    capture.capture(version, final)
                    found = read(page, version).buffers["b"]
                    assert torch.equal(found, model.b) and float(found[-1]) == 2 * version - 1 + final

    @pytest.mark.parametrize("way", [0, 2, 3, 4])
    def test_now_and_then(self, page: PageWriter, way: int) -> None:
        """Writes through ``.data`` to a large buffer are found after many versions without a change."""
        model = nn.Module()
        model.register_buffer("b", torch.zeros(LARGE))
        capture = LocalCapture(model, page=page)
        with torch.no_grad():
            for version in range(1, 60):
                if version % 25 == 0:
                    self.WAYS[way](model)
                capture.capture(version, final=True)
                assert float(read(page, version).buffers["b"][0]) == version // 25

    def test_large_batch_norm_does_not_count_its_writes(self, page: PageWriter) -> None:
        model: Any = nn.BatchNorm1d(LARGE)
        capture = LocalCapture(model, page=page)
        for version in range(1, 14):
            if version > 10:
                model(torch.randn(3, LARGE))
            capture.capture(version, final=True)
            assert torch.equal(read(page, version).buffers["running_var"], model.running_var)

    def test_large_constant_ones_are_not_copied_again(self, page: PageWriter, monkeypatch: pytest.MonkeyPatch) -> None:
        model: Any = nn.Module()
        model.register_buffer("mask", torch.ones(LARGE))
        capture = LocalCapture(model, page=page)
        for version in range(1, 9):
            capture.capture(version, final=True)
        hashed = hashed_from_now_on(monkeypatch)
        for version in range(9, 20):
            capture.capture(version, final=True)
        assert max(hashed) < 4 * LARGE
        assert torch.equal(read(page, 19).buffers["mask"], model.mask)

    def test_a_view_that_was_left_is_not_read(self, page: PageWriter) -> None:
        """Other tensors may use memory that a buffer no longer has."""
        model = nn.Module()
        model.register_buffer("b", torch.zeros(1000))
        capture = LocalCapture(model, page=page)
        for version in range(1, 30):
            model.b.data = torch.full((version,), float(version))
            capture.capture(version, final=True)
            assert read(page, version).buffers["b"].tolist() == [float(version)] * version


class TestExtraState:
    def test_what_an_object_draws_when_it_is_asked_again_is_no_part_of_the_streams(self, page: PageWriter) -> None:
        """Torchdata's loader makes its iterator then and draws a seed, which in the unbroken run happened earlier."""

        class Loader(Cursor):
            made = False

            def state_dict(self) -> dict[str, Any]:
                if not self.made:
                    self.made, self.seed = True, torch.rand(())
                return super().state_dict()

            def load_state_dict(self, state: dict[str, Any]) -> None:
                super().load_state_dict(state)
                self.made = False

        LocalCapture(network(), ExtraState(Loader()), page=page).capture(1, final=True)
        expected = torch.rand(3)
        loader = Loader()
        LocalCapture(network(), ExtraState(loader)).restore(read(page, 1))
        loader.state_dict()
        assert torch.equal(torch.rand(3), expected)

    def test_constants_are_asked_only_for_a_checkpoint(self, page: PageWriter) -> None:
        constant = Constant()
        extra = ExtraState({"c": constant, "d": Cursor()})
        LocalCapture(network(), extra, page=page).capture(1, final=True)
        assert set(read(page, 1).extra) == {"d"}
        constant.state["index"] = 5
        saved = extra.capture_constant()
        constant.state["index"] = 6
        notes = extra.restore(saved)
        assert constant.state["index"] == 5
        assert notes == ["extra_state['d'] was not saved: it keeps its initial state"]

    def test_constants_on_a_device_are_refused(self) -> None:
        constant = Constant()
        constant.state["index"] = torch.zeros(1, device="meta")
        with pytest.raises(UsageError, match="keep it on the CPU"):
            ExtraState(constant)

    def test_modules_are_replicated_state(self) -> None:
        average = torch.optim.swa_utils.AveragedModel(network())
        extra = ExtraState({"ema": average, "data": Cursor()})
        assert extra.modules == {"ema": average}
        assert extra.changing == ("data",)
        assert extra.capture_constant() == {}

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            (object(), r"extra_state is a object without state_dict\(\)"),
            ({"a": object()}, r"extra_state\['a'\] is a object without"),
            ({1: Cursor()}, "its keys are names"),
        ],
    )
    def test_what_cannot_be_saved_is_said_at_start(self, given: Any, text: str) -> None:
        with pytest.raises(UsageError, match=text):
            ExtraState(given)

    def test_what_cannot_be_encoded_is_named_by_its_path(self) -> None:
        class Bad(Cursor):
            def state_dict(self) -> dict[str, Any]:
                return {"open": [1, object()]}

        with pytest.raises(UsageError, match=r"extra_state\['bad'\].state_dict\(\)\['open'\]\[1\]"):
            ExtraState({"bad": Bad()})

    def test_a_state_dict_that_raises(self) -> None:
        class Bad(Cursor):
            def state_dict(self) -> dict[str, Any]:
                raise RuntimeError("not yet")

        with pytest.raises(UsageError, match="RuntimeError: not yet"):
            ExtraState(Bad())

    def test_restore_says_what_does_not_fit(self) -> None:
        saved = {"gone": ExtraState(Cursor()).capture("extra_state")[0]}
        assert ExtraState(None).restore(saved) == ["extra_state['gone'] was saved, and this job has none"]
        with pytest.raises(CheckpointError, match="cannot be read"):
            ExtraState({"gone": Cursor()}).restore({"gone": b"garbage"})

    @pytest.mark.parametrize(
        ("problem", "seen"), [(KeyError("other"), OtherModelError), (MemoryError(), MemoryError)], ids=str
    )
    @pytest.mark.parametrize("method", ["load_state_dict", "state_dict"])
    @pytest.mark.parametrize("constant", [False, True])
    def test_an_object_that_refuses_its_state_ends_the_job(
        self, problem: Exception, seen: type[Exception], method: str, constant: bool
    ) -> None:
        """A restart helps if the object only lacked memory. A data loader reads its state in ``state_dict``."""

        class Picky(Cursor):
            ttp_constant = constant

        def refuse(*_: object) -> None:
            raise problem

        picky, saved = ExtraState({"one": Picky()}), {"one": ExtraState(Cursor()).capture("extra_state")[0]}
        setattr(Picky, method, refuse)
        if constant and method == "state_dict":
            assert picky.restore(saved) == []  # nothing is drawn from it
            return
        with pytest.raises(seen) as raised:
            picky.restore(saved)
        assert raised.type is seen


class TestNothingRaisesIntoTraining:
    """A part that fails is disabled with one warning, and the rest goes on."""

    def problem_of(self, capture: LocalCapture, caplog: pytest.LogCaptureFixture) -> str:
        for version in (1, 2, 3):
            capture.capture(version, final=True)
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        return capture.problem

    def test_extra_state(self, page: PageWriter, caplog: pytest.LogCaptureFixture) -> None:
        cursor, other = Cursor(), Cursor()
        capture = LocalCapture(network(), ExtraState({"bad": cursor, "good": other}), page=page)
        cursor.state["index"] = object()
        assert "extra_state 'bad'" in self.problem_of(capture, caplog)
        assert set(read(page, 3).extra) == {"good"}
        assert read(page, 3).rng and len(read(page, 3).buffers) == 6

    def test_random_streams(
        self, page: PageWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("ttp.adapters.torch.local_state.rng.RngState.capture", _raise)
        assert "the random streams" in self.problem_of(LocalCapture(network(), page=page), caplog)
        assert read(page, 3).rng == b"" and len(read(page, 3).buffers) == 6
        assert "the random streams were not saved" in LocalCapture(network()).restore(read(page, 3))

    def test_buffers(self, page: PageWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setattr("ttp.adapters.torch.local_state.buffers.BufferSet.capture", _raise)
        assert "the model's buffers" in self.problem_of(LocalCapture(network(), page=page), caplog)
        assert read(page, 3).rng and read(page, 3).buffers == {}

    @pytest.mark.parametrize("name", ["buffers", "rng", "the model's buffers", "the random streams"])
    def test_an_object_with_the_name_of_a_part_is_captured_without_it(
        self, page: PageWriter, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setattr("ttp.adapters.torch.local_state.buffers.BufferSet.capture", _raise)
        monkeypatch.setattr("ttp.adapters.torch.local_state.rng.RngState.capture", _raise)
        cursor = Cursor()
        capture = LocalCapture(network(), ExtraState({name: cursor}), page=page)
        for version in (1, 2, 3):
            cursor.state["index"] = version
            capture.capture(version, final=True)
        other = Cursor()
        ExtraState({name: other}).restore(read(page, 3).extra)
        assert other.state["index"] == 3
        assert "the model's buffers" in capture.problem and "the random streams" in capture.problem

    def test_the_page(self, page: PageWriter, caplog: pytest.LogCaptureFixture) -> None:
        capture = LocalCapture(network(), page=page)
        page._disable(OSError("no room"))
        assert "no room" in self.problem_of(capture, caplog)

    def test_sparse_buffers_are_named(self, page: PageWriter) -> None:
        model = nn.Module()
        model.register_buffer("s", torch.eye(3).to_sparse())
        capture = LocalCapture(model, page=page)
        capture.capture(1, final=True)
        assert capture.problem == "uncaptured buffers (sparse, quantized or distributed): s"


def _raise(self: object) -> None:
    raise RuntimeError("broken")


class TestForeign:
    @staticmethod
    def image(page: PageWriter) -> bytes:
        LocalCapture(network(), ExtraState(Cursor()), page=page).capture(1, final=True)
        return written(page, 1).data

    def test_another_model(self, page: PageWriter) -> None:
        self.image(page)
        other: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(5))
        before = other[1].running_mean.clone()
        with pytest.raises(CheckpointError, match=r"1.running_mean was float32 \(4,\) when .* and is float32 \(5,\)"):
            LocalCapture(other).restore(read(page, 1))
        assert torch.equal(other[1].running_mean, before)

    def test_more_and_fewer_buffers(self, page: PageWriter) -> None:
        self.image(page)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model.register_buffer("mine", torch.zeros(1))
        notes = LocalCapture(model, ExtraState(Cursor())).restore(read(page, 1))
        assert "buffer mine was not saved" in notes
        assert "buffer 3.running_var was saved and is not in this model" in notes

    @pytest.fixture(scope="class")
    @staticmethod
    def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
        return TestForeign.image(PageWriter(tmp_path_factory.mktemp("whole") / "pages", 0))

    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_garbled_images_are_refused_or_read(self, whole: bytes, data: st.DataObject) -> None:
        changed = bytearray(whole)
        at = data.draw(st.one_of(st.integers(0, 400), st.integers(0, len(changed) - 1)))
        new = data.draw(st.binary(min_size=1, max_size=8))
        changed[at : at + len(new)] = new
        cut = data.draw(st.integers(0, len(changed)))
        for image in (bytes(changed), bytes(changed[:cut])):
            try:
                decode(image)
            except CheckpointError:
                continue
