"""Losses with a state of their own, which they change in the forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.adapters.torch.going_on import assert_goes_on_with_its_bits, data, net, program_of
from tests.adapters.torch.stub_processor import Loop
from ttp.adapters.torch.loop import followers
from ttp.adapters.torch.saving.unsaved import attributes_of
from ttp.errors import UsageError


class Centred(nn.Module):
    """A loss with a running center that it replaces, as DINO's."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 3))

    def forward(self, x: Tensor) -> Any:
        loss = (x - self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * x.detach().mean(0, keepdim=True)
        return loss


@pytest.mark.supports("losses with a state of their own")
@pytest.mark.parametrize("small", [True, False])
def test_a_module_beside_the_model_that_changes_in_the_forward_pass_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """It is read in place, when the center may be that of the next version already. An average is not refused."""
    if not small:
        monkeypatch.setattr(followers, "_COPIED_BYTES_MAX", 0)
    model, loss = net(), Centred()
    average: Any = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Loop(tmp_path, model, optimizer, extra_state={"loss": loss, "average": average}).start(tmp_path / "pages")

    def step(forward: Callable[[Tensor], Any]) -> None:
        optimizer.zero_grad()
        forward(model(data())).backward()
        optimizer.step()
        average.update_parameters(model)

    step(loss)
    for _ in range(3):
        step(Tensor.sum)
    with pytest.raises(UsageError, match=r"changes extra_state\['loss'\]\.center between .* within model= instead"):
        step(loss)


@pytest.mark.supports("losses with a state of their own")
def test_a_loss_within_the_model_comes_back(tmp_path: Path) -> None:
    assert_goes_on_with_its_bits(tmp_path, program_of(lambda: nn.Sequential(net(), Centred())))


class Queue(nn.Module):
    """A memory of the last features, as CrossBatchMemory's: the place of the next one is no buffer."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4, 3))
        self.place, self.rows, self.loss = 0, 0, 0.0

    def forward(self, x: Tensor) -> Any:
        loss = (x - self.kept.mean(0)).square().mean()
        self.kept[self.place] = x.detach().mean(0)
        self.place, self.rows, self.loss = (self.place + 1) % 4, len(x), float(loss.detach())
        return loss


class Remembering(Queue):
    """Its place is in every checkpoint."""

    def get_extra_state(self) -> Any:
        return {"place": self.place}

    def set_extra_state(self, state: Any) -> None:
        self.place = state["place"]


class Attribute:
    """The object for ``extra_state`` that the message asks for."""

    def __init__(self, loss: Any, name: str) -> None:
        self.loss, self.name = loss, name

    def state_dict(self) -> dict[str, Any]:
        return {self.name: getattr(self.loss, self.name)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        setattr(self.loss, self.name, state[self.name])


class Lookup(Queue):
    """A cache of the largest batch: a number changes, but not step by step, and no buffer that a checkpoint has."""

    def forward(self, x: Tensor) -> Any:
        self.rows = max(self.rows, len(x))
        return x.square().mean()


class Masking(Queue):
    """It draws what it masks from a random stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = np.random.RandomState(1)

    def forward(self, x: Tensor) -> Any:
        return (x * float(self.stream.rand())).square().mean()


class Covariance(Queue):
    """Its running mean is no buffer, as in lightly's ``TiCoLoss``; what it keeps for the log is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | None = None
        self.table = torch.arange(3.0)

    def forward(self, x: Tensor) -> Any:
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        self.table = torch.arange(3.0)  # made again with the same values
        self.spread = (x - self.mean).square().mean()
        self.last = self.spread.detach()
        return self.spread


def said(
    directory: Path,
    caplog: pytest.LogCaptureFixture,
    kind: type[nn.Module],
    kept: str = "",
    layer: Callable[[], nn.Module] = nn.Identity,
) -> list[str]:
    """Train a model with a loss, and return of what is said that it is in no checkpoint.

    Args:
        directory: for checkpoints and pages.
        caplog: what is logged.
        kind: the class of the loss.
        kept: an attribute of the loss that an object of ``extra_state`` keeps.
        layer: makes the last layer of the model.
    """
    model, loss = nn.Sequential(net(), layer()), kind()
    both = nn.ModuleDict({"model": model, "loss": loss})
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    extra = {"kept": Attribute(loss, kept)} if kept else None
    Loop(directory, both, optimizer, extra_state=extra).start(directory / "pages")
    for _ in range(4):
        optimizer.zero_grad()
        found = model(data())
        (found.square().mean() + loss(found)).backward()
        optimizer.step()
    return [text.split(" changes with")[0].split(" was ")[0] for text in caplog.messages if "is in no check" in text]


@pytest.mark.supports("losses with a state of their own")
@pytest.mark.parametrize(
    ("kind", "kept", "told"),
    [
        (Queue, "", ["Queue.place"]),
        (Queue, "place", []),
        (Remembering, "", []),
        (Lookup, "", []),
        (Masking, "", ["Masking.stream"]),
        (Covariance, "", ["Covariance.mean"]),
    ],
)
def test_counts_beside_buffers_that_change_are_told_once(
    kind: type[Queue], kept: str, told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed job would begin to write at the first place of a queue that is restored."""
    assert said(tmp_path, caplog, kind, kept) == told


class Metric(nn.Module):
    """As the base class of torchmetrics."""

    __module__ = "torchmetrics.metric"

    def __init__(self) -> None:
        super().__init__()
        self._update_count = 0

    def update(self) -> None:
        self._update_count += 1


class Accuracy(Metric):
    """A metric of the program's own."""


class Cooling(nn.Module):
    """A layer that counts its batches, and becomes colder with each of them; it keeps its loss to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = Accuracy()
        self.batches, self.heat, self.share, self.loss, self.mask = 0, 2.0, 1.0, 0.0, 1 << 20000

    def forward(self, x: Tensor) -> Any:
        self.batches, self.heat, self.share = self.batches + 1, self.heat * 0.9, self.share - 0.01
        self.loss = x.square().mean().item()
        self.metric.update()
        return x / self.heat


@pytest.mark.supports("numbers that a module keeps")
def test_numbers_of_a_module_that_change_by_equal_steps_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(tmp_path, caplog, Lookup, layer=Cooling) == ["Cooling.batches, Cooling.heat, Cooling.share"]


class Looked(nn.Module):
    """A layer that keeps what it has computed, to be looked at: the map of an attention, as in many public models."""

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.T).softmax(-1)
        self.map = weights.detach()
        return weights @ x


class Attending(nn.Module):
    """A recurrent layer with an attention, of which it keeps the map, and what it was last called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.last, (out, _) = x.detach(), self.inner(x)
        self.map = (out @ out.T).softmax(-1).detach()
        return self.map @ out


class Sized(Queue):
    """It keeps the part of each row, of batches of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.ones(0)

    def forward(self, x: Tensor) -> Any:
        rows = x[: 1 + len(self.parts)].square().mean(1)
        self.parts = rows.detach()
        return rows.mean()


class Odd(Queue):
    """It keeps tensors that cannot be read, and a proxy of an object that is gone."""

    def __init__(self) -> None:
        super().__init__()
        owner = Attribute(self, "place")
        self.gone = weakref.proxy(owner)
        self.freed = torch.ones(3)
        self.freed.untyped_storage().resize_(0)

    def forward(self, x: Tensor) -> Any:
        def within(row: Tensor) -> Tensor:
            self.row = row
            return row.square()

        return torch.vmap(within)(x.detach()).mean() + x.square().mean()


@pytest.mark.parametrize(
    ("layer", "loss"), [(Looked, Lookup), (Attending, Lookup), (nn.Identity, Sized), (nn.Identity, Odd)]
)
def test_what_modules_keep_for_a_look_or_cannot_be_read_is_no_news(
    layer: type[nn.Module], loss: type[Queue], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(tmp_path, caplog, loss, layer=layer) == []


class Stateful(nn.Module):
    """A recurrent layer that goes on where the last batch has ended, as Keras' with ``stateful=True``."""

    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.inner = kind(3, 3)
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Any:
        out, hidden = self.inner(x, self.hidden)
        self.hidden = tuple(each.detach() for each in hidden) if isinstance(hidden, tuple) else hidden.detach()
        return out


@pytest.mark.supports("state of the loop (counters, losses)")
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_hidden_state_that_a_module_keeps_for_the_next_batch_is_told_once(
    kind: Callable[[int, int], nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(tmp_path, caplog, Lookup, layer=lambda: Stateful(kind)) == ["Stateful.hidden"]


class Codebook(nn.Module):
    """A layer that takes its codes from its first batch, and remembers so in an attribute, as many public ones do."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(4, 3))
        self.ready, self.fast = False, False

    def forward(self, x: Tensor) -> Any:
        if not self.ready:
            self.codes.copy_(x.detach()[:4])
            self.ready = True
        return (x - self.codes.mean(0)).square().mean()


class Scaled(Codebook):
    """A layer with a weight in place of the buffer, as ActNorm."""

    def __init__(self) -> None:
        super().__init__()
        del self.codes
        self.codes = nn.Parameter(torch.zeros(4, 3))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            return super().forward(x) + self.codes.sum()


class Bare(Codebook):
    """It has nothing that it could overwrite."""

    def __init__(self) -> None:
        super().__init__()
        del self.codes

    def forward(self, x: Tensor) -> Any:
        self.ready = True
        return x.square().mean()


@pytest.mark.supports("weights initialised from the first batch")
@pytest.mark.parametrize(
    ("kind", "kept", "told"),
    [
        (Codebook, "", ["Codebook.ready"]),
        (Codebook, "ready", []),
        (Scaled, "", ["Scaled.ready"]),
        (Bare, "", []),
    ],
)
def test_a_layer_that_would_set_itself_up_again_is_told_once(
    kind: type[Codebook], kept: str, told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(tmp_path, caplog, kind, kept) == told


def test_switches_of_torchs_own_modules_are_not_looked_at() -> None:
    """Some of them have abstract or generic classes of Python among their bases."""
    observer = torch.ao.quantization.HistogramObserver()
    assert "reduce_range" in vars(observer) and not attributes_of(nn.ModuleList([observer]), ())
