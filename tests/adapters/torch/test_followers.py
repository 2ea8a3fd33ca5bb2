"""Parameters that the program moves without an optimizer: moved behind the step they are part of the version, else
refused.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.adapters.torch.going_on import Program, assert_goes_on_with_its_bits, data, net, plainly
from tests.adapters.torch.stub_processor import Loop
from ttp.adapters.torch.loop import followers
from ttp.core.decide import How
from ttp.errors import UsageError

supports = pytest.mark.supports


class Teacher(nn.Module):
    """A model with an average of it, which moves in the forward pass (``inside``, as in MoCo) or on a call."""

    def __init__(self, move: Callable[[Tensor, Tensor], Any], inside: bool) -> None:
        super().__init__()
        self.move, self.inside = move, inside
        self.student = net(nn.BatchNorm1d(8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            self.move(teacher, student)

    def forward(self, x: Tensor) -> Any:
        if self.inside and self.training and torch.is_grad_enabled():
            self.follow()
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x) - wanted


def in_place(teacher: Tensor, student: Tensor) -> None:
    teacher.lerp_(student, 0.1)


def behind_the_counter(teacher: Tensor, student: Tensor) -> None:
    """Update through ``.data``, as most programs do."""
    teacher.data.mul_(0.9).add_(student.data, alpha=0.1)


def replaced(teacher: Tensor, student: Tensor) -> None:
    """Replace ``.data``, as MoCo's authors do."""
    teacher.data = teacher.data * 0.9 + student.data * 0.1


WAYS = [in_place, behind_the_counter, replaced]


class Job(Loop):
    """Steps of a program that tell whether ttp waits for what follows an update."""

    def __init__(self, directory: Path, model: nn.Module, trained: nn.Module, **parts: Any) -> None:
        super().__init__(directory, model, torch.optim.SGD(trained.parameters(), lr=0.1), **parts)
        self.start(directory / "pages")

    def step(self, after: Callable[[], Any] = lambda: None, forward: Any = None) -> bool:
        plainly(forward or self.model, self.optimizer)(0)
        waits = not self.source.post_step_done()
        after()
        return waits


def taught(directory: Path, move: Any, *, inside: bool, all_given: bool = False) -> Any:
    """Return a job with a teacher. ``all_given``: the optimizer has its parameters too, as that of MoCo's authors."""
    model = Teacher(move, inside)
    return Job(directory, model, model if all_given else model.student)


@supports("parameters that no optimizer has")
@pytest.mark.parametrize("move", WAYS)
@pytest.mark.parametrize("all_given", [False, True])
def test_behind_the_step_they_are_waited_for(tmp_path: Path, move: Any, all_given: bool) -> None:
    job = taught(tmp_path, move, inside=False, all_given=all_given)
    assert [job.step(job.model.follow) for _ in range(4)] == [False, True, True, True]


def test_who_hangs_in_front_of_them_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loop waits for other ranks between the step and the average."""
    job = taught(tmp_path, in_place, inside=False)
    job.step(job.model.follow)
    job.step()
    job.save(2)
    assert "version 2 is saved while the training thread stands between optimizer.step()" in caplog.text


@supports("parameters that no optimizer has")
def test_they_come_back(tmp_path: Path) -> None:
    def make() -> Program:
        model = Teacher(in_place, inside=False)
        optimizer = torch.optim.AdamW(model.student.parameters(), lr=1e-2)
        return Program(model, optimizer, plainly(model, optimizer, after=model.follow))

    assert_goes_on_with_its_bits(tmp_path, make)


@supports("parameters that no optimizer has")
@pytest.mark.parametrize(("move", "small"), [*((way, True) for way in WAYS), (in_place, False), (replaced, False)])
def test_they_are_gone_back_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: Any, small: bool) -> None:
    """With ``undo="preimage"`` the copy of a version includes small ones, and others that ttp has seen to move."""
    if not small:
        monkeypatch.setattr(followers, "_COPIED_BYTES_MAX", 0)

    def made() -> Job:
        torch.manual_seed(3)
        model = Teacher(move, inside=False)
        return Job(tmp_path, model, model.student, undo="preimage")

    job = made()
    source, states = job.source, []
    for _ in range(7):
        job.step(job.model.follow)
        states.append({name: value.clone() for name, value in job.model.state_dict().items()})
        settled = small or job.adapter._around.followers is None
        assert source.has_preimage is settled, "a copy may lack those that are not known yet"
    saved = job.save(6, How.UNDO)
    other = made()
    assert other.load(saved) == 6
    found = other.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in states[5].items())
    assert not torch.equal(found["teacher.0.weight"], states[6]["teacher.0.weight"]), "else this shows nothing"


@supports("parameters that no optimizer has")
@pytest.mark.parametrize("finished", [0, 1, 3])
@pytest.mark.parametrize("done", [True, False], ids=["step_done", "in turns"])
def test_between_two_steps_they_are_gone_back_with(tmp_path: Path, done: bool, finished: int) -> None:
    """A target network follows the critic, and a rank dies in the backward pass of the actor."""

    def made() -> tuple[Teacher, nn.Module, list[Any], Loop]:
        torch.manual_seed(3)
        model, actor = Teacher(in_place, inside=False), net()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model.student, actor)]
        both = nn.ModuleDict({"critic": model, "actor": actor})
        return model, actor, optimizers, Loop(tmp_path, both, optimizers)

    model, actor, (of_critic, of_actor), job = made()
    job.start(tmp_path / "pages")
    if done:
        job.adapter.step_done()
    for _ in range(finished):
        plainly(model, of_critic, after=model.follow)(0)
        plainly(actor, of_actor)(0)
        if done:
            job.adapter.step_done()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    plainly(model, of_critic, after=model.follow)(0)
    actor(data()).square().mean().backward()
    job.gate.close()
    saved = job.save(finished, How.UNDO)
    model, _, _, job = made()
    assert job.load(saved) == finished
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())


@supports("parameters that no optimizer has")
@pytest.mark.parametrize("move", WAYS)
@pytest.mark.parametrize("all_given", [False, True])
def test_in_the_forward_pass_they_are_refused(tmp_path: Path, move: Any, all_given: bool) -> None:
    job = taught(tmp_path, move, inside=True, all_given=all_given)
    job.step()
    with pytest.raises(UsageError, match=r"teacher\.0\.weight, .* \d more, which .* trains, .* after optim.*_buffer"):
        job.step()


@supports("parameters that no optimizer has")
def test_statistics_that_are_a_parameter_come_back_as_a_buffer(tmp_path: Path) -> None:
    """As the error says, and docs/frameworks.md of Keras, whose layers write to the parameter that they have."""

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.statistics = [nn.Parameter(torch.zeros(6), requires_grad=False)]
            self.layers = net(nn.BatchNorm1d(8))
            self.register_buffer("mean", self.statistics[0])

        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                self.statistics[0].lerp_(x.mean(0), 0.1)
            return self.layers(x - self.statistics[0])

    def make() -> Program:
        model = Centered()
        return Program(model, optimizer := torch.optim.AdamW(model.parameters()), plainly(model, optimizer))

    assert_goes_on_with_its_bits(tmp_path, make)


def test_a_module_beside_the_model_may_have_no_shape_yet(tmp_path: Path) -> None:
    """A lazy layer of a loss that the first iterations do not use."""
    model = net()
    job = Job(tmp_path, model, model, extra_state={"loss": nn.LazyLinear(3)})
    for _ in range(3):
        job.step()


@pytest.mark.parametrize("small", [True, False])
def test_layers_that_write_what_is_there_already_are_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """A frozen layer limits the norm of its weights, or moves them to other memory."""
    if not small:
        monkeypatch.setattr(followers, "_COPIED_BYTES_MAX", 0)
    layer: Any = nn.Embedding(9, 6, max_norm=9.0).requires_grad_(False)
    model = nn.Sequential(layer, net())
    job = Job(tmp_path, model, model[1])
    for _ in range(3):
        layer.weight.data = layer.weight.clone()
        job.step(forward=lambda _: model(torch.randint(9, (8,))))
    assert job.gate.version == 3


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_of_a_container_the_parts_are_called(tmp_path: Path, container: Any) -> None:
    model = Teacher(in_place, inside=True)
    job = Job(tmp_path, container([model]) if container is nn.ModuleList else container(model), model.student)
    job.step(forward=model)
    if container is nn.Sequential:  # which has a forward pass, and nobody calls it: as if it were behind the step
        assert job.step(forward=model)
        return
    with pytest.raises(UsageError, match="no optimizer trains"):
        job.step(forward=model)


def test_frozen_ones_are_waited_for_by_nobody(tmp_path: Path) -> None:
    job = taught(tmp_path, in_place, inside=False)
    assert [job.step() for _ in range(9)] == [False] * 9
    assert job.adapter._around.followers is None, "looked at in the first updates only"


def test_a_loop_that_evaluates_before_it_moves_them(tmp_path: Path) -> None:
    job = taught(tmp_path, in_place, inside=False)

    def after() -> None:
        with torch.no_grad():
            job.model(data())
        job.model.follow()

    assert [job.step(after) for _ in range(4)] == [False, True, True, True]


def test_behind_a_step_that_a_scaler_has_left_out(tmp_path: Path) -> None:
    model, scaler = Teacher(in_place, inside=False), torch.amp.GradScaler("cpu", init_scale=2.0)
    job = Job(tmp_path, model, model.student, scaler=scaler)
    for number in range(4):
        job.optimizer.zero_grad()
        loss = model(data()).square().mean()
        scaler.scale(loss * (float("inf") if number in (1, 2) else 1)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scaler.step(job.optimizer)
        scaler.update()
        model.follow()
    assert job.gate.version == 2


class Balanced(nn.Module):
    """A model with a bias that the loop changes after each step, and counts that the forward pass adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net(nn.BatchNorm1d(8))
        self.bias: Tensor
        self.counts: Tensor
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("counts", torch.zeros(3), persistent=False)

    def balance(self) -> None:
        self.bias.data += 0.1 * torch.sign(self.counts.mean() - self.counts)

    def forward(self, x: Tensor) -> Any:
        found: Tensor = self.layers(x)
        self.counts += found.detach().argmax(-1).bincount(minlength=3)
        return found + self.bias


@supports("buffers written after the step")
def test_buffers_that_are_written_behind_the_step_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Balanced()
    job = Job(tmp_path, model, model)
    for _ in range(8):
        job.step(model.balance)
    (said,) = [text for text in caplog.messages if "between an update and the next forward pass (bias)" in text]
    assert "ttp.step_done()" in said and "a resumed run writes that again" in said


@supports("buffers written after the step")
def test_what_the_next_iteration_writes_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A temperature that falls with the steps, and statistics of a part that the loop calls itself."""

    def make() -> Program:
        model = Balanced()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def step(number: int) -> Any:
            model.bias.fill_(1 / (number + 1))
            model.layers(data())
            return stepped(number)

        stepped = plainly(model, optimizer)
        return Program(model, optimizer, step)

    assert_goes_on_with_its_bits(tmp_path, make)
    assert "a resumed run writes that again" in caplog.text


@supports("buffers written after the step")
def test_with_step_done_they_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Program:
        model = Balanced()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def after() -> None:
            model.balance()
            program.step_done()

        def step(number: int) -> Any:
            model.bias *= 0.9  # belongs to this step
            return stepped(number)

        stepped = plainly(model, optimizer, after=after)
        program = Program(model, optimizer, step)
        return program

    assert_goes_on_with_its_bits(tmp_path, make)
    assert "between an update" not in caplog.text


def test_buffers_that_only_forward_passes_change_are_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Statistics of BatchNorm; what hooks of the program do, and caches that an evaluation makes anew."""
    model = Balanced()
    model.register_forward_pre_hook(lambda *_: model.balance())
    job = Job(tmp_path, model, model)

    def evaluate() -> None:
        with torch.no_grad():
            model.eval()(data())
        model.train()
        model.bias = model.bias + 1

    def settle() -> None:
        model.balance()
        job.adapter.settled()  # as Lightning's callback does

    job.adapter.settled()
    model.bias += 1  # before the first update layers may still initialise themselves
    for after in (evaluate, settle, evaluate, lambda: None, settle, evaluate):
        job.step(after)
    assert "between an update" not in caplog.text


def test_other_ranks_do_not_tell_what_is_broadcast_to_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Balanced()
    job = Loop(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    job.processor.env = dataclasses.replace(job.processor.env, rank=1)
    job.start(tmp_path / "pages")
    for _ in range(3):
        plainly(model, job.optimizer, after=model.balance)(0)
    assert "between an update" not in caplog.text


def test_nothing_is_queued_while_a_graph_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph would do it in each of its replays."""
    model = Teacher(in_place, inside=False)
    job = Job(tmp_path, model, model.student)
    job.step(model.follow)
    monkeypatch.setattr(followers, "capturing", lambda: True)
    monkeypatch.setattr(followers.Followers, "_look", lambda _self: pytest.fail("it looks"))
    model(data())


def test_without_memory_for_samples_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_tensor: Tensor) -> bytes:
        raise torch.OutOfMemoryError

    model = Balanced()
    job = Job(tmp_path, model, model)
    job.step(model.balance)
    monkeypatch.setattr(followers, "copied_bytes", full)
    for _ in range(2):
        job.step(model.balance)
    assert job.gate.version == 3
