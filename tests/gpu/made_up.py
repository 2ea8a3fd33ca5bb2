"""The device of ``tests/adapters/torch/fake_device.py`` in place of a real one, for whole jobs in one process.

Work of any thread on its memory is queued, and runs as late as possible: the host is ahead of it, and a kernel that
spins holds up the work queued behind it. It is deterministic, so a case's bytes can be compared as on a real device.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from tests.adapters.torch.fake_device import FakeDevice, Watching
from tests.adapters.torch.fake_runtime import FakeRuntime
from ttp.adapters.torch import adapter
from ttp.adapters.torch.local_state import capture
from ttp.adapters.torch.loop import misuse
from ttp.adapters.torch.saving import standing
from ttp.processor import state_inspector

NAME = torch.device("cuda", 0)
"""What ttp is told of it; torch itself sees memory of the host."""


_SKIPPED = ("torch", "tests.adapters.torch.fake_", __name__)


def _of_ttp() -> bool:
    """Return whether ttp calls the operation of torch in which this is called."""
    frame = sys._getframe(1)
    while str(frame.f_globals.get("__name__")).startswith(_SKIPPED) and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith("ttp.")


class Capturing(FakeDevice):
    """A device that captures CUDA graphs. What a thread queues meanwhile does not run, but in each replay.

    Sins, too: that thread waits for the device, or what ttp queues becomes a part of the graph. Other threads may do as
    they like, because ttp's are in the mode for that: see ``ttp.adapters.torch.device.cuda``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._graph: list[Callable[[], Any]] = []
        self._by = 0

    @contextlib.contextmanager
    def capture(self) -> Iterator[Callable[[], None]]:
        """Capture a graph of what this thread does inside. Yields what replays it."""
        self.run()
        graph = self._graph = []

        def replay() -> None:
            for task in graph:
                self.launch(task)

        self._by, self.capturing = threading.get_ident(), True
        try:
            yield replay
        finally:
            self.capturing = False

    def captured(self, task: Any) -> bool:
        """See ``FakeDevice``."""
        if threading.get_ident() != self._by:
            return False
        if not callable(task) or _of_ttp():
            return super().captured(task)
        self._graph.append(task)
        return True

    def _wait(self, what: object) -> None:
        if self.capturing and threading.get_ident() == self._by:
            self.sin(f"{what} waits for the device while a CUDA graph is captured")
        super()._wait(what)


class MadeUp:
    """A made-up device for this process."""

    def __init__(self) -> None:
        self.device = Capturing()

    def spin(self) -> MadeUp:
        """Make all work wait that is queued on the training's stream from now on."""
        self.device.hang()
        return self

    def release(self) -> None:
        """See ``tests.gpu.spinning.Spin``."""
        self.device.release()

    def synchronize(self) -> None:
        """Run all work."""
        self.device.run()
        assert not self.device.training.queue, "somebody waits for a device that hangs"

    def put(self, module: nn.Module) -> None:
        """Move the module's tensors to the device. Dropout's draws would depend on when it runs."""
        for tensor in (*module.parameters(), *module.buffers()):
            self.device.put(tensor)
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the content of the device's memory, without waiting for streams."""
        with _disable_current_modes():
            return tensor.detach().clone()

    @contextlib.contextmanager
    def sealed(self) -> Iterator[None]:
        """Forbid allocations of its memory inside."""
        self.device.seal()
        yield
        self.device._sealed = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Let this thread, and threads that start inside, work on this device's memory by its streams."""
        run = threading.Thread.run

        def watched_run(thread: threading.Thread) -> None:
            with Watching(self.device):
                run(thread)

        def devices_of(tensors: Any) -> tuple[torch.device, ...]:
            return (NAME,) if any(self.device.has(t) for t in tensors if isinstance(t, Tensor)) else ()

        def runtimes_on(devices: Any, *, rescue: bool = False) -> tuple[Any, ...]:
            return (FakeRuntime(self.device),) if devices else ()  # each with a side stream of its own

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(threading.Thread, "run", watched_run))
            # what does not move stays so
            stack.enter_context(mock.patch.object(state_inspector, "DEVICE_PATIENCE_S", 0.2))
            asked = {"is_initialized": lambda: True, "is_current_stream_capturing": lambda: self.device.capturing}
            stack.enter_context(mock.patch.multiple(misuse, _CUDA_BUILT=True, _cuda=SimpleNamespace(**asked)))
            for module in (adapter, capture, standing):
                for name, stand_in in (("devices_of", devices_of), ("runtimes_on", runtimes_on)):
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, stand_in))
            stack.enter_context(Watching(self.device))
            yield
            assert not self.device.sins, self.device.sins
