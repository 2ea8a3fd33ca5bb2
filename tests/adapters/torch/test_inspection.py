"""Digests of replicas, and the search for NaN and Inf: what they cover, and unusual tensors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.torch.checkpoints import Net, adamw, train
from tests.adapters.torch.fake_device import FakeDevice, Watching
from tests.adapters.torch.fake_runtime import FakeRuntime
from tests.adapters.torch.stub_processor import StubProcessor, registered
from ttp.adapters.torch.adapter import TorchAdapter
from ttp.adapters.torch.saving import inspection
from ttp.adapters.torch.saving.inspection import ComparedTensor, Inspector, replicated
from ttp.adapters.torch.sharding.names import ModelNames
from ttp.adapters.torch.sharding.sharding import Sharding, TrainingObjects
from ttp.core.layout import Layout, Rank, Shard, Version
from ttp.processor import sampling


class Replica:
    """One of several equal copies after some updates."""

    def __init__(self, steps: int = 3) -> None:
        torch.manual_seed(3)
        self.model = Net()
        self.optimizer = adamw(self.model)
        train(self.model, self.optimizer, None, steps)
        self.names = ModelNames(self.model, self.optimizer)

    def leaves(self) -> list[ComparedTensor]:
        return replicated(self.names, self.optimizer)

    def digest(self, version: int = 3, mode: str = "sample") -> str:
        return Inspector(mode).look(self.leaves(), version).digest

    def bad(self) -> tuple[str, ...]:
        return Inspector().look(self.leaves(), 3).bad

    def tensor(self, name: str) -> Any:
        return next(leaf.tensor for leaf in self.leaves() if leaf.name == name)


MOMENT = "optim.state.second.weight.exp_avg"


class TestDigest:
    def test_equal_copies_look_equal(self) -> None:
        one, other = Replica(), Replica()
        assert one.digest() == other.digest() and len(one.digest()) == 32
        assert one.digest(mode="all") == other.digest(mode="all")

    @pytest.mark.parametrize("name", ["model.first.weight", "model.second.bias", MOMENT])
    def test_one_bit_makes_the_difference_and_so_does_another_set_of_moments(self, name: str) -> None:
        one, other = Replica(), Replica()
        other.tensor(name).detach().view(torch.int32).reshape(-1)[2] ^= 1
        assert one.digest() != other.digest()
        other = Replica()
        del other.optimizer.state[other.model.second.weight]["exp_avg"]
        assert one.digest() != other.digest()

    def test_so_does_another_shape_or_type_of_the_same_bytes(self) -> None:
        forms = [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(3), torch.zeros(6, dtype=torch.int32)]
        forms.append(torch.zeros(6, device="meta"))
        assert len({Inspector().look(compared(x=form), 0).digest for form in forms}) == len(forms)

    def test_what_may_differ_and_the_order_of_the_state_are_not_looked_at(self) -> None:
        one, other = Replica(), Replica()
        other.model.norm.get_buffer("running_mean").add_(1)
        other.optimizer.param_groups[0]["lr"] = 0.5
        other.optimizer.state[other.model.second.weight]["note"] = 17
        entries = list(other.optimizer.state.items())
        other.optimizer.state.clear()
        other.optimizer.state.update(reversed(entries))
        assert one.digest() == other.digest()

    def test_before_the_first_update(self) -> None:
        assert Replica(0).digest() == Replica(0).digest() != Replica(1).digest()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WHOLE_BYTES": 0, "SAMPLE_BYTES": 4096, "SHARE_MIN": 64, "BLOCK_BYTES": 256}.items():
        monkeypatch.setattr(sampling, name, value)


def compared(**tensors: Any) -> list[ComparedTensor]:
    return [ComparedTensor(name, tensor, True) for name, tensor in tensors.items()]


@pytest.mark.usefixtures("small")
class TestSample:
    """The elements that are read of a state that is too large to be read whole."""

    @staticmethod
    def leaves() -> list[ComparedTensor]:
        torch.manual_seed(1)
        return compared(large=torch.randn(9_000), tiny=torch.randn(3))

    def test_it_is_bounded_and_spread(self) -> None:
        pieces = [piece for _, piece in Inspector()._pieces(self.leaves(), 5)]
        assert [piece.nbytes for piece in pieces] == [15 * 256, 12]
        assert pieces[0].shape == (15, 64) and pieces[0].stride() == (600, 1)
        assert pieces[0].storage_offset() + 14 * 600 + 64 <= 9_000

    def test_what_is_missed_at_one_version_is_seen_at_another(self) -> None:
        sound, damaged = self.leaves(), self.leaves()
        damaged[0].tensor[4_321] += 1
        different = [
            version
            for version in range(60)
            if Inspector().look(sound, version).digest != Inspector().look(damaged, version).digest
        ]
        assert 0 < len(different) < 30
        assert Inspector("all").look(sound, 0).digest != Inspector("all").look(damaged, 0).digest


class TestBad:
    def test_nan_and_inf_are_named_but_for_those_of_a_frozen_mask(self) -> None:
        replica = Replica()
        assert not replica.model.second.bias.requires_grad
        replica.model.second.bias.data.fill_(float("-inf"))
        assert replica.bad() == ()
        replica.tensor(MOMENT)[1, 1] = float("inf")
        replica.tensor("model.first.weight").data[0, 0] = float("nan")
        assert set(replica.bad()) == {MOMENT, "model.first.weight"}

    def test_a_few_are_enough(self) -> None:
        leaves = compared(**{f"t{n:02}": torch.full((3,), float("nan")) for n in range(20)})
        assert Inspector().look(leaves, 0).bad == tuple(f"t{n:02}" for n in range(8))

    @pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "complex64", "float8_e4m3fn"])
    @pytest.mark.parametrize("shape", [(), (5,), (400_000,)])
    def test_of_every_floating_type(self, dtype: str, shape: tuple[int, ...]) -> None:
        sound = torch.ones(shape).to(getattr(torch, dtype))
        damaged = torch.ones(shape)
        damaged.reshape(-1)[-1] = float("nan")
        damaged = damaged.to(getattr(torch, dtype))
        assert Inspector().look(compared(x=sound, y=damaged), 0).bad == ("y",)

    def test_large_values_are_not_infinite(self) -> None:
        assert Inspector().look(compared(x=torch.full((9,), 6e4, dtype=torch.float16)), 0).bad == ()


def odd() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "meta": torch.empty(4, 4, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.0),
        "bool": torch.tensor([True, False]),
        "transposed": torch.randn(5, 6).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "strided": torch.randn(40)[::4],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "parameter": nn.Parameter(torch.randn(16)),
    }


def test_odd_tensors() -> None:
    def look(tensors: dict[str, Any]) -> str:
        return Inspector("all").look(compared(**tensors), 0).digest

    sound = look(odd())
    assert look(odd()) == sound
    for name in ("scalar", "transposed", "channels last", "strided", "expanded"):
        damaged = odd()
        damaged[name] = damaged[name] + 1
        assert look(damaged) != sound, name


class TestDevice:
    LIMIT = 1024

    @pytest.fixture
    def device(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr(inspection, "_PACK_DEVICE", self.LIMIT)
        monkeypatch.setattr(inspection, "_PATIENCE_S", 0.01)
        return FakeRuntime()

    def test_it_sees_what_is_there_past_a_stream_that_hangs(self, device: Any) -> None:
        leaves = [leaf for leaf in Replica().leaves() if not leaf.name.endswith(".step")]
        leaves += compared(large=torch.randn(5 * self.LIMIT), bad=torch.tensor([float("nan")]))
        leaves += compared(half=torch.randn(9, dtype=torch.float16), eight=torch.ones(3).byte())
        self.check(device, "all", leaves, 3)
        assert device.log.count("side") > 20, "on the side stream, never more than was set aside"
        assert not device.device.sins

    @pytest.mark.usefixtures("small")
    def test_so_it_does_where_it_takes_a_sample(self, device: Any) -> None:
        leaves = TestSample.leaves() + compared(half=torch.randn(9_000, dtype=torch.bfloat16))
        self.check(device, "sample", leaves, 5)

    def check(self, device: Any, mode: str, leaves: list[ComparedTensor], version: int) -> None:
        """Check that the inspection sees on a device that hangs what it sees on the host."""
        expected = Inspector(mode).look(leaves, version)
        for leaf in leaves:
            device.device.put(leaf.tensor)
        with Watching(device.device), device.device.no_waiting():
            inspector = Inspector(mode, [device])
            device.device.seal()
            device.device.hang()
            assert inspector.look(leaves, version) == expected

    def test_numbers_on_the_host_are_ahead_of_it(self, device: Any) -> None:
        there = compared(x=device.device.put(torch.ones(3)))
        inspector = Inspector("sample", [device])
        assert inspector.look(there + compared(step=torch.tensor(5.0)), 3) == inspector.look(there, 3)

    def test_one_that_hangs_is_not_waited_for(self, device: Any) -> None:
        inspector = Inspector("sample", [device])
        device.moving.clear()
        with pytest.raises(TimeoutError, match="12 bytes did not leave the device"):
            inspector.look(compared(x=device.device.put(torch.ones(3))), 3)

    def test_two_devices_look_like_one(self, device: Any) -> None:
        other = FakeRuntime(FakeDevice(beside=device.device))
        leaves = compared(a=torch.randn(7), b=torch.randn(8), c=torch.randn(9))
        expected = Inspector("all").look(leaves, 3)
        for leaf, runtime in zip(leaves, (device, other, device), strict=True):
            runtime.device.put(leaf.tensor)
        with Watching(device.device, other.device):
            assert Inspector("all", [device, other]).look(leaves, 3) == expected


class Halves(Sharding):
    """A sharding in which the first parameter belongs to the first shard, and the others to the last."""

    def __init__(self, adapter: TorchAdapter, layout: Layout) -> None:
        super().__init__(TrainingObjects(adapter._model, adapter._optimizer, adapter._names, layout.world_size), layout)

    def parameters_of(self, shard: Shard) -> Collection[str]:
        first, *others = self._names.parameters
        shards = list(self.layout.groups)
        return [*([first] if shard == shards[0] else []), *(others if shard == shards[-1] else [])]


class TestSource:
    @staticmethod
    def adapter(tmp_path: Path, layout: Layout | None = None, **settings: Any) -> Any:
        replica = Replica(1)
        adapter = registered(replica.model, replica.optimizer)
        processor: Any = StubProcessor(tmp_path, layout=layout, **settings)
        attachment: Any = None
        adapter.source.connect(processor, attachment, Halves(adapter, processor.layout))
        return adapter

    @pytest.mark.parametrize(("mode", "length"), [("sample", 32), ("off", 0)])
    def test_one_digest_for_the_shard_or_none(self, tmp_path: Path, mode: str, length: int) -> None:
        (shard,), bad = self.adapter(tmp_path, digest=mode).source.inspect(Version(1))
        assert (shard.shard, len(shard.digest), bad) == ("model", length, ()) and shard.size > 0, "for the plan"

    def test_a_digest_for_each_of_several_shards(self, tmp_path: Path) -> None:
        ranks = (Rank(0),)
        both = Layout(1, {Shard("a"): ranks, Shard("b"): ranks})
        adapter = self.adapter(tmp_path, both)
        before = {d.shard: d.digest for d in adapter.source.inspect(Version(1))[0]}
        assert len(set(before.values())) == 2
        name, parameter = next(iter(adapter._names.parameters.items()))
        assert name in Halves(adapter, both).parameters_of(Shard("a"))
        with torch.no_grad():
            parameter.view(-1)[0] = float("inf")
        digests, bad = adapter.source.inspect(Version(1))
        assert [d.shard for d in digests if d.digest != before[d.shard]] == ["a"]
        assert bad == (f"model.{name}",)

    def test_it_never_raises(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        adapter = self.adapter(tmp_path)
        monkeypatch.setattr(Inspector, "look", lambda *_: 1 / 0)
        (digest,), bad = adapter.source.inspect(Version(1))
        assert digest.digest == "" and bad == ()
        assert "division by zero" in caplog.text
