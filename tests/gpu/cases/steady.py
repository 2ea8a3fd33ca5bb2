"""The steady state must not wait for the device, nor lose the values of a buffer at a version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ttp
from tests.gpu.pages import written
from tests.gpu.stand import Stand, assert_same, same_bytes, saved_tensors
from tests.gpu.training import Plain, Training, references
from ttp.adapters.torch.local_state.image import decode

LARGE = 8 << 20


class Statistics(Plain):
    """A model with BatchNorm, dropout, and a large buffer that every forward pass changes."""

    ring: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("ring", torch.zeros(LARGE // 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.ring.add_(x.detach().mean())
        return super().forward(self.norm(x))


def no_synchronisation(stand: Stand, kind: str = "plain") -> None:
    """Train with torch's alarm for implicit synchronisations, without ttp and with it.

    Args:
        stand: the place.
        kind: plain, statistics, accumulation, scaled, ddp, fsdp or hsdp.
    """
    with _world(stand, kind):
        training = _training(stand, kind)
        micro_batches = 2 if kind == "accumulation" else 1

        def steps(count: int) -> None:
            for _ in range(count):
                training.gradient(micro_batches)
                training.update()

        steps(3)
        with stand.no_waiting():
            steps(2)  # the program itself does not wait
        with stand.protected():
            training.protect()
            steps(3)
            stand.synchronize()
            with stand.no_waiting():
                steps(10)
            version, _ = stand.save()
            assert version == 13


def default_device(stand: Stand) -> None:
    """A program may choose where new tensors are (``torch.set_default_device``): those of ttp are where they must be.

    Where no GPU is, any other device than the host shows that.
    """
    elsewhere = torch.device("cuda" if stand.real else "meta")
    wanted = references(lambda: Training(stand), 4)
    training, other = Training(stand), Training(stand)
    training.step()  # makes the optimizer's numbers on the host
    with stand.protected(), elsewhere:
        training.protect()
        for _ in range(3):
            training.step()
        version, checkpoint = stand.save()
    assert version == 3
    assert_same(saved_tensors(checkpoint), wanted[4])
    stand.begin_again()
    with stand.protected(), elsewhere:
        other.protect()
        assert ttp.restore() == 3
    assert_same(other.state(), wanted[4])


def pages(stand: Stand) -> None:
    """At every step a page has the buffers of its version, though the next forward pass changes them at once."""
    wanted = references(lambda: Training(stand, make=Statistics), 6)
    training = Training(stand, make=Statistics)
    buffers = [name for name, _ in training.module.named_buffers()]
    with stand.protected():
        training.protect()
        training.gradient()
        for version in range(1, 7):
            training.update()
            training.gradient()  # changes them while they are on their way
            found = decode(written(0, version).data).buffers
            differ = [name for name in buffers if not same_bytes(found[name], wanted[version][f"model.{name}"])]
            assert not differ, f"page of version {version}: {differ}"


def _training(stand: Stand, kind: str) -> Training:
    if kind == "scaled":
        return Training(stand, "adam-fused", scaled=True)  # others ask the device for infinities themselves
    if kind == "ddp":
        ids = [0] if stand.real else None
        return Training(stand, wrap=lambda model: DistributedDataParallel(model, device_ids=ids))
    if kind in ("fsdp", "hsdp"):
        return Training(stand, wrap=lambda model: _sharded(stand, model, kind))
    return Training(stand, make=Statistics if kind == "statistics" else Plain)


def _sharded(stand: Stand, model: nn.Module, kind: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape, names = ((1,), ("shard",)) if kind == "fsdp" else ((1, 1), ("copies", "shard"))
    return fully_shard(model, mesh=init_device_mesh(stand.device.type, shape, mesh_dim_names=names))


@contextlib.contextmanager
def _world(stand: Stand, kind: str) -> Iterator[None]:
    if kind not in ("ddp", "fsdp", "hsdp"):
        yield
        return
    stand.join_world()
    try:
        yield
    finally:
        dist.destroy_process_group()
