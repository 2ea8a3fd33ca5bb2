"""The adapter for one MindSpore training, registered by a callback, ``restore`` or ``wrap_optimizer``."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import context, nn

from ttp.adapters.mindspore.barrier import UpdateBarrier
from ttp.adapters.mindspore.constraints import check_world, gather
from ttp.adapters.mindspore.layouts import RankGroups, layout_of
from ttp.adapters.mindspore.local_state import LocalCapture, Position
from ttp.adapters.mindspore.memory import Memory
from ttp.adapters.mindspore.preimage import PreImage
from ttp.adapters.mindspore.read import load_into, position_in
from ttp.adapters.mindspore.source import MindSporeSource
from ttp.adapters.mindspore.wrapper import OptTTPWrapper
from ttp.core.layout import Layout, Rank, Version
from ttp.core.restore_choice import agree
from ttp.core.restore_messages import Candidate, RestoreView
from ttp.errors import ConfigError, UsageError
from ttp.launch.standby import own_address
from ttp.store.catalog import newest_name
from ttp.store.manifest import Manifest

if TYPE_CHECKING:
    from ttp.processor.processor import Processor

log = logging.getLogger("ttp.adapters.mindspore")

LEFT = (
    "the update after version %d was left by an exception that the program has caught. Parts of this update may be in "
    "the parameters: nothing can be saved from this rank until its next update is finished. If other ranks did not "
    "raise at the same update, their parameters differ from those of this rank; ttp compares them at a checkpoint"
)
"""Log message for an update that ended in an exception."""

NEWER = (
    "%s holds step %d, and this training begins with step %d: what it saves counts as older, and is not restored. "
    "Resume with ttp.adapters.mindspore.restore(). After load_checkpoint by hand, give the step with "
    "dataset.set_init_step() or TrainFaultTolerance(initial_step=). To start from scratch, use another directory"
)
"""Log message for a training that begins with an older version than its directory of checkpoints holds."""


class MindSporeAdapter:
    """The adapter for MindSpore; see ``ttp.session.Adapter`` for the contract.

    Args:
        network: the cell that contains the trained parameters and the optimizer's state: ``Model.train_network``, or
            the network itself.
        optimizer: the optimizer, as an ``OptTTPWrapper``.
        replicas: see ``layout_of``.
        strategy: see ``layout_of``.
        compiled: see ``layout_of``.

    Raises:
        UsageError: the optimizer is not wrapped.
        ConfigError: a parameter cannot be saved.
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: Any,
        *,
        replicas: RankGroups | None = None,
        strategy: str | Path | None = None,
        compiled: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(optimizer, OptTTPWrapper):
            raise UsageError(
                f"the optimizer is a {type(optimizer).__qualname__} that is not wrapped: write "
                "optimizer = ttp.adapters.mindspore.OptTTPWrapper(optimizer) before you give it to Model"
            )
        self.network, self.optimizer = network, optimizer
        self._replicas, self._strategy, self._compiled = replicas, strategy, compiled
        parameters = {id(p): p for cell in (network, optimizer) for p in cell.get_parameters()}
        self._parameters = list(parameters.values())
        self._memory = Memory(self._parameters)
        updated = {p.name for p in [*optimizer.opt.get_parameters(), *optimizer.parameters]}
        self._beside = [name for name in self._memory.held if name not in updated]
        self._capture = LocalCapture(self._memory, self._beside)
        self.source = MindSporeSource(self._memory, self._capture, sorted(updated & self._memory.held.keys()))
        self.source.loss_scale = float(optimizer.loss_scale)
        self._preimage = PreImage(self._memory, sorted(updated)) if optimizer.undo else None
        self.source.preimage = self._preimage
        self._thread = threading.get_ident()
        self._processor: Processor | None = None
        self._barrier: UpdateBarrier | None = None
        self._driven = self._declared = self._updated = False
        self.position = Position()
        """The position in the data at which the last version was finished, or at which the running step will end."""
        self._begins_with: Version | None = None
        self.between_trainings = contextlib.ExitStack()
        """Holds a ``ttp.paused`` between two trainings, so that the time between them does not count as a hang."""

    def layout(self, world_size: int) -> Layout:
        """Find the replica groups.

        Raises:
            ConfigError: the replica groups cannot be found, or a slice has no replica; the message says what to change.
        """
        check_world(world_size)
        known = self._compiled or getattr(self.network, "parameter_layout_dict", None)
        found = layout_of(known, self._parameters, world_size, replicas=self._replicas, strategy=self._strategy)
        log.info("replica groups: %s", dict(found.groups))
        return found

    def says(self, replicas: RankGroups | None, strategy: str | Path | None) -> None:
        """Set the layout arguments that a callback has and ``restore`` did not; None changes nothing.

        See ``layout_of`` for the arguments.
        """
        self._replicas = replicas if replicas is not None else self._replicas
        self._strategy = strategy if strategy is not None else self._strategy

    def attach(self, processor: Processor) -> None:
        """Report updates to ``processor`` from now on."""
        self._processor, self._thread = processor, threading.get_ident()
        if self._begins_with is not None:  # restored before ttp was switched on
            processor.set_base_version(self._begins_with)
        self.source.connect(processor)
        self.optimizer.reporter = self
        self._capture.read_stream()
        self._capture.capture(processor.gate.version, self.position, final=True)
        if len(set(processor.layout.groups.values())) > 1 and self._preimage is None:
            env = processor.env
            host = own_address(processor.config, env.master_addr)
            self._barrier = UpdateBarrier(env.rank, env.world_size, host, processor, gather, processor.config)

    def detach(self) -> None:
        """Stop reporting updates."""
        if self._barrier is not None:
            self._barrier.close()
            self._barrier = None
        if self._processor is not None:
            self.optimizer.ttp_reached = self._processor.gate.version
        self.optimizer.reporter = self._processor = None
        self._begins_with = None

    # ----------------------------------------------------------------------------------- what training begins with

    @property
    def begun(self) -> bool:
        """Whether it is known with which version training begins."""
        return self._begins_with is not None

    def begin(self, version: Version, position: Position) -> None:
        """Note that training continues from ``version``, which is loaded, at ``position`` in the data.

        Call it on the training thread, and not while a graph runs.
        """
        self._begins_with, self.position = version, position
        processor = self._processor
        if processor is None:
            return
        if processor.gate.version != version:
            processor.set_base_version(version)
        self._capture.read_stream()
        self._capture.capture(version, position, final=True)

    def begin_by_hand(self, position: Position, said: int, made: int = 0) -> None:
        """Note that training begins without a state from ``restore``; the program itself may have loaded a state.

        The version is the optimizer's count if the program loaded the optimizer's state, else ``said``. It is never
        less than the version that this process has reached before, so that its next checkpoint does not count as older.

        Args:
            position: the present position in the data.
            said: number of earlier steps that the program gave; 0: it gave none.
            made: upper bound of the updates that this training made before it joined the job.
        """
        counted = int(self.version)
        before = max(counted - made, 0)
        reached = int(self.optimizer.ttp_reached)
        version = Version(max(before or said, reached) + counted - before)
        self.begin(version, position)
        if self._processor is not None and self._processor.env.rank == 0:
            _warn_of_newer(self._processor.save_dir, version)

    def training_begins(self, *, several: bool) -> None:
        """Restore the random streams again: the program may have used or seeded them since ``restore``.

        Args:
            several: whether the program trains several times, such as once for each epoch: what it does between two
                trainings then belongs to the training.
        """
        state, self._capture.restored = self._capture.restored, None
        size = self.position.batch_num
        if state is not None and not (several and size and self.position.step % size == 0):
            self._capture.restore_streams(state)

    def step_done(self) -> None:
        """Note that an iteration of the program's own loop is over: what it changed after its update belongs to it."""
        self._declared = True
        self.step_ends()

    # ------------------------------------------------------------------------------------------- the training thread

    def begin_update(self) -> None:
        """See ``Reporter``."""
        processor = self._processor
        if processor is None:
            return
        if processor.gate.updating:
            log.error(LEFT, processor.gate.version)
            processor.leave_update()
        self._look()
        left = processor.gate.left
        version = processor.gate.version + left  # an update that was left in the middle has used up its version number
        self._capture.capture(version + 1, self._here(version + 1), final=False)
        if self._preimage is not None and not left:  # a state in the middle of an update is no version to go back to
            self._preimage.take(version)
        processor.mark += 1
        if self._barrier is not None:
            self._barrier.wait()
        processor.begin_update()

    def end_update(self) -> None:
        """See ``Reporter``."""
        processor = self._processor
        if processor is None:
            return
        self._look()
        version = processor.gate.version + 1
        self._updated, self.source.in_step = True, self._driven or self._declared
        self._capture.capture(version, self._here(version), final=not self.source.in_step)
        processor.mark = 0
        processor.end_update()

    def _look(self) -> None:
        """Look where parameters and MindSpore's random stream are now, before a capture.

        A graph of ``ms.jit`` runs on a thread of MindSpore, where asking for an address waits for this very graph.
        """
        if threading.get_ident() == self._thread:
            _python_handles_sigterm()
            self._memory.again()
            if context.get_context("mode") == context.PYNATIVE_MODE:
                self._capture.read_stream()

    def step_begins(self, position: Position) -> None:
        """Note that ``Model.train`` begins the step that ends at ``position``."""
        self.step_ends()  # later callbacks, and those at the end of an epoch, may have changed something since
        self._driven, self._updated = True, False
        self.position = position
        processor = self._processor
        if processor is not None:
            _python_handles_sigterm()
            processor.mark += 1
            self._capture.capture(processor.gate.version + 1, position, final=False, passed=False)

    def step_ends(self) -> None:
        """Note that the step is over, with or without an update."""
        processor = self._processor
        if processor is None:
            return
        self._memory.again()
        self._capture.read_stream()
        if self._updated:
            version = processor.gate.version
            self._capture.capture(version, self._here(version), final=True)
        self._updated, self.source.in_step = self._updated and self._driven, False

    def _here(self, version: int) -> Position:
        """Return the position of ``version`` in the data; without ``Model.train`` each update counts as a step."""
        return self.position if self._driven else Position(step=version)

    def refused(self, problem: ConfigError | UsageError, world_size: int) -> None:
        """Do nothing: other ranks do not wait for this rank before it joins; the launcher sees its exit code."""

    # --------------------------------------------------------------------------------------------------- restoring

    def agree_without_controller(self, found: tuple[Candidate, ...], skipped: tuple[str, ...]) -> Candidate | str:
        """Choose a checkpoint from this rank's candidates alone; see ``ttp.session.Adapter``.

        Without ttp switched on, ranks cannot compare what they find: all ranks must see the same ``save_dir``.
        """
        return agree([RestoreView(Rank(0), found, skipped)])

    def load(self, checkpoint: Path, rank: int, world_size: int, *, protected: bool) -> Version:
        """Load a verified checkpoint into the network and the optimizer.

        Raises:
            CheckpointError: the checkpoint belongs to another network or another layout (nothing has been changed
                then), or a part of it cannot be read.
        """
        manifest = Manifest.load(checkpoint)
        self.position, notes = load_into(self._memory, self._capture, checkpoint, manifest, rank, world_size)
        for note in notes:
            log.warning("restored version %s, but %s", manifest.version, note)
        self._replaced()
        self._begins_with = Version(manifest.version)
        if protected:
            self._capture.read_stream()
            self._capture.capture(manifest.version, self.position, final=True)
        return Version(manifest.version)

    @property
    def version(self) -> Version:
        """The optimizer's count of finished updates (``global_step``). Do not read it while a graph runs."""
        return Version(int(self.optimizer.global_step.asnumpy().item()))

    def loaded_by(self, load: Callable[[], Any]) -> Version:
        """Load the state that ``load``, the program's ``ckpt_load_fn``, returns. Returns the version of that state.

        Raises:
            UsageError: the function did not return a dict with ``step_num`` and all parameters.
        """
        found = load()
        values, shared = found if isinstance(found, tuple) and len(found) == 2 else (found, False)
        if not isinstance(values, dict) or "step_num" not in values:
            raise UsageError(
                "ckpt_load_fn() must return (parameters, remove_redundancy), where parameters is a dict with step_num"
            )
        absent, _ = ms.load_param_into_net(self.network, values, strict_load=True, remove_redundancy=bool(shared))
        if absent and not shared:  # else other ranks have sent them
            raise UsageError(f"ckpt_load_fn() must return all parameters of the network, and lacks {absent}")
        self._replaced()
        self.begin(self.version, position_in(values))
        return self.version

    def _replaced(self) -> None:
        """Note that a load has replaced the state."""
        self._memory.look()
        self._capture.begin_anew()
        if self._preimage is not None:
            self._preimage.forget()


def _python_handles_sigterm() -> None:
    """Install Python's handler of SIGTERM again, on the main thread.

    The threads of a GeneratorDataset replace it by one that ends the process, which MindSpore made for processes.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _warn_of_newer(save_dir: Path, version: Version) -> None:
    """Warn if ``save_dir`` has a newer version than ``version``, with which this training begins."""
    with contextlib.suppress(OSError):
        if (newest := newest_name(save_dir)) > version:
            log.warning(NEWER, save_dir, newest, version)
