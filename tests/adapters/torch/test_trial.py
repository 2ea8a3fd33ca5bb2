"""State that would make a save impossible is reported at the start, with the object, the reason and the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.adapters.torch.stub_processor import StubProcessor, registered, save
from ttp.adapters.torch.restoring.reader import read_values
from ttp.adapters.torch.saving.piece_index import items_of
from ttp.errors import ConfigError, UsageError
from ttp.store.manifest import Manifest
from ttp.testing.digests import digest


class Packed(Tensor):
    """A tensor subclass that consists of other tensors, like torchao's."""

    packed: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: Tensor) -> None:
        self.packed = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed)
        unpacked = [arg.packed if isinstance(arg, Packed) else arg for arg in args]
        return func(*unpacked, **(kwargs or {}))


class Job:
    """One rank with a model of two layers."""

    def __init__(self, directory: Path, prepare: Callable[[nn.Module], object] = lambda _: None, **parts: Any) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        prepare(self.model)
        self.optimizer: Any = torch.optim.Adam([p for p in self.model.parameters() if p.device.type == "cpu"], lr=0.1)
        self.directory, self.parts = directory, parts
        self.processor = StubProcessor(directory)

    def wrap(self) -> Job:
        self.adapter = registered(self.model, self.optimizer, **self.parts)
        self.adapter.layout(1)
        self.adapter.attach(self.processor)  # type: ignore[arg-type]
        return self

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.model(torch.ones(1, 3)).sum().backward()
            self.optimizer.step()


def buffer(tensor: Callable[[], Tensor], name: str = "odd", **how: Any) -> Callable[[nn.Module], object]:
    return lambda model: model.register_buffer(name, tensor(), **how)


def quantised() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


class WithExtraState(nn.Module):
    def __init__(self, state: Any = None) -> None:
        super().__init__()
        self.state = state or {"amax": memoryview(b"")}

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None: ...


class TestWhenItIsWrapped:
    @pytest.mark.parametrize(
        ("prepare", "text"),
        [
            (buffer(lambda: torch.empty(2, device="meta")), "model.odd is on the device 'meta': give it memory before"),
            (buffer(lambda: torch.empty(2, device="meta"), persistent=False), "model.odd is on the device 'meta'"),
            (buffer(lambda: torch.eye(3).to_sparse()), "model.odd is a Tensor of layout torch.sparse_coo"),
            (buffer(quantised), "model.odd is a Tensor of layout torch.strided, dtype torch.qint8"),
            (buffer(lambda: Packed(torch.ones(2))), "model.odd is a Packed of layout"),
            (lambda model: model.append(WithExtraState()), r"model.2._extra_state.amax is a builtins.memoryview"),
            (lambda model: model.append(WithExtraState({"a": {"b": 1}, "a.b": 2})), r"two values are called model.2."),
        ],
        ids=["meta", "meta that is not saved", "sparse", "quantised", "subclass", "extra state of a module", "dots"],
    )
    @pytest.mark.supports("tensor subclasses")
    @pytest.mark.supports("non-dense tensors")
    @pytest.mark.supports("devices other than CPU and CUDA")
    def test_what_cannot_be_saved_is_refused(self, tmp_path: Path, prepare: Any, text: str) -> None:
        with pytest.raises(ConfigError, match=f"this training state could not be saved: {text}"):
            Job(tmp_path, prepare).wrap()

    @pytest.mark.parametrize("tensor", [lambda: torch.eye(3).to_sparse(), lambda: Packed(torch.ones(2))])
    @pytest.mark.parametrize(("number", "said"), [(1, "odd is not"), (3, "odd (and 2 more like it) is not")])
    def test_a_buffer_that_is_not_saved_anyway_is_said(
        self, tmp_path: Path, tensor: Callable[[], Tensor], number: int, said: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        odd = [buffer(tensor, name, persistent=False) for name in ("odd", "odder", "oddest")[:number]]
        job = Job(tmp_path, lambda model: [each(model) for each in odd]).wrap()
        assert f"the buffer {said} saved" in caplog.text and caplog.text.count("not saved") == 1
        job.step()
        assert save(job.adapter, job.processor, 1).is_dir()

    def test_several_are_listed(self, tmp_path: Path) -> None:
        def prepare(model: nn.Module) -> None:
            for number in range(6):
                model.register_buffer(f"odd{number}", torch.empty(1, device="meta"))

        with pytest.raises(ConfigError, match=r"model\.odd3 .*; and 2 more like it"):
            Job(tmp_path, prepare).wrap()

    def test_an_average_of_the_weights_too(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"extra\.ema\.weight is on the device 'meta'"):
            Job(tmp_path, extra_state={"ema": nn.Linear(1, 1, device="meta")}).wrap()

    @pytest.mark.parametrize(
        "tensor",
        [
            lambda: torch.tensor(True),
            lambda: torch.ones(2, dtype=torch.complex64).conj(),
            lambda: torch.empty(0, 3),
            lambda: torch.ones(1).expand(5),
            lambda: torch.ones(4, 6)[::2, 1::2],
            lambda: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
            lambda: torch.ones(3).to(torch.float8_e4m3fn),
            lambda: torch.ones(3, dtype=torch.uint16),
        ],
        ids=["0-dim bool", "conjugated", "empty", "expanded", "with gaps", "channels last", "float8", "uint16"],
    )
    @pytest.mark.supports("tensors that only look odd")
    def test_what_looks_odd_and_can_be_saved_comes_back(self, tmp_path: Path, tensor: Callable[[], Tensor]) -> None:
        job = Job(tmp_path, buffer(tensor)).wrap()
        job.step()
        path = save(job.adapter, job.processor, 1)
        fresh = Job(tmp_path, buffer(lambda: torch.empty_like(tensor()).zero_())).wrap()
        fresh.adapter.load(path, 0, 1, protected=False)
        saved, loaded = job.model.odd, fresh.model.odd
        assert isinstance(saved, Tensor) and isinstance(loaded, Tensor)
        assert loaded.dtype == saved.dtype and torch.equal(loaded.to(torch.complex64), saved.to(torch.complex64))


class Eight(torch.optim.SGD):
    """An optimizer with the state that a test gives it."""

    def __init__(self, parameters: Any, make: Callable[[Tensor], Any]) -> None:
        super().__init__(parameters, lr=0.1)
        self.make = make

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["odd"] = self.make(parameter)


def with_state(directory: Path, make: Callable[[Tensor], Any]) -> Job:
    job = Job(directory)
    job.optimizer = Eight(job.model.parameters(), make)
    return job.wrap()


class TestAfterTheFirstUpdate:
    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (Packed, r"optim\.state\.0\.weight\.odd is a Packed .*Use an optimizer that keeps plain tensors"),
            (lambda p: torch.empty_like(p, device="meta"), r"optim\.state\.0\.weight\.odd is on the device 'meta'"),
            (lambda p: p.detach().to_sparse(), r"optim\.state\.0\.weight\.odd is a Tensor of layout torch\.sparse_coo"),
            (lambda _: object(), r"optim\.state\.0\.weight\.odd is a builtins\.object, which has no form on disk"),
        ],
        ids=["subclass", "meta", "sparse", "object"],
    )
    @pytest.mark.supports("tensor subclasses")
    @pytest.mark.supports("objects in the optimizer's state")
    def test_state_of_the_optimizer_is_refused_at_the_next(
        self, tmp_path: Path, make: Callable[[Tensor], Any], text: str
    ) -> None:
        job = with_state(tmp_path, make)
        job.step()
        assert job.processor.gate.version == 1, "nothing is wrong with the update itself"
        with pytest.raises(UsageError, match=text):
            job.step()
        assert job.processor.gate.version == 1 and job.processor.begun == [1]

    def test_state_by_a_key_that_is_no_name_is_refused(self, tmp_path: Path) -> None:
        """Equal layers have equal texts, so their entries could not be told apart in a checkpoint."""
        job = Job(tmp_path).wrap()
        job.optimizer.state[job.model[0]] = {"factor": torch.ones(1)}
        with pytest.raises(UsageError, match=r"keeps Linear.* in \.state, which is no parameter"):
            job.step()

    def test_eight_bits_in_plain_tensors_are_saved(self, tmp_path: Path) -> None:
        """As bitsandbytes keeps them."""
        job = with_state(
            tmp_path,
            lambda p: {
                "state1": torch.ones(p.shape, dtype=torch.uint8),
                "qmap": torch.linspace(-1, 1, 256),
                "none": None,
            },
        )
        job.step(3)
        assert save(job.adapter, job.processor, 3).is_dir()

    @pytest.mark.supports("functions in param groups")
    def test_a_setting_without_a_form_on_disk_is_said_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        job = Job(tmp_path)
        job.wrap()
        job.optimizer.param_groups[0]["rule"] = lambda: 0
        job.step(3)
        job.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
        job.step()
        (said,) = (text for text in caplog.messages if "optim.param_groups.0.rule" in text)
        assert "has no form on disk: a restarted program has to make it again" in said

    def test_what_somebodys_own_code_raises_stops_nothing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        job = Job(tmp_path).wrap()
        job.adapter.source.everything = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        trial = job.adapter._trial
        trial._make_state = job.adapter.source.everything
        job.step(3)
        assert "the check whether this training state can be saved has failed" in caplog.text
        assert job.processor.gate.version == 3


class TestWhatChangesAfterWrapping:
    @pytest.mark.supports("FSDP wrapped after wrap_optimizer")
    def test_parameters_that_are_replaced(self, tmp_path: Path) -> None:
        """As by ``fully_shard()``."""
        job = Job(tmp_path).wrap()
        job.model[0].weight = nn.Parameter(torch.zeros(4, 3))
        with pytest.raises(
            UsageError, match=r"\(0\.weight\) were replaced after wrap_optimizer\(\).*shard the model f"
        ):
            job.step()

    def test_a_model_that_is_moved(self, tmp_path: Path) -> None:
        job = Job(tmp_path).wrap()
        job.adapter._trial._devices = frozenset({"cuda:0"})
        with pytest.raises(UsageError, match="moved from cuda:0 to cpu after wrap_optimizer"):
            job.step()

    def test_a_model_that_is_cast_is_told_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A restarted program that restores before it casts was refused: "belongs to another model"."""
        job = Job(tmp_path).wrap()
        job.model.double().register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
        job.step(3)
        (said,) = (text for text in caplog.messages if "dtype" in text)
        assert said.startswith("the dtype of 0.weight, 0.bias") and "Cast the model first" in said

    @pytest.mark.supports("param groups added later")
    def test_a_group_that_is_added_is_saved(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        job = Job(tmp_path).wrap()
        job.step()
        job.model.append(nn.Linear(2, 2))
        job.optimizer.add_param_group({"params": job.model[2].parameters(), "lr": 0.2})
        job.step(2)
        path = save(job.adapter, job.processor, 3)
        fresh = Job(tmp_path, lambda model: model.append(nn.Linear(2, 2)))  # type: ignore[operator]
        two: Any = [[*fresh.model[:2].parameters()], [*fresh.model[2].parameters()]]
        fresh.optimizer = torch.optim.Adam([{"params": two[0]}, {"params": two[1], "lr": 0.2}], lr=0.1)
        fresh.wrap().adapter.load(path, 0, 1, protected=False)
        pairs = zip(fresh.model.parameters(), job.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs) and caplog.text.count("2.weight, 2.bias were") == 1

    @pytest.mark.supports("param groups added later")
    def test_parameters_that_take_the_place_of_others_are_told_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As when Gaussian splats are densified."""
        job = Job(tmp_path).wrap()
        job.step()
        old = [*job.model.append(nn.Linear(2, 2)).parameters()]
        for size in (6, 7):
            job.model[0], job.model[1] = nn.Linear(3, size), nn.Linear(size, 2)
            job.optimizer.param_groups[0]["params"] = [*job.model.parameters()]
            job.optimizer.state.clear()
            job.step(2)
        job.model(torch.ones(1, 3)).sum().backward()
        said = "0.weight, 0.bias, 1.weight, 1.bias, and 2 more were added to the model"
        assert len(old) == 6 and caplog.text.count("WARNING") == caplog.text.count(said) == 1, caplog.text
        assert job.processor.mark == 2  # the backward pass was seen: ttp has captured the state of this rank for it

    @pytest.mark.supports("param groups added later")
    @pytest.mark.parametrize("several", [False, True])
    def test_a_save_in_the_iteration_that_adds_one(self, tmp_path: Path, several: bool) -> None:
        """The save is of the version before, which had no new group. The program adds it again."""
        job = Job(tmp_path)
        first, other = (torch.optim.Adam(layer.parameters(), lr=0.1) for layer in job.model.children())
        job.optimizer, steps = [first, other] if several else first, [first, other] if several else [first]
        job.wrap().model(torch.ones(1, 3)).sum().backward()
        for each in steps:
            each.step()
        job.model.append(nn.Linear(2, 2))
        first.add_param_group({"params": job.model[2].parameters(), "lr": 0.3})
        path = save(job.adapter, job.processor, 1)
        groups = read_values(path, items_of(Manifest.load(path).pieces))["optim"]["param_groups"]
        names = [["0.weight", "0.bias"], ["1.weight", "1.bias"]][: 1 + several]
        assert [(group["params"], group["lr"]) for group in groups] == [(each, 0.1) for each in names]

    @pytest.mark.supports("param groups added later")
    @pytest.mark.parametrize("named", [False, True])
    def test_a_program_that_has_not_added_it_yet_gets_it(self, tmp_path: Path, named: bool) -> None:
        """The program starts after the step that would add it."""

        def parameters(model: nn.Module, *layers: str) -> Any:
            found = [(name, p) for name, p in model.named_parameters() if name[0] in layers]
            return found if named else [p for _, p in found]

        def make() -> Job:
            job = Job(tmp_path, lambda model: model.append(nn.Linear(2, 2)))  # type: ignore[operator]
            job.model.requires_grad_(False)[0].requires_grad_(True)
            job.optimizer = torch.optim.Adam(parameters(job.model, "0"), lr=0.1)
            return job.wrap()

        job = make()
        job.step()
        job.model[2].requires_grad_(True)
        job.optimizer.add_param_group({"params": parameters(job.model, "2"), "lr": 0.2})
        job.step()
        path = save(job.adapter, job.processor, 2)
        fresh = make()
        fresh.adapter.load(path, 0, 1, protected=False)
        assert digest(fresh.optimizer.state_dict()) == digest(job.optimizer.state_dict())
        job.processor.gate.open()
        for each in (job, fresh):
            each.model.requires_grad_(True)
            each.optimizer.zero_grad()
            each.step()
        assert digest(fresh.model.state_dict()) == digest(job.model.state_dict())

    def test_a_group_that_the_model_does_not_know(self, tmp_path: Path) -> None:
        job = Job(tmp_path).wrap()
        job.step()
        job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
        with pytest.raises(ConfigError, match=r"parameters that model= does not contain.*use a loss without weights"):
            job.step()

    @pytest.mark.supports("param groups added later")
    def test_a_group_that_no_shard_has(self, tmp_path: Path) -> None:
        job = Job(tmp_path).wrap()
        saved = list(job.adapter.sharding(1).parameters_of("model"))  # type: ignore[arg-type]
        job.adapter._trial.saved = lambda: saved
        job.step()
        job.model.append(nn.Linear(2, 2))
        job.optimizer.add_param_group({"params": job.model[2].parameters()})
        with pytest.raises(UsageError, match=r"2\.bias, 2\.weight were added to the optimizer after wrap_optimizer"):
            job.step()

    @pytest.mark.supports("parameters frozen and trained again")
    def test_parameters_that_are_frozen_and_trained_again(self, tmp_path: Path) -> None:
        job = Job(tmp_path).wrap()
        for frozen in (True, False):
            job.model[1].requires_grad_(not frozen)
            job.optimizer.zero_grad()
            job.step()
        assert save(job.adapter, job.processor, 2).is_dir()

    @pytest.mark.supports("parameters frozen and trained again")
    @pytest.mark.parametrize("frozen", [True, False])
    def test_a_program_that_has_not_frozen_them_hears_of_it(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, frozen: bool
    ) -> None:
        """The program starts after the step that would freeze them."""
        job, fresh = Job(tmp_path).wrap(), Job(tmp_path).wrap()
        job.step()
        (job if frozen else fresh).model[1].requires_grad_(False)
        path = save(job.adapter, job.processor, 1)
        fresh.adapter.load(path, 0, 1, protected=False)
        then, now = ("frozen", "trained") if frozen else ("trained", "frozen")
        assert f"2 parameters (1.bias, 1.weight) were {then} when it was saved and are {now} here" in caplog.text

    @pytest.mark.parametrize(("begins_frozen", "steps_between"), [(False, 1), (False, 5), (True, 1)])
    def test_parameters_that_a_loop_freezes_in_turns_are_no_news(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, begins_frozen: bool, steps_between: int
    ) -> None:
        """Such as a GAN's: the saved moment does not say what the program has to do before it starts."""
        job, fresh = Job(tmp_path).wrap(), Job(tmp_path).wrap()
        fresh.model[1].requires_grad_(not begins_frozen)
        for trained in [*[True] * steps_between, False] * 2:
            job.model[1].requires_grad_(trained)
            job.step()
        fresh.adapter.load(save(job.adapter, job.processor, 2 * steps_between + 2), 0, 1, protected=False)
        assert "requires_grad" not in caplog.text
