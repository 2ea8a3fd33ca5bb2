"""The equipment of a case: a device, a kernel that spins on it, a training under ttp, and the saved bytes.

Without a GPU the same cases run on a made-up device (``tests.gpu.made_up``), and on the host, where nothing spins and
the device is never behind. That shows that the cases do what they say, and that ttp works on a device that behaves like
the made-up one; it does not show how CUDA behaves.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ttp
import ttp.session
from tests.gpu.made_up import MadeUp
from tests.gpu.spinning import SPIN_MAX_S, NoSpin, Spin, Spinner
from tests.ports import free_port
from ttp.adapters.torch.restoring.reader import read_values
from ttp.adapters.torch.saving.piece_index import items_of
from ttp.store.manifest import Manifest
from ttp.wire.channel import metadata, open_channel, stub
from ttp.wire.v1 import controller_pb2 as pb

PATIENCE_S = 40.0
"""Bounds what is waited for; shorter than a spin, so that a save that waits for the device is seen to do so."""

QUIET_S = 1.5
"""A training thread that makes no progress for so long stands."""


class Stand:
    """The place of one case.

    Args:
        device: "cuda", "made-up" or "cpu".
        directory: for checkpoints and the run directory.
        port: for the controller.
    """

    def __init__(self, device: str, directory: Path, port: int) -> None:
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.real = device == "cuda"
        self.made_up = MadeUp() if device == "made-up" else None
        self.hangs = device != "cpu"
        self.directory = directory
        self.numbers: dict[str, float | str] = {}
        self._port = port
        self._spinner = Spinner() if self.real else None
        if self._spinner is not None:
            self.numbers["spin"] = self._spinner.how
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", TTP_PORT=str(port),
            TTP_RUN_DIR=str(directory / "run"), TTP_ABANDONED_S="5", TTP_HANG_S="off", TTP_LOG="WARNING",
        )  # fmt: skip

    def spin(self, limit_s: float = SPIN_MAX_S) -> Spin:
        """Make all work wait that is queued on the current stream from now on."""
        if self.made_up is not None:
            return self.made_up.spin()
        return NoSpin() if self._spinner is None else self._spinner.spin(limit_s)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.made_up is not None:
            self.made_up.synchronize()
        elif self.real:
            torch.cuda.synchronize()

    def put(self, module: nn.Module) -> nn.Module:
        """Move the module to the device."""
        if self.made_up is not None:
            self.made_up.put(module)
            return module
        return module.to(self.device)

    def host_copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the present values of the tensors."""
        self.synchronize()
        if self.made_up is not None:
            return {name: self.made_up.copy(tensor) for name, tensor in tensors.items()}
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a case runs."""
        return self.made_up.watched() if self.made_up is not None else contextlib.nullcontext()

    def may_hang(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a thread that may wait for the device while it hangs."""
        return self.made_up.device.may_hang() if self.made_up is not None else contextlib.nullcontext()

    def no_memory(self) -> contextlib.AbstractContextManager[None]:
        """Forbid allocations on the device inside; of a real one ``memory.full`` has taken all."""
        return self.made_up.sealed() if self.made_up is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Forbid this thread to wait for the device inside."""
        if self.made_up is not None:
            with self.made_up.device.no_waiting():
                yield
            return
        set_mode: Any = torch.cuda.set_sync_debug_mode if self.real else lambda _mode: None
        set_mode("error")
        try:
            yield
        finally:
            set_mode("default")

    def save(self) -> tuple[int, Path]:
        """Save as ``ttp save`` does. Returns version and path of the checkpoint.

        Raises:
            AssertionError: none was made within ``PATIENCE_S``.
        """
        began = time.monotonic()
        with open_channel("127.0.0.1", self._port) as channel:
            token = metadata(os.environ.get("TTP_TOKEN", ""))
            answer = stub(channel).SaveNow(pb.SaveNowRequest(), metadata=token, timeout=PATIENCE_S)
        assert answer.saved, answer.text
        self.numbers["save_s"] = round(time.monotonic() - began, 4)
        return int(answer.version), Path(answer.path)

    def join_world(self, timeout_s: float = 600.0) -> None:
        """Become the only rank of a process group: NCCL's on a device."""
        library: Any = dist
        store = library.FileStore(str(self.directory / "store"), 1)
        timeout = datetime.timedelta(seconds=timeout_s)
        backend = "nccl" if self.real else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)

    def begin_again(self) -> None:
        """Make the next ``protected`` a new job."""
        self._port = free_port()
        os.environ["TTP_PORT"] = str(self._port)

    @contextlib.contextmanager
    def protected(self) -> Iterator[None]:
        """Leave the job that ``wrap_optimizer`` has joined inside."""
        try:
            yield
        finally:
            ttp.session.current().left()
            ttp.session.reset()


class Thread:
    """A training thread, which may hang. It makes these calls one after the other."""

    def __init__(self, stand: Stand, calls: Sequence[Callable[[], None]]) -> None:
        self._stand = stand
        self._moved = time.monotonic()
        self._problem: BaseException | None = None
        self._calls = calls
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_stuck(self) -> bool:
        """Wait until the thread has ended (False) or stands still (True)."""
        while self._thread.is_alive():
            if time.monotonic() - self._moved > QUIET_S:
                return True
            time.sleep(0.01)
        return False

    def join(self) -> None:
        """Wait for the thread's end, and raise what it has raised."""
        self._thread.join(SPIN_MAX_S + PATIENCE_S)
        assert not self._thread.is_alive(), "the training thread did not come back"
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        try:
            with self._stand.may_hang():
                for call in self._calls:
                    call()
                    self._moved = time.monotonic()
        except BaseException as problem:
            self._problem = problem


def saved_tensors(checkpoint: Path) -> dict[str, Any]:
    """Return every value of a checkpoint under its flat name."""
    flat: dict[str, Any] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{name}.{key}" if name else str(key), inner)
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                walk(f"{name}.{index}", inner)
        else:
            flat[name] = value

    walk("", read_values(checkpoint, items_of(Manifest.load(checkpoint).pieces)))
    return flat


def same_bytes(found: Any, wanted: Tensor) -> bool:
    """Compare bit for bit, also NaN. A plain number equals its tensor."""
    if not isinstance(found, Tensor):
        return bool(wanted.dim() == 0 and wanted.item() == found)
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    flat = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (found, wanted)]
    return torch.equal(flat[0], flat[1])


def assert_same(found: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    """Check that everything wanted is there, with the same bytes."""
    lacking = wanted.keys() - found.keys()
    assert not lacking, f"not saved: {sorted(lacking)}; there is {sorted(found)}"
    differ = [name for name, tensor in wanted.items() if not same_bytes(found[name], tensor)]
    assert not differ, f"other bytes than the reference: {differ}"
