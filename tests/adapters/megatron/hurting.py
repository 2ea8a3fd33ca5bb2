"""Kills or stops ranks of a test world at one point of one step, one rank or several together.

The points, in their order: ``begin``, ``forward``, ``backward``, ``reduced``, ``pre_step0``, ``barrier`` (this rank has
entered the barrier before the update, and may or may not have released others from it), ``passed`` (all ranks have left
the barrier), ``post_step0`` and so on for each of Megatron's optimizers, ``gathered``, ``stepped``; and ``halfway``,
see ``tests.halfway``.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

import ttp.session
from tests.adapters.megatron.gpt import Training
from tests.halfway import Halfway, watched_meeting
from ttp.adapters.torch.loop import barrier
from ttp.processor.gate.gate import Gate


class Hurt:
    """The fault of this rank in one launch.

    Args:
        fault: ``ranks`` that kill themselves together, ``step`` (updates before it), ``phase``; ``host``: with the
            memory of their host; ``out`` and ``broken``: see ``Halfway``. Empty: no fault.
        life: how often the job was started before.
    """

    def __init__(self, fault: dict[str, Any], life: int) -> None:
        self.step = -1
        self.fault, self._life = fault, life
        self._directory, self.rank = Path(os.environ["JOB_DIR"]), int(os.environ["RANK"])

    @property
    def ranks(self) -> list[int]:
        """The ranks that are killed."""
        return list(self.fault["ranks"])

    def due(self, phase: str) -> bool:
        """Whether the fault happens in this phase of this step, on any rank."""
        return bool(self.fault) and (self.step, phase) == (self.fault["step"], self.fault["phase"])

    def at(self, phase: str) -> None:
        """Kill this rank if the fault is due here, when all ranks to be killed have reached this point."""
        if not self.due(phase) or self.rank not in self.ranks:
            return
        self.mark("dying")
        self.wait_for("dying", self.ranks)
        if self.fault.get("host"):
            _lose_memory()
        os.kill(os.getpid(), signal.SIGKILL)

    def mark(self, what: str) -> None:
        """Leave a mark that other ranks can see."""
        (self._directory / f"{what}.{self._life}.{self.rank}").touch()

    def marked(self, what: str, ranks: Iterable[int]) -> bool:
        """Whether these ranks have left the mark."""
        return all((self._directory / f"{what}.{self._life}.{rank}").exists() for rank in ranks)

    def wait_for(self, what: str, ranks: Iterable[int]) -> None:
        """Wait until these ranks have left the mark."""
        while not self.marked(what, ranks):
            time.sleep(0.001)

    def watch(self, training: Training) -> None:
        """Put a call of ``at`` into every phase of a step. Call this before ttp adds its hooks."""
        for number, inner in enumerate(training.optimizer.chained_optimizers):
            if inner.optimizer is not None:
                inner.optimizer.register_step_pre_hook(lambda *_args, n=number: self.at(f"pre_step{n}"))
                inner.optimizer.register_step_post_hook(lambda *_args, n=number: self.at(f"post_step{n}"))
        training.before_update = lambda: self.at("reduced")
        if self.fault:
            library: Any = barrier
            library.Meeting = watched_meeting(self.at, lambda: Here(self) if self.due("halfway") else None)
            _watch_passes(training, self)
            Here(self).watch(training)

    def watch_behind(self, training: Training) -> None:
        """Put calls of ``at`` behind the hooks of ttp."""
        first = training.optimizer.chained_optimizers[0].optimizer
        first.register_step_pre_hook(lambda *_args: self.at("passed"))


class Here(Halfway):
    """The fault of this launch, if it divides the ranks."""

    def __init__(self, hurt: Hurt) -> None:
        fault = hurt.fault
        super().__init__(
            hurt.rank, dist.get_world_size(), hurt.ranks, fault.get("out", ()), broken=fault.get("broken", False)
        )
        self._hurt = hurt

    def mark(self, what: str) -> None:
        self._hurt.mark(what)

    def marked(self, what: str, ranks: Iterable[int]) -> bool:
        return self._hurt.marked(what, ranks)

    def die(self) -> None:
        self._hurt.at("halfway")

    def watch(self, training: Training) -> None:
        """Watch the end of updates and, in a job without a barrier, their beginning."""
        if not self.out:
            return
        hurt, gate = self._hurt, cast("Any", Gate)  # hooks behind those of ttp come after a gather, too
        if hurt.fault.get("undo"):
            first = training.optimizer.chained_optimizers[0].optimizer
            first.register_step_pre_hook(lambda *_: self.without_barrier() if hurt.due("halfway") else None)
        ended = gate.end_update

        def end_update(*args: Any) -> None:
            ended(*args)
            if hurt.due("halfway"):
                hurt.mark("updated")

        gate.end_update = end_update


def _lose_memory() -> None:
    """Remove the host's pages. All of its ranks do so at once, so files may be gone already."""
    processor = ttp.session.current().processor
    assert processor is not None and processor.host.pages is not None
    shutil.rmtree(processor.host.pages.path, ignore_errors=True)


def _watch_passes(training: Training, hurt: Hurt) -> None:
    """Put calls of ``at`` into forward and backward pass, and after the optimizer's update and gather."""
    watched: Any = training
    forward, step = watched._forward, watched.optimizer.step

    def watched_forward(*args: Any) -> Any:
        output, loss = forward(*args)
        hurt.at("forward")
        if output.requires_grad:
            output.register_hook(lambda _gradient: hurt.at("backward"))
        return output, loss

    def watched_step() -> Any:
        done = step()
        hurt.at("gathered")
        return done

    watched._forward, watched.optimizer.step = watched_forward, watched_step
