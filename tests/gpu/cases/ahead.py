"""The host runs ahead of a device that hangs; the saved version is the one that the device holds."""

from __future__ import annotations

import copy
import threading
from typing import Any
from unittest import mock

import torch

import ttp.session
from tests.gpu.stand import PATIENCE_S, Stand, Thread, assert_same, saved_tensors
from tests.gpu.training import Training, references
from ttp.processor import paged_source

WARM = 3


def host_ahead(
    stand: Stand, optimizer: str = "adam-foreach", scaled: bool = False, lead: int = 2, warm: int = WARM
) -> None:
    """Queue update ``warm + 1`` and all later ones behind a kernel that spins; the saved version is ``warm``.

    A GradScaler that asks the device for infinities stops the host in the first of them. Afterwards training goes on as
    without the save.
    """

    def make() -> Training:
        return Training(stand, optimizer, scaled=scaled)

    wanted = references(make, warm + lead + 2)
    training = make()
    with stand.protected():
        training.protect()
        for _ in range(warm):
            training.step()
        stand.synchronize()

        training.gradient()
        spin = stand.spin()
        training_thread = Thread(stand, [training.update, *[training.step] * lead])
        try:
            stuck = training_thread.wait_stuck()
            stand.numbers["host at"] = training.steps
            version, checkpoint = stand.save()
        finally:
            spin.release()
        training_thread.join()
        assert version == (warm if stand.hangs else warm + 1 + lead), f"the host was at {training.steps}, {stuck=}"
        assert_same(saved_tensors(checkpoint), wanted[version])
        training.step()
        assert_same(training.state(), wanted[warm + lead + 2])


LATE_S = 0.5


def average_behind(stand: Stand) -> None:
    """An average of the weights is queued behind an update, and the device is late with it: the save has it whole."""
    training = Training(stand)
    average = copy.deepcopy(training.module)
    with stand.protected(), mock.patch.object(paged_source, "POST_STEP_S", PATIENCE_S):
        training.protect(extra_state={"average": average})
        for number in range(WARM):
            training.step()
            spin = stand.spin() if number == WARM - 1 else None
            with torch.no_grad():
                torch._foreach_lerp_([*average.parameters()], [*training.module.parameters()], 0.1)
            training.gradient()
        assert spin is not None
        adapter: Any = ttp.session.current().adapter
        source, asked = adapter.source, list[bool]()
        done = source.post_step_done

        def released_when_asked() -> bool:
            asked.append(done())
            if asked.count(False) == 1 and not asked[-1]:
                threading.Timer(LATE_S, spin.release).start()
            return asked[-1]

        source.post_step_done = released_when_asked
        version, checkpoint = stand.save()
        spin.release()
        assert version == WARM
        wanted = stand.host_copy({f"extra.average.{name}": p for name, p in average.named_parameters()})
        assert_same(saved_tensors(checkpoint), wanted)
