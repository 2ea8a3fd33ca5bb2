"""Tensors of every form are copied from a device that hangs, byte for byte, also if nothing was copied before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.gpu.cases.ahead import host_ahead
from tests.gpu.stand import Stand
from tests.gpu.training import Plain, Training, check_saved_behind_a_hang


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Odd(Plain):
    """A model that also has tensors whose memory is shared, strided or not contiguous."""

    def __init__(self, second: torch.device | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.image = _frozen(drawn(4, 8, 5, 5).to(memory_format=torch.channels_last))
        self.brain = _frozen(drawn(333).to(torch.bfloat16))
        self.eighth = _frozen(drawn(64).to(torch.float8_e4m3fn))
        self.nothing = _frozen(torch.empty(0, 3))
        self.scalar = _frozen(torch.tensor(3.5))
        self.mask = _frozen(torch.arange(70) % 3 == 0)
        self.turned_back = _frozen(torch.randn(3, 4, dtype=torch.complex64, generator=generator).conj())
        self.register_buffer("bytes", torch.arange(1000).to(torch.uint8))
        self.elsewhere = _frozen(drawn(7)) if second is not None else None
        self._second_device = second

    def settle(self, device: torch.device) -> None:
        """Make these forms on the device, because ``Module.to`` makes tensors dense."""
        generator = torch.Generator().manual_seed(12)
        wide = torch.randn(40, 6, generator=generator).to(device)
        self.sliced = _frozen(wide[::4])
        self.turned = _frozen(wide.t())
        self.expanded = _frozen(wide[:1].expand(5, 6))
        self.register_buffer("window", wide[3:9, 1:3])
        if self.elsewhere is not None:
            self.elsewhere.data = self.elsewhere.data.to(self._second_device)


def every_form(stand: Stand, two_devices: bool = False) -> None:
    """The training's stream hangs; the saved version was finished before."""
    second = torch.device("cuda", 1) if two_devices else None
    training = Training(stand, make=lambda: Odd(second))
    assert isinstance(training.module, Odd)
    training.module.settle(stand.device)
    stand.put(training.module)
    with stand.protected():
        training.protect()
        training.step()
        check_saved_behind_a_hang(stand, training)


def many_streams(stand: Stand, count: int = 24) -> None:
    """Many other streams wait for the one that hangs, as those of communicators do, and hold the device's queues.

    CUDA maps all streams of a process to ``CUDA_DEVICE_MAX_CONNECTIONS`` queues, 8 by default; Megatron asks for 1.
    """
    training = Training(stand)
    cuda: Any = torch.cuda
    others = [cuda.Stream(priority=-(number % 4)) for number in range(count)] if stand.real else []
    idle = [torch.zeros(64, device=stand.device).add_(1) for _ in others]  # loads the kernel

    @contextlib.contextmanager
    def held_up() -> Iterator[None]:
        for stream, memory in zip(others, idle, strict=True):
            stream.wait_stream(cuda.current_stream())
            with torch.cuda.stream(stream):
                memory.add_(1)
        yield

    with stand.protected():
        training.protect()
        training.step()
        check_saved_behind_a_hang(stand, training, held_up)


def full_queue(stand: Stand, count: int = 4096) -> None:
    """The training thread waits in the driver for room to launch a kernel, as behind a collective that hangs.

    A device takes about 1,000 launches ahead, which is less than most models need for a step.
    """
    training = Training(stand)
    memory = torch.zeros(64, device=stand.device)
    if stand.made_up is not None:
        stand.made_up.device.put(memory)
    memory.add_(1)  # loads the kernel

    def launch() -> None:
        for _ in range(count):
            memory.add_(1)

    with stand.protected():
        training.protect()
        training.step()
        check_saved_behind_a_hang(stand, training, contextlib.nullcontext, launch)
    stand.synchronize()
    assert memory[0].item() == 1 + (count if stand.hangs else 0)


def kernel_loaded_late(stand: Stand) -> None:
    """The training thread launches a kernel for the first time behind one that hangs, and waits until it is loaded."""
    training = Training(stand)
    memory = torch.zeros(64, device=stand.device)

    def launch() -> None:
        memory.erfinv_()

    with stand.protected():
        training.protect()
        training.step()
        check_saved_behind_a_hang(stand, training, contextlib.nullcontext, launch)


def first_look(stand: Stand) -> None:
    """No part of the rescue has run in this process before the device hangs, except ttp's start."""
    os.environ["TTP_DIGEST"] = "all"
    try:
        host_ahead(stand, lead=1, warm=1)
    finally:
        del os.environ["TTP_DIGEST"]
