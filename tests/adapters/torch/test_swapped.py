"""Weights that a program puts into the model for an evaluation are not saved as the weights of training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.adapters.torch.stub_processor import Loop
from ttp.adapters.torch.loop import followers
from ttp.adapters.torch.loop.swapped import Swapped, _Noted
from ttp.adapters.torch.loop.untouched import Untouched
from ttp.core.decide import How
from ttp.processor.source import MovedError

INPUT = torch.ones(2, 3)


class Job(Loop):
    """A training loop with an average of the weights; ``between`` is called after each update."""

    def __init__(
        self,
        directory: Path,
        between: Callable[[Job], None] = lambda _: None,
        networks: int = 1,
        model: nn.Module | None = None,
        optimizer: type[Any] = torch.optim.SGD,
        undo: str | None = None,
        **setting: Any,
    ) -> None:
        made = [nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)) for _ in range(networks)]
        self.networks = made if model is None else [model]
        groups = [[{"params": [p for p in each.parameters() if p.requires_grad], **setting}] for each in self.networks]
        self.optimizers = [optimizer(group, lr=0.1) for group in groups]
        self.averages = [torch.full_like(p, 0.5) for p in self.networks[0].parameters()]
        whole = self.networks[0] if networks == 1 else nn.ModuleList(self.networks)
        super().__init__(directory, whole, self.optimizers, undo=undo)
        self.between, self.directory, self.saves = between, directory, 0
        self.start(directory / "pages")

    def step(self) -> None:
        for network, optimizer in zip(self.networks, self.optimizers, strict=True):
            optimizer.zero_grad()
            network(INPUT).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.between(self)

    @property
    def parameters(self) -> list[Any]:
        return list(self.networks[0].parameters())

    @property
    def swapped(self) -> bool:
        return bool(self.source.other_weights())

    def train_unsuspected(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            assert not self.swapped
            self.save_and_go_on()

    def save_and_go_on(self) -> None:
        self.saves += 1
        self.processor.save_dir = self.directory / str(self.saves)
        try:
            self.save(self.gate.version)
        finally:
            self.gate.open()


def swap(job: Job, keep: Callable[[Any], Tensor], put: Callable[[Any, Tensor], object]) -> Callable[[], None]:
    kept = [keep(p) for p in job.parameters]
    for parameter, average in zip(job.parameters, job.averages, strict=True):
        put(parameter, average)

    def back() -> None:
        for parameter, old in zip(job.parameters, kept, strict=True):
            put(parameter, old)

    return back


def copied(job: Job) -> Callable[[], None]:
    return swap(job, lambda p: p.detach().clone(), lambda p, value: p.data.copy_(value))


def pointed(job: Job) -> Callable[[], None]:
    return swap(job, lambda p: p.data, lambda p, value: setattr(p, "data", value))


def loaded(job: Job) -> Callable[[], None]:
    kept = copy.deepcopy(job.networks[0].state_dict())
    names = [name for name, _ in job.networks[0].named_parameters()]
    job.networks[0].load_state_dict(dict(zip(names, job.averages, strict=True)))
    return lambda: job.networks[0].load_state_dict(kept) and None


def moved(job: Job) -> None:
    job.optimizers[0].eval()


@pytest.mark.supports("EMA")
@pytest.mark.parametrize("put", [copied, pointed, loaded])
@pytest.mark.parametrize("networks", [1, 2])
def test_other_weights_are_not_saved(put: Any, networks: int, tmp_path: Path) -> None:
    """With two networks the average is of the first, whose optimizer is not the last one."""
    job = Job(tmp_path, networks=networks)
    for number in range(8):
        job.step()
        assert not job.swapped
        back = put(job)
        assert job.swapped, f"after update {number + 1}"
        with pytest.raises(MovedError, match="has put other weights into the model, such as averages"):
            job.save_and_go_on()
        back()
        assert not job.swapped
    job.save_and_go_on()


class Unused(nn.Linear):
    """Has weights, and gives back what it gets."""

    def forward(self, input: Tensor) -> Tensor:
        return input


@pytest.mark.supports("EMA")
@pytest.mark.supports("schedule-free optimizers")
@pytest.mark.parametrize("put", [copied, pointed, loaded, moved])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_copy_of_the_version_before_can_be_saved_meanwhile(put: Any, frozen: bool, tmp_path: Path) -> None:
    """Unless it lacks parameters: a large frozen one, which may be another one now too, is not copied."""
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    model = nn.Sequential(*network, Unused(300, 300).requires_grad_(False)) if frozen else network
    job = Job(tmp_path, model=model, undo="preimage", optimizer=ScheduleFree, train_mode=True)
    for _ in range(6):
        before = [p.detach().clone() for p in job.parameters]
        job.step()
    put(job)
    assert job.source.has_preimage is not frozen
    if not frozen:
        kept = job.save(5, How.UNDO)
        assert job.load(kept) == 5
        assert all(map(torch.equal, job.parameters, before))
        assert job.optimizers[0].param_groups[0]["train_mode"]


@pytest.mark.parametrize("put", [copied, pointed])
def test_an_evaluation_while_the_state_is_written_is_noticed_when_it_is_over(put: Any, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step()
    source = job.source
    bring = source._to_host

    def meanwhile(tensor: Tensor) -> Tensor:
        back = put(job)
        with torch.no_grad():
            job.model(INPUT)
        back()
        found: Tensor = bring(tensor)
        return found

    source._to_host = meanwhile
    with pytest.raises(MovedError, match="has put other weights into the model"):
        job.save_and_go_on()
    source._to_host = bring
    job.save_and_go_on()


def test_an_evaluation_of_the_weights_themselves_is_no_swap(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step()
    with torch.no_grad():
        job.model(INPUT)
    assert not job.swapped
    swapped = job.source.swapped
    assert swapped.evaluations == 1
    assert not swapped.held_others_since(0)


def clip(job: Job) -> None:
    for parameter in job.parameters:
        parameter.data.clamp_(-0.01, 0.01)


def test_a_program_that_changes_weights_after_each_update_is_not_suspected(tmp_path: Path) -> None:
    """It clips them, as in WGAN. One update tells, if it makes weights that are clipped."""
    torch.manual_seed(0)
    job = Job(tmp_path, between=clip)
    job.step()
    assert job.swapped, "nothing has shown yet that training goes on with these weights"
    job.train_unsuspected(8)


class Adapted(nn.Module):
    """A linear layer with an adapter (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.ones(1, 3)), nn.Parameter(torch.ones(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + x @ (self.up @ self.down).t()
        return result


@pytest.mark.supports("LoRA")
def test_adapters_that_are_merged_into_frozen_weights_are_noticed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), Adapted(), nn.Linear(3, 1).requires_grad_(False))
    job = Job(tmp_path, model=model)
    for _ in range(3):
        job.step()
    layer: Any = model[1]
    delta = layer.up @ layer.down
    layer.base.weight.data += delta
    assert job.swapped
    layer.base.weight.data -= delta
    job.step()
    assert not job.swapped, "also if the weights have not got all their bits back"


def test_a_momentum_encoder_is_not_suspected(tmp_path: Path) -> None:
    """It is frozen, and changed after each update."""
    encoder = nn.Linear(3, 3).requires_grad_(False)

    def follow(_: Job) -> None:
        encoder.weight.data.mul_(0.9)

    job = Job(tmp_path, between=follow, model=nn.Sequential(encoder, nn.Linear(3, 1)))
    job.train_unsuspected(7)


def test_networks_that_are_clipped_do_not_hide_those_that_are_not(tmp_path: Path) -> None:
    def clip_the_other(job: Job) -> None:
        for parameter in job.networks[1].parameters():
            parameter.data.clamp_(-0.01, 0.01)

    job = Job(tmp_path, between=clip_the_other, networks=2)
    for _ in range(3):
        job.step()
    assert not job.swapped
    copied(job)
    assert job.swapped


@pytest.mark.parametrize("networks", [1, 2])
def test_weights_that_are_changed_now_and_then_belong_to_training_from_the_next_forward_pass_on(
    tmp_path: Path, networks: int
) -> None:
    """They are clipped, or averaged over ranks, for example. The forward pass may wait for a rank that is dead."""
    job, inside = Job(tmp_path, networks=networks), list[bool]()
    for _ in range(7):
        job.step()
    clip(job)
    first: Any = job.networks[0]
    first[0].register_forward_pre_hook(lambda *_: inside.append(job.swapped))
    with torch.no_grad():
        first(INPUT)
    first.eval()(INPUT)
    assert inside == [True, True], "an evaluation shows nothing"
    loss = first.train()(INPUT).sum()
    assert inside == [True, True, False]
    clip(job)
    first[2].weight.data.mul_(2)  # by a layer, in its forward pass
    loss.backward()
    assert not job.swapped
    job.save_and_go_on()
    copied(job)
    assert job.swapped


def test_loaded_weights_are_those_of_training_before_the_first_update_and_after_a_restore(tmp_path: Path) -> None:
    job = Job(tmp_path)
    clip(job)
    job.step()
    copied(job)
    assert job.swapped
    job.source.forget()  # as a restore does when it has loaded
    assert not job.swapped


@pytest.mark.parametrize(
    ("owner", "method"), [(_Noted, "_found"), (_Noted, "note"), (followers, "copied_bytes"), (Untouched, "_look")]
)
def test_an_error_of_what_follows_the_loop_stops_no_training(
    owner: Any, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, model=nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1)))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("mine")

    monkeypatch.setattr(owner, method, fail)
    for _ in range(3):
        job.step()
        if owner is _Noted:
            pointed(job)
        with torch.no_grad():
            job.model(INPUT)
    assert job.gate.version == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"], caplog.text
    swapped = job.source.swapped
    assert owner is not _Noted or not (job.swapped or swapped.early())
    job.save_and_go_on()


def test_parameters_that_no_bytes_can_be_read_of_are_left_alone() -> None:
    frozen, meta = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2, device="meta"))
    crooked = nn.Parameter(torch.ones(4, 4).t()[::2])
    swapped = Swapped([torch.optim.SGD([frozen, meta, crooked, nn.Parameter(torch.ones(0))])], {"frozen": frozen}, ())
    swapped.updated()
    frozen.data.zero_()
    assert not swapped.holds_others()


class ScheduleFree(torch.optim.SGD):
    """Like those of the package schedulefree: ``eval()`` moves the weights, and ``train()`` moves them back."""

    def eval(self) -> None:
        self._move(1.5, train_mode=False)

    def train(self) -> None:
        self._move(1 / 1.5, train_mode=True)

    @torch.no_grad()
    def _move(self, factor: float, *, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train_mode:
                group["train_mode"] = train_mode
                for parameter in group["params"]:
                    parameter.mul_(factor)


@pytest.mark.supports("schedule-free optimizers")
@pytest.mark.parametrize("copied", [False, True])
def test_an_optimizer_that_moves_the_weights_for_an_evaluation(
    copied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says once that no save is possible meanwhile. A copy of both may be evaluated at any time."""

    def evaluate(job: Job) -> None:
        model, optimizer = copy.deepcopy((job.model, job.optimizers[0])) if copied else (job.model, job.optimizers[0])
        optimizer.eval()
        with torch.no_grad():
            model(INPUT)
        assert job.swapped is not copied
        optimizer.train()

    job = Job(tmp_path, evaluate, optimizer=ScheduleFree, train_mode=False)
    with torch.no_grad():
        job.model(INPUT)  # before the training, when there are no other weights yet
    job.optimizers[0].train()
    for _ in range(3):
        job.step()
    said = [text for text in caplog.messages if "the model is evaluated while ScheduleFree.eval() has put" in text]
    assert len(said) == (0 if copied else 1)
    if copied:
        job.save_and_go_on()


def test_a_key_of_the_programs_own_is_no_mode(tmp_path: Path) -> None:
    """Only an optimizer with an ``eval()`` moves weights."""
    Job(tmp_path, optimizer=torch.optim.AdamW, train_mode=False).train_unsuspected(3)
