"""The logic of fences and copies on a made-up device. It does not show how CUDA behaves."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.torch.fake_device import FakeDevice, Sin, Watching
from tests.adapters.torch.fake_runtime import FakeRuntime
from ttp.adapters.torch.device import to_host
from ttp.adapters.torch.device.accelerator import holder
from ttp.adapters.torch.device.to_host import HostCopier
from ttp.adapters.torch.local_state import buffers
from ttp.adapters.torch.sharding import unconnected
from ttp.adapters.torch.tensor_memory import copied_bytes, sample_of
from ttp.errors import CheckpointError

LARGE = buffers.LARGE_BYTES // 4


def tensors() -> list[Any]:
    torch.manual_seed(0)
    return [
        torch.randn(7),
        torch.tensor(3),
        torch.empty(0, 4),
        torch.randn(300),
        torch.tensor(5.0),
        torch.randn(5, 6).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(9).to(torch.bfloat16),
        torch.randn(40)[::4],
        torch.randn(1, 3).expand(4, 3),
        torch.tensor([True, False]),
        nn.Parameter(torch.randn(16)),
        torch.randn(6, 8)[:, ::2].to(torch.float8_e4m3fn),
        torch.randn(6, 8)[1:, 1:5],
        torch.randn(4, 6, 2, dtype=torch.complex128).permute(2, 0, 1)[:, ::2],
        torch.randn(3, 5, dtype=torch.bfloat16)[:, :3],
        torch.empty(0, 3)[:, ::2],
        torch.arange(9.0)[::4].view(3, 1).expand(3, 3),
        torch.randn(3, 2, dtype=torch.complex64).conj(),
        torch.randn(6, dtype=torch.complex64).conj().imag,
    ]


ON_HOST = 4


def on_device(device: Any, given: list[Any]) -> list[Any]:
    return [tensor if place == ON_HOST else device.device.put(tensor) for place, tensor in enumerate(given)]


def test_bytes_of_one_element_of_a_row() -> None:
    """Its stride is that of the row, which no view as bytes allows."""
    one = torch.full((1, 5), 2.0)[:, 0]
    read = [sample_of(one).numpy().tobytes(), *unconnected._some([one])]
    assert one.stride() == (5,) and read == [copied_bytes(torch.tensor(2.0))] * 2


class TestHostCopier:
    @pytest.mark.parametrize("gaps", [0, 128 << 10], ids=["without gaps", "with gaps"])
    @pytest.mark.parametrize("ring", [1, 2, 3])
    @pytest.mark.parametrize("size", [16, 64, 100_000])
    def test_the_same_tensors_in_the_same_order_past_a_stream_that_hangs(
        self, device: Any, ring: int, size: int, gaps: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(to_host, "_COPY_BYTES", gaps)
        given = on_device(device, tensors())
        with Watching(device.device):
            copier = HostCopier([device], ring=ring, buffer_bytes=size)
        device.device.seal()
        device.device.hang()
        with Watching(device.device), device.device.no_waiting():
            got = list(copier.copy_to_host(given))
        assert len(got) == len(given) and not device.device.sins
        for before, after in zip(given, got, strict=True):
            assert after.dtype == before.dtype and after.shape == before.shape and not after.requires_grad
            assert (after.is_conj(), after.is_neg()) == (before.is_conj(), before.is_neg())
            assert copied_bytes(before) == copied_bytes(after)
        assert got[6].is_contiguous(memory_format=torch.channels_last)
        assert got[ON_HOST] is not None and got[ON_HOST].data_ptr() == given[ON_HOST].data_ptr()

    def test_they_are_the_callers(self, device: Any) -> None:
        copier = HostCopier([device], buffer_bytes=64)
        with Watching(device.device):
            kept = list(copier.copy_to_host([device.device.put(torch.ones(8))]))
            list(copier.copy_to_host([device.device.put(torch.zeros(100))]))
        assert kept[0].tolist() == [1.0] * 8

    def test_one_chunk_is_under_way_while_another_is_moved(self, device: Any) -> None:
        copier = HostCopier([device], ring=2, buffer_bytes=40, timeout_s=0.01)
        device.moving.clear()
        device.log.clear()
        with pytest.raises(TimeoutError, match="40 bytes did not leave the device"):
            list(copier.copy_to_host([device.device.put(torch.zeros(100))]))
        assert device.log.count("side") == 2

    def test_without_a_device_they_are_handed_through(self) -> None:
        given = tensors()
        got = list(HostCopier().copy_to_host(given))
        assert [a.data_ptr() for a in got] == [b.data_ptr() for b in given]

    @pytest.mark.supports("several devices in a process")
    def test_each_comes_from_its_own_device(self) -> None:
        """A stream of one device may do nothing for the other."""
        one = FakeRuntime()
        other = FakeRuntime(FakeDevice(beside=one.device))
        given = [one.device.put(torch.ones(30)), torch.zeros(2), other.device.put(torch.full((4, 9), 2.0).t()[::2])]
        copier = HostCopier([one, other], buffer_bytes=64)
        one.log.clear()
        other.log.clear()
        with Watching(one.device, other.device), one.device.no_waiting(), other.device.no_waiting():
            got = list(copier.copy_to_host(given))
        assert all(torch.equal(a, b) for a, b in zip(got, given, strict=True))
        assert one.log.count("side") == 2 and other.log.count("side") == 3

    def test_what_is_somewhere_else_is_refused(self, device: Any) -> None:
        class Elsewhere:
            device = torch.device("xpu", 0)
            is_meta = False
            layout = torch.sparse_coo

            def detach(self) -> Any:
                return self

        elsewhere: Any = Elsewhere()
        with pytest.raises(CheckpointError, match="a tensor of the state is on xpu:0"):
            holder([device], elsewhere)

    def test_the_stand_in_notices_what_a_device_would_not_forgive(self, device: Any) -> None:
        """Shows that the tests above can fail."""
        there = device.device.put(torch.randn(6, 8)[:, ::2])
        device.device.seal()
        device.device.hang()
        with Watching(device.device):
            with pytest.raises(Sin, match="first time behind"):
                there.clone()
            with pytest.raises(Sin, match="may never start"), device.on_side():
                there.copy_(there.t().t())
            with pytest.raises(Sin, match="waits for ever"):
                there[0, 0].item()

    def test_the_stand_in_takes_numbers_of_the_host_when_it_is_asked(self, device: Any) -> None:
        """Queued work uses a host scalar's value at the call, even if it changes later. Results go to the device."""
        there, scale, found = device.device.put(torch.ones(3)), torch.tensor(8.0), torch.zeros(1)
        with Watching(device.device):
            scaled = there * scale
            scale.fill_(16.0)
            torch._amp_foreach_non_finite_check_and_unscale_([scaled], found, torch.tensor(0.5))
            assert device.device.has(found)
            assert torch.equal(scaled, there * 4) and found.item() == 0
        assert device.device.waits[threading.get_ident()] == 2

    def test_a_program_that_waits_for_what_hangs_goes_on_when_it_is_released(self, device: Any) -> None:
        there = device.device.put(torch.ones(1))
        with Watching(device.device):
            there += 1
        device.device.hang()
        with Watching(device.device):
            there += 1
        seen: list[float] = []

        def read() -> None:
            with Watching(device.device), device.device.may_hang():
                seen.append(there.item())

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        while not device.device.waits:
            assert reading.is_alive()
        assert not seen
        device.device.release()
        reading.join(60.0)
        assert seen == [3.0]
