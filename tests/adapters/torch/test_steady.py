"""Counts the work of the steady state: captures, calls of ``state_dict()``, bytes written, param groups copied."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import nn

from tests.adapters.torch.hooked import Job, exponential
from tests.adapters.torch.pages import hashed_from_now_on, read, written
from tests.adapters.torch.stub_processor import Stateful
from ttp.adapters.torch.local_state.capture import LocalCapture
from ttp.adapters.torch.local_state.extra_state import ExtraState
from ttp.adapters.torch.local_state.large_arrays import LargeArrays
from ttp.processor.local_state.pages import PageWriter

streams: Any = numpy.random
"""Not every numpy says the types of what is used here."""

LARGE = (64 << 10) // 4
"""Floats of an array that is kept apart."""


def a_step(capture: LocalCapture, version: int) -> None:
    capture.capture(version, final=False)
    capture.look_again(version)
    capture.capture(version, final=True)


def state_of(page: PageWriter, version: int) -> Any:
    other = Stateful()
    ExtraState(other).restore(read(page, version).extra)
    return other.state


class TestCaptures:
    def test_an_unchanged_image_is_not_written_at_the_gate(self, page: PageWriter) -> None:
        capture = LocalCapture(nn.BatchNorm1d(4), page=page)
        capture.capture(1, final=False)
        writes = page._writes
        capture.look_again(1)
        assert page._writes == writes
        torch.rand(1)
        capture.look_again(1)
        assert page._writes == writes + 1, "a random number was drawn since"
        capture.capture(1, final=True)
        assert page._writes == writes + 1, "the state before the update is that behind it"
        assert written(page, 1).final
        capture.capture(2, final=False)
        torch.rand(1)
        capture.capture(2, final=True)
        assert page._writes == writes + 3, "the optimizer has drawn one"

    def test_after_torchs_own_step_only_extra_states_are_read(self, page: PageWriter) -> None:
        counting = Stateful(n=0)
        capture = LocalCapture(nn.BatchNorm1d(4), ExtraState(counting), page=page)
        for version in range(1, 8):
            capture.capture(version, final=False)
            capture.look_again(version)
            writes, counting.state["n"] = page._writes, version // 4
            capture.capture(version, final=True, alone=True)
            assert written(page, version).final and state_of(page, version)["n"] == version // 4
            assert page._writes == writes + (version == 4)

    def test_torchs_own_step_may_draw(self, page: PageWriter) -> None:
        """Weights that are rounded at random, of a subclass of tensors, do so in every step."""
        capture = LocalCapture(nn.BatchNorm1d(4), page=page)
        for version in range(1, 8):
            capture.capture(version, final=False)
            capture.look_again(version)
            torch.rand(1)
            capture.capture(version, final=True, alone=True)
            drawn = torch.get_rng_state()
            torch.rand(1)
            LocalCapture(nn.BatchNorm1d(4)).restore(read(page, version))
            assert torch.equal(torch.get_rng_state(), drawn)

    def test_what_changes_before_the_gate_is_in_the_page(self, page: PageWriter) -> None:
        """A rank that dies in its update leaves the state that it had at the gate."""
        model: Any = nn.BatchNorm1d(4)
        capture = LocalCapture(model, page=page)
        capture.capture(1, final=False)
        model.running_mean.fill_(7.0)
        drawn = torch.get_rng_state()
        capture.look_again(1)
        found = read(page, 1)
        assert found.buffers["running_mean"].tolist() == [7.0] * 4
        torch.rand(5)
        LocalCapture(nn.BatchNorm1d(4)).restore(found)
        assert torch.equal(torch.get_rng_state(), drawn)

    def test_a_gate_without_a_capture_before_it_asks_everybody(self, page: PageWriter) -> None:
        """With a closure, or if no backward pass was noticed."""
        counting = Stateful(n=1)
        capture = LocalCapture(nn.Linear(2, 2), ExtraState(counting), page=page)
        for version in range(1, 9):
            counting.state["n"] = version
            capture.look_again(version)
            assert state_of(page, version)["n"] == version
            capture.capture(version, final=True)


def _swap(model: Any) -> None:
    model.running_mean = model.running_mean.clone()


def _elsewhere(model: Any) -> None:
    model.running_var.data = model.running_var.data + 1


def _appears(model: Any) -> None:
    model.num_batches_tracked = None if model.num_batches_tracked is not None else torch.tensor(7)


def _another_bit_generator(_model: Any) -> None:
    streams.set_bit_generator(numpy.random.MT19937(int(numpy.random.randint(1 << 30))))


class TestImage:
    """Unchanged parts of an image are kept from capture to capture, but the page has the present state all the same."""

    CHANGES: ClassVar[dict[str, Any]] = {
        "python": lambda _model: random.random(),
        "python's spare number": lambda _model: random.gauss(0, 1),
        "another stream of python": lambda _model: random.seed(random.random()),
        "numpy": lambda _model: numpy.random.rand(),
        "numpy's spare number": lambda _model: numpy.random.standard_normal(),
        "another bit generator": _another_bit_generator,
        "torch": lambda _model: torch.randn(1),
        "a buffer": lambda model: model.running_mean.add_(1),
        "a buffer, uncounted": lambda model: model.running_mean.data.add_(1),
        "another tensor": _swap,
        "other memory": _elsewhere,
        "a buffer comes and goes": _appears,
    }

    @pytest.mark.parametrize("when", [1, 3])
    @pytest.mark.parametrize("what", CHANGES)
    def test_it_is_what_a_fresh_one_takes(self, page: PageWriter, tmp_path: Path, what: str, when: int) -> None:
        model, counting = nn.BatchNorm1d(4), Stateful(n=0, text="")
        capture = LocalCapture(model, ExtraState(counting), page=page)
        generator = streams.get_bit_generator()
        try:
            for version in range(1, 14):
                for final in (False, True):
                    if version % when == 0:
                        self.CHANGES[what](model)
                    counting.state = {"n": version, "text": "x" * (version // 5)}
                    capture.capture(version, final)
                    fresh = PageWriter(tmp_path / "fresh", 0)
                    LocalCapture(model, ExtraState(counting), page=fresh).capture(version, final)
                    assert written(page, version).data == written(fresh, version).data, (version, final)
                    fresh.close()
        finally:
            streams.set_bit_generator(generator)

    def test_the_gate_sees_a_change_that_leaves_the_length(self, page: PageWriter) -> None:
        model: Any = nn.BatchNorm1d(4)
        capture = LocalCapture(model, page=page)
        for version in range(1, 6):
            capture.capture(version, final=False)
            _swap(model)
            model.running_mean.fill_(version)
            capture.look_again(version)
            assert read(page, version).buffers["running_mean"].tolist() == [version] * 4
            capture.capture(version, final=True)


class TestCalls:
    def test_a_step_takes_few_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Counts calls of ttp's functions, schedule included, capture excluded."""
        of_all = (torch.nn.modules.module, sys.modules["torch.optim.optimizer"])
        for module in of_all:  # that jobs of other tests have left
            for name in [n for n in vars(module) if n.startswith("_global_") and n.endswith("_hooks")]:
                monkeypatch.setattr(module, name, OrderedDict())
        job = Job(scheduler=exponential)
        called: list[str] = []

        def step() -> None:
            job.backward()
            job.optimizer.step()
            job.scheduler.step()

        def note(frame: Any, event: str, _arg: Any) -> None:
            if event == "call" and str(frame.f_globals.get("__name__")).startswith("ttp."):
                called.append(frame.f_code.co_name)

        for _ in range(8):
            step()
        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
        assert len(called) <= 70, called


class TestExtraState:
    def test_it_is_asked_twice_a_step(self, page: PageWriter) -> None:
        counting = Stateful(cursor=0)
        capture = LocalCapture(nn.Linear(2, 2), ExtraState(counting), page=page)
        for version in range(1, 20):
            counting.state["cursor"] = version  # when the batch was fetched
            before = counting.asked
            a_step(capture, version)
            assert counting.asked - before == (3 if version < 5 else 2), "while it learns, at the gate too"
            assert state_of(page, version)["cursor"] == version

    @pytest.mark.parametrize("since", [1, 12])
    def test_one_that_changes_behind_the_backward_pass_is_asked_at_the_gate(self, page: PageWriter, since: int) -> None:
        counting = Stateful(cursor=0)
        capture = LocalCapture(nn.Linear(2, 2), ExtraState({"moving": counting, "calm": Stateful()}), page=page)
        for version in range(1, 20):
            capture.capture(version, final=False)
            if version >= since:
                counting.state["cursor"] = version
            capture.look_again(version)
            if version > since:
                other = Stateful()
                ExtraState({"moving": other}).restore({"moving": read(page, version).extra["moving"]})
                assert other.state["cursor"] == version, "known from the update before"
            capture.capture(version, final=True)
        assert capture._head.moving == {"moving"}


class TestLargeArrays:
    WAYS: ClassVar[dict[str, Any]] = {
        "counted": lambda t: t.add_(1),
        "through data": lambda t: t.data.add_(1),
        "through numpy": lambda t: numpy.add(t.numpy(), 1, out=t.numpy()),
    }

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("when", [1, 7])
    def test_the_page_has_what_they_are(self, page: PageWriter, way: str, when: int) -> None:
        average = torch.zeros(LARGE)
        capture = LocalCapture(nn.Linear(2, 2), ExtraState(Stateful(ema={"w": average}, n=1)), page=page)
        for version in range(1, 25):
            if version % when == 0:
                self.WAYS[way](average)
            capture.capture(version, final=False)
            assert torch.equal(state_of(page, version)["ema"]["w"], average)
            capture.capture(version, final=True)
            assert torch.equal(state_of(page, version)["ema"]["w"], average)

    def test_fresh_tensors_and_arrays_each_time(self, page: PageWriter) -> None:
        counting = Stateful()
        capture = LocalCapture(nn.Linear(2, 2), ExtraState(counting), page=page)
        for version in range(1, 12):
            counting.state = {"t": [torch.full((LARGE,), float(version))], "a": numpy.full(LARGE, version), "s": "x"}
            capture.capture(version, final=True)
            found = state_of(page, version)
            assert torch.equal(found["t"][0], counting.state["t"][0]) and (found["a"] == version).all()
            assert found["s"] == "x" and found["a"].dtype == counting.state["a"].dtype

    def test_they_come_and_go(self, page: PageWriter) -> None:
        counting = Stateful()
        capture = LocalCapture(nn.Linear(2, 2), ExtraState(counting), page=page)
        for version in range(1, 12):
            counting.state = {str(n): torch.full((LARGE + n,), float(n)) for n in range(version % 4)}
            capture.capture(version, final=True)
            found = state_of(page, version)
            assert list(found) == list(counting.state)
            assert all(torch.equal(found[name], value) for name, value in counting.state.items())

    def test_one_change_is_copied_once(self, page: PageWriter, monkeypatch: pytest.MonkeyPatch) -> None:
        average = torch.zeros(LARGE)
        capture = LocalCapture(nn.Linear(2, 2), ExtraState(Stateful(ema=average)), page=page)

        def step(version: int) -> None:
            a_step(capture, version)
            average.mul_(0.9).add_(1)

        for version in range(1, 8):
            step(version)
        hashed = hashed_from_now_on(monkeypatch)
        step(8)
        assert hashed.count(4 * LARGE) == 1, "by the page, when it was copied"
        assert max(size for size in hashed if size != 4 * LARGE) < 4 * LARGE, "the rest is small"

    def test_what_never_changes_is_looked_at_and_not_copied(self) -> None:
        memory, constant = LargeArrays(), torch.zeros(LARGE)
        kept = memory.look_at([constant])
        for _ in range(20):
            assert memory.look_at([constant]) is kept
        constant.numpy()[3] = 1.0
        assert memory.look_at([constant]) is not kept, "also after a long time, and without a counter"
