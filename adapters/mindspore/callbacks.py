"""The callbacks for ``Model.train``: ``TFTRegister`` as in MindSpore 2.4, ``TrainFaultTolerance`` as in 2.10."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from mindspore.train import Callback

from ttp import api, session
from ttp.adapters.mindspore.adapter import MindSporeAdapter
from ttp.adapters.mindspore.constraints import SLICING, check_sink, parallel_mode
from ttp.adapters.mindspore.joining import join, meet_at, optimizer_of
from ttp.adapters.mindspore.layouts import RankGroups
from ttp.adapters.mindspore.local_state import Position
from ttp.adapters.mindspore.source import SaveFunction
from ttp.adapters.mindspore.switch import require_switched_on
from ttp.adapters.mindspore.wrapper import OptTTPWrapper
from ttp.errors import ConfigError, UsageError
from ttp.processor.uncaught import tell_launcher_of_mistakes

DEFAULT_PORT = 30051
"""Port of the controller if neither program nor launcher gives one: the port of the example in MindSpore's documents.
"""

PORT_MIN, PORT_MAX = 1024, 65535
"""Smallest and largest port that programs may give."""


class Protection(Callback):
    """The common part of ``TFTRegister`` and ``TrainFaultTolerance``.

    Args:
        ckpt_save_path: directory of checkpoints, seen by all hosts.
        initial_step: steps made before this ``Model.train``; used if neither ``restore`` nor the loaded state gives it.
        replicas: see ``TFTRegister``.
        strategy: see ``TFTRegister``.
    """

    def __init__(
        self,
        ckpt_save_path: str | Path,
        *,
        initial_step: int = 0,
        replicas: RankGroups | None = None,
        strategy: str | Path | None = None,
    ) -> None:
        super().__init__()
        tell_launcher_of_mistakes()
        require_switched_on()
        self._save_path, self._initial_step = ckpt_save_path, initial_step
        self._replicas, self._strategy = replicas, strategy
        self._save_fn: SaveFunction | None = None
        self._adapter: MindSporeAdapter | None = None
        self._base = 0
        self._counts = False  # whether ``_base`` belongs to this training
        self._late = False
        self._pauses = contextlib.ExitStack()

    def on_train_begin(self, run_context: Any) -> None:
        """Check the constraints, and join the job.

        Raises:
            ConfigError: the job violates a constraint; the message says what to change.
            UsageError: the optimizer is not wrapped.
        """
        tell_launcher_of_mistakes()
        cb_params = run_context.original_args()
        check_sink(_sink_size(cb_params))
        self._counts = False
        self._meet()
        told = self._replicas or self._strategy or session.current().adapter is not None
        self._late = parallel_mode() in SLICING and not told
        self._late = self._late and not getattr(cb_params.train_network, "parameter_layout_dict", None)
        if not self._late:
            self._join(cb_params)
        if self._adapter is not None:
            self._adapter.training_begins(several=_decorated())

    def _meet(self) -> None:
        """Set the address of the controller. Subclasses override it."""

    def _join(self, cb_params: Any) -> MindSporeAdapter:
        optimizer = optimizer_of(cb_params.optimizer, cb_params.network)
        if self._save_fn is not None and getattr(optimizer, "undo", None):
            raise UsageError(
                f"undo={optimizer.undo!r} of the optimizer's wrapper is not for TrainFaultTolerance(ckpt_save_fn=): "
                "the function would save the live parameters as the step before them. Leave one of the two out"
            )
        self._adapter = adapter = join(
            cb_params.train_network, optimizer, self._save_path, replicas=self._replicas, strategy=self._strategy
        )
        adapter.source.save_fn, adapter.source.cb_params = self._save_fn, cb_params
        adapter.between_trainings.close()
        return adapter

    def _begin(self, adapter: MindSporeAdapter, cb_params: Any, made: int = 0) -> None:
        """Tell the adapter with which version training began, ``made`` steps ago.

        Call it in the first step, not before: MindSpore sets the epoch only there.
        """
        size = cb_params.train_dataset.get_dataset_size()
        start, sinks = adapter.position.step, cb_params.get("dataset_sink_mode", False)
        if not adapter.begun:
            epoch = cb_params.batch_num if sinks else size
            start = _init_step(cb_params.train_dataset) or (cb_params.cur_epoch_num - 1) * epoch or self._initial_step
        self._base, self._counts = start + 1 - cb_params.cur_step_num, True
        ahead = cb_params.cur_epoch_num - cb_params.cur_step_num if sinks else None
        adapter.source.earlier_steps, adapter.source.epochs_ahead = self._base, ahead
        if not adapter.begun:
            position = _place(start + made, size)
            adapter.begin_by_hand(position, self._initial_step or start, made)

    def on_train_step_begin(self, run_context: Any) -> None:
        """Tell the adapter the position of the step in the data."""
        if self._adapter is not None:
            cb_params = run_context.original_args()
            if not self._counts:
                self._begin(self._adapter, cb_params)
            self._adapter.step_begins(self._position(cb_params))

    def on_train_step_end(self, run_context: Any) -> None:
        """Tell the adapter that the step is over. Join the job now if the layout was unknown when training began."""
        if self._adapter is not None:
            self._adapter.step_ends()
        elif self._late:  # the network has been compiled by now, and knows its layout
            self._late = False
            cb_params = run_context.original_args()
            self._begin(self._join(cb_params), cb_params, made=1)

    def on_eval_begin(self, run_context: Any) -> None:
        """Declare the evaluation by ``ttp.paused``, so that it does not count as a hang."""
        self._pauses.enter_context(api.paused("evaluation"))

    def on_eval_end(self, run_context: Any) -> None:
        """End the pause."""
        self._pauses.close()

    def on_train_end(self, run_context: Any) -> None:
        """Wait until every rank is done: if a rank dies in its last step, the others can still save its state.

        In a function that is decorated with ``ttp.ttp_to_persist`` more trainings may follow: this rank stays in the
        job, and only a pause begins.
        """
        if self._adapter is None:
            return
        if _decorated():
            self._adapter.between_trainings.enter_context(api.paused("between trainings"))
            self._adapter = None
        else:
            session.current().returned()
            self._forget()

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report an exception of ``Model.train`` and wait for the rescue, which ends the process inside this method."""
        self._pauses.close()
        if problem is None or self._adapter is None:
            return
        current = session.current()
        if isinstance(problem, KeyboardInterrupt) or (isinstance(problem, SystemExit) and not problem.code):
            current.left(problem)
        elif isinstance(problem, (Exception, SystemExit)):
            current.raised(problem)
        self._forget()

    def _forget(self) -> None:
        if self._adapter is not None:
            self._adapter.detach()
            self._adapter = None
        if not _decorated():
            session.reset()

    def _position(self, cb_params: Any) -> Position:
        return _place(self._base + cb_params.cur_step_num, cb_params.train_dataset.get_dataset_size())


class TFTRegister(Protection):
    """Enables the power-off checkpoint for a ``Model.train``, like the class of this name in MindSpore 2.4.

    When a worker dies, hangs or raises, one healthy replica of every slice writes
    ``ckpt_save_path/tft_saved_checkpoints-step_{global_step}/rank_{r}/ttp_rank_{r}-{epoch}_{step}.ckpt``, and all
    workers end with exit code 75. The controller is a process of its own: any worker may die, also the worker
    ``ctrl_rank_id``.

    Args:
        ctrl_rank_id: worker on whose host the controller runs.
        ctrl_ip: address of the controller's host.
        ctrl_port: port at which the controller listens. If ``TTP_PORT`` is set, as by ``ttp run``, the launcher runs
            the controller on host 0, and these three arguments are ignored.
        ckpt_save_path: directory of checkpoints, seen by all hosts. ``TTP_SAVE_DIR`` overrides it.
        replicas: which ranks hold the same slices, one list per slice: for ``layerwise_parallel`` parameters.
        strategy: file of ``strategy_ckpt_config``, for semi-automatic and automatic parallelism; for a pipeline the
            directory with the files of all stages.

    Raises:
        ConfigError: ``MS_ENABLE_TFT`` or ``MINDIO_FOR_MINDSPORE`` is missing, an argument is invalid, or
            ``ctrl_rank_id`` runs on another host than ``ctrl_ip`` or is no rank of the job.
    """

    def __init__(
        self,
        ctrl_rank_id: int,
        ctrl_ip: str,
        ctrl_port: int,
        ckpt_save_path: str | Path,
        *,
        replicas: RankGroups | None = None,
        strategy: str | Path | None = None,
    ) -> None:
        super().__init__(ckpt_save_path, replicas=replicas, strategy=strategy)
        if isinstance(ctrl_rank_id, bool) or not isinstance(ctrl_rank_id, int) or ctrl_rank_id < 0:
            raise ConfigError(f"ctrl_rank_id={ctrl_rank_id!r} is no rank: give an integer from 0; 0 is usual")
        if not isinstance(ctrl_ip, str) or not ctrl_ip.strip():
            raise ConfigError(f"ctrl_ip={ctrl_ip!r} is no address: give the address of the host of rank {ctrl_rank_id}")
        if isinstance(ctrl_port, bool) or not isinstance(ctrl_port, int) or not PORT_MIN <= ctrl_port <= PORT_MAX:
            raise ConfigError(f"ctrl_port={ctrl_port!r} is no port: give a free one from {PORT_MIN} to {PORT_MAX}")
        self._rank, self._address, self._port = ctrl_rank_id, ctrl_ip.strip(), ctrl_port
        self._meet()

    def _meet(self) -> None:
        meet_at(self._address, self._port, self._rank)


class TrainFaultTolerance(Protection):
    """Enables the power-off checkpoint for a ``Model.train``, with the arguments of MindSpore 2.10.

    The controller is found by ``TTP_PORT`` and ``MASTER_ADDR``, or by ``MS_TFT_IP`` and ``MS_TFT_PORT``.

    Args:
        ckpt_save_path: see ``TFTRegister``; may be None if ``ckpt_save_fn`` is given.
        ckpt_save_fn: a function ``save(cb_params, append_dict)`` that writes the checkpoint instead of ttp. It is
            called on one rank of each slice, on another thread than training. The optimizer's wrapper must not have
            ``undo``. ``cb_params`` is a copy of those of ``Model.train``, with ``cur_step_num`` and ``cur_epoch_num``
            of the saved step. ``append_dict`` is made for
            ``save_checkpoint(cb_params.train_network, ..., append_dict=)``: it has ``epoch_num``, ``step_num``,
            ``batch_num``, ``cur_rank``, ``global_step`` and ``loss_scale``, without names that are parameters of the
            network, as ``global_step`` usually is; on a device also MindSpore's ``__exception_save__``, which
            ``save_checkpoint`` does not write. ttp does not verify the files and writes no manifest. In PyNative
            mode, reading a Parameter in this function waits for the collective that hangs.
        ckpt_load_fn: a function ``load()`` that returns what ``ckpt_save_fn`` saved, and ``remove_redundancy``, as in
            MindSpore; give it to ``restore(..., ckpt_load_fn=)``.
        initial_step: steps made before this ``Model.train``; used if ``restore`` does not give it.
        initial_epoch: has no effect: that of ``Model.train`` counts. MindFormers passes it.
        replicas: see ``TFTRegister``.
        strategy: see ``TFTRegister``.

    Raises:
        ConfigError: ``MS_ENABLE_TFT`` or ``MINDIO_FOR_MINDSPORE`` is missing.
        UsageError: neither a path nor a function was given, or a function is not callable.
    """

    def __init__(
        self,
        ckpt_save_path: str | Path | None = None,
        *,
        ckpt_save_fn: SaveFunction | None = None,
        ckpt_load_fn: Callable[[], Any] | None = None,
        initial_step: int = 0,
        initial_epoch: int = 0,
        replicas: RankGroups | None = None,
        strategy: str | Path | None = None,
    ) -> None:
        if ckpt_save_path is None and ckpt_save_fn is None:
            raise UsageError("TrainFaultTolerance() needs ckpt_save_path, or a ckpt_save_fn that writes checkpoints")
        for name, function in (("ckpt_save_fn", ckpt_save_fn), ("ckpt_load_fn", ckpt_load_fn)):
            if function is not None and not callable(function):
                raise UsageError(f"{name}={function!r} is no function")
        path = "./ttp_checkpoints/" if ckpt_save_path is None else ckpt_save_path
        super().__init__(path, initial_step=initial_step, replicas=replicas, strategy=strategy)
        self._save_fn, self.ckpt_load_fn = ckpt_save_fn, ckpt_load_fn
        self._meet()

    @classmethod
    def get_optimizer_wrapper(cls, origin_opt_cls: Any) -> type[OptTTPWrapper]:
        """Return a class of wrapped optimizers: ``get_optimizer_wrapper(nn.SGD)(parameters, 1e-2)``.

        It is a class, as MindSpore's is, because registries such as that of MindFormers take only classes.
        """

        class Wrapped(OptTTPWrapper):
            """Makes an optimizer of ``origin_opt_cls`` and wraps it."""

            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(origin_opt_cls(*arguments, **named))

        return Wrapped

    def _meet(self) -> None:
        meet_at(os.environ.get("MS_TFT_IP", ""), _port(os.environ.get("MS_TFT_PORT", str(DEFAULT_PORT))))


def _decorated() -> bool:
    """Return whether the caller runs inside a function that ``ttp.ttp_to_persist`` protects at the moment."""
    current = session.current()
    return current.enabled and current.in_train


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and PORT_MIN <= int(text) <= PORT_MAX:
        return int(text)
    raise ConfigError(f"MS_TFT_PORT={text!r:.40} is no port: give a free one from {PORT_MIN} to {PORT_MAX}")


def _place(step: int, size: int) -> Position:
    """Return the position after ``step`` steps, in epochs of ``size`` steps.

    The epochs of ``Model.train`` are not used: it counts them from its own beginning, and in sink mode it counts sinks.
    """
    return Position((step - 1) // size + 1 if step else 0, step, size)


def _init_step(dataset: Any) -> int:
    """Return the step that was given to ``dataset.set_init_step``, at which training begins; 0: not given."""
    return int(dataset.get_init_step() or 0) if hasattr(dataset, "get_init_step") else 0


def _sink_size(cb_params: Any) -> int | None:
    """Return the number of steps between two callbacks; None: one step."""
    if cb_params.get("sink_size", None):
        return int(cb_params.sink_size) if cb_params.sink_size > 0 else int(cb_params.batch_num)
    size = cb_params.train_dataset.get_dataset_size()
    return int(cb_params.batch_num) if cb_params.batch_num != size else None
