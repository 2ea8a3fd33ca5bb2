"""A rank that has been saved ends, whatever its device does; processes that a data loader forks do no harm."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import ttp
from tests.gpu.stand import PATIENCE_S, Stand, assert_same, saved_tensors
from tests.gpu.training import Training, references


def forked_workers(stand: Stand) -> None:
    """Workers are forked after CUDA and gRPC have started. They read and end; then the state is saved."""
    wanted = references(lambda: Training(stand), 4)
    training = Training(stand)
    with stand.protected():
        training.protect()
        training.step()
        loader: Any = DataLoader(
            TensorDataset(torch.arange(12.0)), batch_size=4, num_workers=2, multiprocessing_context="fork",
            pin_memory=stand.real, generator=torch.Generator(),
        )  # fmt: skip
        for (batch,) in loader:
            assert batch.to(stand.device, non_blocking=True).sum().item() >= 0
            training.step()
        version, checkpoint = stand.save()
        assert version == 4
        assert_same(saved_tensors(checkpoint), wanted[4])


def end_behind_a_spin(stand: Stand) -> None:
    """Call ``os._exit`` while a kernel spins. The parent measures how long the process takes to end."""
    spin = stand.spin()
    torch.zeros(8, device=stand.device).add_(1)
    print(f"leaving {time.monotonic()}", flush=True)
    sys.stdout.flush()
    assert spin is not None
    os._exit(75)


def preempted_behind_a_spin(stand: Stand) -> None:
    """SIGTERM comes while the main thread waits for a device that hangs. ttp saves the finished version and exits.

    Prints the path of the checkpoints and the digest of the expected state before.
    """
    os.environ["TTP_SAVE_DIR"] = os.environ.get("CASE_SAVE_DIR", str(stand.directory / "checkpoints"))
    wanted = references(lambda: Training(stand), 2)
    torch.save(wanted[2], os.environ["CASE_WANTED"])

    @ttp.ttp_to_persist
    def train() -> None:
        training = Training(stand)
        training.protect()
        training.step()
        training.step()
        stand.synchronize()
        stand.spin()
        training.gradient()
        timer = threading.Timer(1.0, _preempt)
        timer.start()
        if stand.real:
            training.update()
            torch.cuda.synchronize()  # until the end of the spin, unless ttp ends the process before
        else:
            threading.Event().wait(PATIENCE_S)
        raise AssertionError("nobody ended this process")

    train()


def _preempt() -> None:
    print(f"leaving {time.monotonic()}", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
