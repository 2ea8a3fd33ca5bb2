"""A backend with the name and the calls of NCCL's, made of gloo on the host, that behaves as badly as a real one may.

torch uses it for collectives of any device that it is registered for: with ``cpu:nccl`` whole jobs run over it. On a
made-up device (``fake_device.py``) a collective is a kernel in a stream: it ends when all ranks have made it, and never
when one of them is dead. An abort leaves garbage in its result, and the work queued behind it runs on that.

``ProcessGroupNCCL.on_abort`` changes the behaviour of an abort.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tests.adapters.torch.fake_device import FakeDevice
from ttp.adapters.torch import transport

_dist: Any = dist
_c10d: Any = c10d
GARBAGE = 1e4


class NcclOptions:
    """Like torch's; ``split_from`` must not be copied to another backend."""

    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = False
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.split_from: Any = None
        self.config = SimpleNamespace(max_ctas=0)


class ProcessGroupNCCL(_dist.ProcessGroupGloo):  # type: ignore[misc] # of torch, which is Any here
    """A stand-in for NCCL's backend; see the module."""

    Options = NcclOptions
    made: list[ProcessGroupNCCL] = []  # noqa: RUF012 # torch does not keep what Python has added to an object
    on_abort: Callable[[Any], Any] = staticmethod(lambda _backend: None)
    version = (2, 27, 3)

    def __init__(self, store: Any, rank: int, size: int, options: NcclOptions) -> None:
        sockets = transport.Gloo()
        with sockets.noting():
            super().__init__(store, rank, size, timeout=options._timeout)
        self.sockets = sockets
        self.given, self.aborted, self.connected_to = options, threading.Event(), None
        self.made.append(self)

    @property
    def options(self) -> NcclOptions:
        return self.given

    @classmethod
    def get_runtime_nccl_version(cls) -> tuple[int, ...]:
        return cls.version

    def abort(self) -> None:
        self.on_abort(self)
        self.aborted.set()
        self.sockets.let_go([])

    def eager_connect_single_device(self, device: Any) -> None:
        self.connected_to = device

    def all_reduce(self, device: FakeDevice, tensors: Sequence[Tensor]) -> None:
        """Queue the mean of all ranks' tensors on the stream of this thread."""
        kernel = Kernel(self, tensors)
        device.launch(kernel.start)
        device.wait(kernel, device.current)


class Kernel:
    """One collective on a made-up device."""

    def __init__(self, backend: ProcessGroupNCCL, tensors: Sequence[Tensor]) -> None:
        self._backend, self._tensors = backend, list(tensors)
        self._work: Any = None
        self._ended = self._broken = False

    def start(self) -> None:
        self._sum = torch.cat([tensor.reshape(-1) for tensor in self._tensors])
        with self._noticing():
            self._work = self._backend.allreduce([self._sum])

    @property
    def done(self) -> bool:
        """Whether it is done. The stream asks until it is."""
        if not (self._ended or self._broken) and self._work.is_completed():
            with self._noticing():
                self._work.wait()
                self._leave(self._sum / self._backend.size())
        if not self._ended and self._backend.aborted.is_set():
            self._leave(torch.full_like(self._sum, GARBAGE))
        return self._ended

    @contextlib.contextmanager
    def _noticing(self) -> Any:
        try:
            yield
        except RuntimeError:  # a kernel that waits for a dead rank never ends
            self._broken = True

    def _leave(self, values: Tensor) -> None:
        parts = torch.split(values, [tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
        self._ended = True


def install() -> None:
    """Make this NCCL torch's."""
    _c10d.ProcessGroupNCCL, _c10d._NCCL_AVAILABLE = ProcessGroupNCCL, True
    if (use_former := getattr(_c10d, "_register_builtin_nccl_as_legacy", None)) is not None:  # torch 2.15 has two
        use_former()
    if unkind := UNKIND.get(os.environ.get("MADE_UP_NCCL", "")):  # but in a group of one, as it is tried at first
        ProcessGroupNCCL.on_abort = staticmethod(lambda backend: unkind(backend) if backend.size() > 1 else None)


def _hang(_backend: Any) -> None:
    threading.Event().wait()


def _raise(_backend: Any) -> None:
    raise RuntimeError("NCCL error: unhandled system error")


UNKIND: dict[str, Callable[[Any], None]] = {"abort-hangs": _hang, "abort-raises": _raise}
