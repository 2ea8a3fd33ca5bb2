"""An adapter of ttp to a made-up framework: the state is a dict of numpy arrays, and every rank holds all of it.

``CONTRIBUTING.md`` ("Add an adapter in an hour") explains this file step by step.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ttp import api
from ttp.core.layout import Layout, Rank, Version
from ttp.core.messages import Piece, SaverOrder
from ttp.core.restore_choice import agree
from ttp.core.restore_messages import Candidate, RestoreView
from ttp.errors import CheckpointError, ConfigError, UsageError
from ttp.processor.processor import Processor
from ttp.processor.source import Cancelled, StateSource, UpdateReporter
from ttp.store.manifest import Manifest
from ttp.store.piece_file import write_piece

Arrays = dict[str, Any]


class Sgd:
    """The framework's optimizer: SGD with momentum, which updates arrays in place.

    Args:
        weights: the trained arrays, by name.
        rate: the learning rate.
    """

    def __init__(self, weights: Arrays, rate: float) -> None:
        self.weights, self.rate = weights, rate
        self.moments: Arrays = {name: np.zeros_like(array) for name, array in weights.items()}
        self.reporter: UpdateReporter | None = None

    def step(self, gradients: Arrays) -> None:
        """Make one update, with gradients that have been reduced over all ranks."""
        if self.reporter is not None:
            self.reporter.begin_update()  # nothing is written yet; waits here while the job is frozen
        for name, gradient in gradients.items():
            self.moments[name] *= 0.5
            self.moments[name] += gradient
            self.weights[name] -= self.rate * self.moments[name]
        if self.reporter is not None:
            self.reporter.end_update()  # the last write is done: the version is finished


class NumpySource(StateSource):
    """The source of the state that the processor saves. Its methods run on ttp's threads.

    ``StateSource`` has further methods, which an adapter may implement later: for redo, comparison of replicas,
    rank-local state, and devices.
    """

    framework = "numpy"

    def __init__(self, optimizer: Sgd) -> None:
        self.arrays = {f"weights.{name}": array for name, array in optimizer.weights.items()}
        self.arrays |= {f"moments.{name}": array for name, array in optimizer.moments.items()}

    def write_pieces(
        self, *, order: SaverOrder, version: Version, draft: Path, generation: int, cancelled: Callable[[], bool]
    ) -> list[Piece]:
        """Write the pieces of ``order`` into ``draft``, durably. The gate is closed, so the arrays do not change."""
        pieces = []
        for shard in order.shards:
            if cancelled():
                raise Cancelled
            data = io.BytesIO()
            np.savez(data, **self.arrays)
            file = f"{shard}_{generation}.npz"
            pieces.append(write_piece(draft, file, data.getvalue(), "shard", order.rank, shard=shard))
        if order.job_state:
            job = json.dumps({"version": version}).encode()
            pieces.append(write_piece(draft, f"job_{generation}.json", job, "job", order.rank))
        return pieces


class NumpyAdapter:
    """The adapter for one training; see ``ttp.session.Adapter`` for the contract."""

    def __init__(self, optimizer: Sgd) -> None:
        self.optimizer, self._source = optimizer, NumpySource(optimizer)

    @property
    def source(self) -> NumpySource:
        """The source of the state that the processor saves."""
        return self._source

    def layout(self, world_size: int) -> Layout:
        """Return the layout: every rank holds a copy of the only shard."""
        return Layout.data_parallel(world_size)

    def refused(self, problem: ConfigError | UsageError, world_size: int) -> None:
        """Do nothing: ``layout`` is no collective call, so other ranks do not wait for this one."""

    def attach(self, processor: Processor) -> None:
        """Report updates to ``processor`` from now on. ttp calls this when the rank has joined the job."""
        self.optimizer.reporter = processor

    def agree_without_controller(self, found: tuple[Candidate, ...], skipped: tuple[str, ...]) -> Candidate | str:
        """Choose the newest checkpoint that this rank finds. ttp calls this when it is switched off."""
        return agree([RestoreView(Rank(0), found, skipped)])

    def load(self, checkpoint: Path, rank: int, world_size: int, *, protected: bool) -> Version:
        """Load a verified checkpoint into the arrays, in place. Check all arrays before changing one."""
        manifest = Manifest.load(checkpoint)
        (piece,) = (piece for piece in manifest.pieces if piece.kind == "shard")
        stored = np.load(checkpoint / piece.file, allow_pickle=False)
        arrays = self._source.arrays
        wrong = [name for name in arrays if name not in stored or stored[name].shape != arrays[name].shape]
        if wrong:
            raise CheckpointError(f"{checkpoint} belongs to another model: {', '.join(wrong)} differ")
        for name, array in arrays.items():
            array[...] = stored[name]
        return manifest.version

    def step_done(self) -> None:
        """Do nothing: a version ends with the update."""


def protect(optimizer: Sgd, save_dir: str | Path) -> Sgd:
    """Register the optimizer, and join the job if ``TTP_PORT`` is set. Raises the errors of ``ttp.wrap_optimizer``."""
    api.register(NumpyAdapter(optimizer), save_dir)
    return optimizer
