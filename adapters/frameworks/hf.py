"""The Trainer of Hugging Face Transformers: saves its state as ``extra_state``, and makes a directory to resume from.

The Trainer reads the step at which it begins from a directory ``checkpoint-N``, before it builds anything. So
``resume_directory`` makes such a directory from ttp's checkpoint. When optimizer and model exist (``on_train_begin``),
ttp joins the job and restores them itself: it checks the digests, agrees with the other ranks, and restores every bit.

A version ends at ``on_step_end``. Logging, evaluation and saving for that step follow, and perhaps the end of an epoch.
At the end of the step, and after these stages, a *mark* is kept: the Trainer's state at that moment. (This is not the
mark of the heartbeat.) A resumed job starts at the last mark that all ranks had, and repeats the stages that follow it.

The Trainer's state is equal on all ranks, except for the sum of its losses. For a rank that died in the exchange of
gradients, only that sum is needed: the rest is read from the ranks that have finished the step.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ttp import api, session
from ttp.adapters.frameworks.hf_directory import choose, complete, complete_shards, fsdp_plugin, refuse
from ttp.adapters.torch.local_state.extra_state import by_name
from ttp.adapters.torch.local_state.rng import RngState
from ttp.adapters.torch.sharding.exchange import gather_bytes
from ttp.adapters.versions import names_of, require
from ttp.errors import RestoreError, UsageError
from ttp.store.encoding import decode, encode

TESTED = ("4.57", "5.24")
"""Oldest and newest version of transformers with which ttp was tested."""

require("transformers", "hf", TESTED)
with names_of("transformers", TESTED):
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

    from ttp.adapters.frameworks.accelerate import protect

log = logging.getLogger("ttp.adapters.frameworks")

_OWN = {"log_history", "stateful_callbacks", "is_local_process_zero", "is_world_process_zero"}
"""Fields of ``TrainerState`` that a mark does not hold: they are kept elsewhere, or differ between processes."""

_COUNTS = ("_globalstep_last_logged", "_total_loss_scalar", "_initial_global_step")
"""Private attributes that the Trainer uses for its log, besides its state; seen in 4.57 to 5.24 (the last in 5.x only).
"""


class TtpCallback(TrainerCallback):
    """Protects the training of one ``Trainer``. ::

        trainer.add_callback(ttp.hf.TtpCallback("checkpoints"))
        trainer.train(resume_from_checkpoint=ttp.hf.resume_directory(trainer))

    Call ``train`` in a function that is decorated with ``ttp.ttp_to_persist``.

    Args:
        save_dir: see ``ttp.wrap_optimizer``. It must not be the Trainer's ``output_dir``.
        settings: ``undo``, ``extra_state``, ``buddy`` (for FSDP without replicas); see ``ttp.wrap_optimizer``.
    """

    ttp_completes_itself = True  # see ``_resume``

    def __init__(self, save_dir: Any = "checkpoints", **settings: Any) -> None:
        self.save_dir = save_dir
        self._settings = settings
        self._trainer: Any = None
        self._found: dict[str, Any] = {}
        self._resumed: dict[str, Any] | None = None
        self._step, self._version, self._grew = 0, 0, False
        self._marks: list[dict[str, Any]] = []
        self._lines: list[bytes] = []  # the log: each line is encoded once, as there may be tens of thousands
        self._loss: Any = torch.tensor(0.0)  # sum of the losses since the last line of the log
        self._carried: Tensor | None = None
        self._grad_norm: Any = None
        self._rate: Any = None
        self._streams = b""  # random streams at the beginning of the epoch: a sampler may draw its order from them
        self._again = b""  # the same, in a process that has resumed and has not begun its first epoch
        self._pause = contextlib.ExitStack()

    # ------------------------------------------------------------------------------------------------- the extra state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the Trainer on this rank: step, marks, sum of losses, log, streams of the epoch."""
        history = self._trainer.state.log_history
        if len(history) < len(self._lines):
            self._lines = []
        self._lines += map(encode, history[len(self._lines) :])
        mine = {"step": self._step, "marks": self._marks, "loss": self._loss, "streams": self._streams}
        return mine | {"log": self._lines}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state for ``_resume``, which runs when the training begins."""
        self._resumed = state

    # ---------------------------------------------------------------------------------------------------------- hooks

    def bind(self, trainer: Any, found: dict[str, Any]) -> None:
        """Keep the trainer and the state to resume, and wrap methods of the trainer to see losses and gradient norms.

        Args:
            trainer: the trainer to protect.
            found: the result of ``hf_directory.choose``.
        """
        again, self._trainer, self._found = self._trainer is trainer, trainer, found
        if again:
            return
        trainer.remove_callback(self)
        trainer.add_callback(self)  # as the last: the other callbacks have finished their part of a step before
        step, accelerator = trainer.training_step, trainer.accelerator
        backward, clip = accelerator.backward, accelerator.clip_grad_norm_

        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            if self._carried is not None:
                loss, self._carried = loss + self._carried.to(loss.device), None
            return loss

        def before_backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._add(loss.detach())
            return backward(loss, *args, **kwargs)

        def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
            self._grad_norm = clip(*args, **kwargs)
            return self._grad_norm

        trainer.training_step = training_step
        accelerator.backward, accelerator.clip_grad_norm_ = before_backward, clip_grad_norm_

    def _add(self, loss: Tensor) -> None:
        """Add a loss to the sum like the Trainer: with ``logging_nan_inf_filter``, NaN and Inf count as the average."""
        total = self._loss.to(loss.device)
        if self._trainer.args.logging_nan_inf_filter and not bool(torch.isfinite(loss)):
            steps = self._trainer.state.global_step - getattr(self._trainer, _COUNTS[0], 0)
            loss = total / (1 + steps)
        self._loss = total + loss

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Join the job and restore. All objects are built now, and the Trainer has loaded its own directory."""
        trainer = self._trainer
        if trainer is None:
            raise UsageError(
                "TtpCallback does not know its trainer: call resume_directory() before training, as in "
                "trainer.train(resume_from_checkpoint=ttp.hf.resume_directory(trainer))"
            )
        self._step = state.global_step
        extra = by_name(self._settings.get("extra_state"))
        if getattr(trainer.args, "sync_ref_model", False) and fsdp_plugin(trainer) is None:
            reference = getattr(trainer, "ref_model", None)  # TRL's, which a callback mixes with the model
            if reference is not None and not any(each is reference for each in extra.values()):
                extra["ref_model"] = reference
        protect(
            trainer.accelerator,
            trainer.model_wrapped,
            kwargs["optimizer"],
            kwargs["lr_scheduler"],
            save_dir=self.save_dir,
            **{**self._settings, "extra_state": {**extra, "ttp.hf": self}},
        )
        if self._found.get("foreign"):
            if (processor := session.current().processor) is not None:
                processor.set_base_version(state.global_step)
        else:
            version = api.restore()
            if version != self._found["version"]:
                raise RestoreError(
                    f"the ranks have restored version {version}, and the Trainer version {self._found['version']}: "
                    "since resume_directory() was called a checkpoint was damaged or added. Start the job again"
                )
            if version:
                self._resume(control)
        api.step_done()  # tells ttp that the calls of step_done(), in on_step_end, end the versions

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the learning rate of this step, before the scheduler's step."""
        scheduler = kwargs["lr_scheduler"]
        self._rate = scheduler.get_last_lr()[0] if hasattr(scheduler, "get_last_lr") else None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the version, and keep the first mark of the step."""
        if session.current().processor is None:
            return
        self._step, self._marks = state.global_step, [self._mark(state, control)]
        api.step_done()
        version = session.current().version
        self._grew, self._version = version != self._version, version
        self._pause_for(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep a mark: ``control`` says which stages follow the epoch, and none of them has begun."""
        self._marked(state, control)
        self._pause_for(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep a mark: all stages after the last step are done, or after the last epoch.

        A next epoch has drawn no random numbers yet.
        """
        self._pause.close()
        self._marked(state, control, done=True)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the random streams with which the epoch begins, or restore them if the job resumes in its middle.

        The order of ``LengthGroupedSampler`` is drawn from them. The Trainer itself restores the streams of the last
        step when it has skipped the batches.
        """
        if not self._again:
            self._streams = _streams()
        self.on_step_begin(args, state, control)
        if self._again:
            RngState().restore(self._again)
            self._again = b""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the pause, if one is open."""
        self._pause.close()

    def _pause_for(self, control: Any) -> None:
        """Declare ``ttp.paused`` until the next step or epoch if an evaluation or a save follows: they may be slow."""
        self._pause.close()
        if session.current().processor is not None and (control.should_evaluate or control.should_save):
            self._pause.enter_context(api.paused("evaluation" if control.should_evaluate else "saving"))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Begin a new sum of losses, as the Trainer does after each log line about the training."""
        if "loss" in (logs or {}):
            self._loss, self._carried = torch.zeros_like(self._loss), None

    # ---------------------------------------------------------------------------------------------------------- marks

    def _mark(self, state: Any, control: Any, *, done: bool = False) -> dict[str, Any]:
        trainer = self._trainer
        kept = [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]
        norm = self._grad_norm if control.should_log else None
        draws = not done and (control.should_evaluate or control.should_save)
        return {
            "done": done,
            "state": {f.name: getattr(state, f.name) for f in fields(state) if f.name not in _OWN},
            "logged": len(state.log_history),
            "callbacks": [[type(each).__name__, each.state()] for each in kept],
            "control": control.state()["args"],
            "counts": {name: getattr(trainer, name) for name in _COUNTS if hasattr(trainer, name)},
            "loss": self._loss,
            "grad_norm": norm.item() if isinstance(norm, Tensor) else norm,
            "rate": self._rate.item() if isinstance(self._rate, Tensor) else self._rate,
            "flos": float(getattr(trainer, "current_flos", 0)),
            "measured": _measured(trainer),
            "rng": _streams() if draws else b"",
        }

    def _marked(self, state: Any, control: Any, *, done: bool = False) -> None:
        """Keep a further mark of the step that made the last version; do nothing if a scaler has skipped the step."""
        if session.current().processor is not None and self._marks and self._grew and not self._marks[-1]["done"]:
            self._marks.append(self._mark(state, control, done=done))
            adapter: Any = session.current().adapter
            adapter.capture.capture(self._version, final=True)

    # --------------------------------------------------------------------------------------------------------- resume

    def _resume(self, control: Any) -> None:
        """Set Trainer, callbacks and this rank's losses to the last mark of all ranks, and repeat the later stages."""
        trainer, found, own = self._trainer, self._found, self._resumed or {}
        mark, marks = found["mark"], own.get("marks", [])
        mine = marks[found["stage"]] if own.get("step") == found["step"] and len(marks) > found["stage"] else None
        loss = mine["loss"] if mine is not None else own.get("loss", torch.tensor(0.0))
        if mine is not None and mine["rng"] and len(marks) > found["stage"] + 1:
            RngState().restore(mine["rng"])  # the stages after the mark draw their random numbers again
        self._step, self._marks, self._version = (
            found["step"],
            [*marks[: found["stage"]], mine or mark],
            found["version"],
        )
        self._grew = True
        self._loss, self._carried = loss, loss
        self._grad_norm, self._rate = mark["grad_norm"], mark["rate"]
        for name, value in mark["counts"].items():
            setattr(trainer, name, value)
        if hasattr(trainer, "current_flos"):
            trainer.current_flos = (mine or mark)["flos"]
        if mark.get("measured"):
            state, rates = mark["measured"]
            trainer.lr_scheduler.load_state_dict(state)
            for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        self._restore_callbacks(mark, control)
        complete_shards(found["directory"], trainer)
        if not mark["done"]:
            with api.paused("log, evaluation and save after the last step"):
                self._make_again(mark, control)
        amid = trainer.state.global_step % self._steps_per_epoch() != 0
        if not (amid and trainer.args.ignore_data_skip):
            self._again = self._streams = own.get("streams", b"") if amid else _streams()
        complete(found["directory"], trainer)

    def _restore_callbacks(self, mark: dict[str, Any], control: Any) -> None:
        rest = [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]
        for name, kept in mark["callbacks"]:
            callback = next((each for each in rest if type(each).__name__ == name), None)
            if callback is not None:
                rest.remove(callback)
                for key, value in {**kept.get("args", {}), **kept.get("attributes", {})}.items():
                    setattr(callback, key, value)
        for name, value in mark["control"].items():
            setattr(control, name, value)

    def _make_again(self, mark: dict[str, Any], control: Any) -> None:
        """Log, evaluate and save as the Trainer would have done after the mark. All ranks call it, or none."""
        trainer = self._trainer
        if self._found["stage"] == 0:
            self._log_save_evaluate(mark)
            if mark["state"]["global_step"] % self._steps_per_epoch() != 0:
                return
            trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, control)
        self._log_save_evaluate(mark)

    def _steps_per_epoch(self) -> int:
        trainer, loader = self._trainer, self._trainer.callback_handler.train_dataloader
        try:
            return max(-(-len(loader) // trainer.args.gradient_accumulation_steps), 1)
        except TypeError:  # a loader without a length: its only epoch ends with the training
            return int(trainer.state.max_steps)

    def _log_save_evaluate(self, mark: dict[str, Any]) -> None:
        """Log, save and evaluate with the Trainer's private method, as seen in 4.57 to 5.24."""
        trainer = self._trainer
        follow = trainer._maybe_log_save_evaluate
        rate = {"learning_rate": mark["rate"]} if "learning_rate" in inspect.signature(follow).parameters else {}
        loss = self._loss.to(trainer.args.device).clone()
        model, epoch = trainer.model_wrapped, trainer.state.epoch
        follow(loss, mark["grad_norm"], model, None, epoch, None, time.time(), **rate)


def _streams() -> bytes:
    """Return the state of the random streams of this process."""
    return b"".join(map(bytes, RngState().capture()))


def _measured(trainer: Any) -> list[Any] | None:
    """Return the state and the rates of a scheduler that is stepped by evaluations, so after the version; else None."""
    if "metrics" not in inspect.signature(trainer.lr_scheduler.step).parameters:
        return None
    return [trainer.lr_scheduler.state_dict(), [group["lr"] for group in trainer.optimizer.param_groups]]


def resume_directory(trainer: Any) -> str | None:
    """Return the directory for ``trainer.train(resume_from_checkpoint=...)``. Every rank calls it just before.

    Rank 0 makes a ``checkpoint-N`` from the newest whole checkpoint of ttp, in ``save_dir/trainer``. Once the training
    has begun, the Trainer can also resume from this directory without ttp. If the Trainer itself has saved a checkpoint
    of a later step, the function returns the directory of that one.

    Returns:
        The directory; None: there is no checkpoint, so the training begins anew.

    Raises:
        UsageError: the trainer has no ``TtpCallback``.
        ConfigError: the trainer's arguments ask for something that ttp cannot protect.
        CheckpointError: there are checkpoints, but none is whole.
        RestoreError: rank 0 could not make the directory (raised on the other ranks).
    """
    callback = next((each for each in trainer.callback_handler.callbacks if isinstance(each, TtpCallback)), None)
    if callback is None:
        raise UsageError("call trainer.add_callback(ttp.hf.TtpCallback(save_dir)) before resume_directory(trainer)")
    refuse(trainer)
    found: dict[str, Any] = {}
    problem: Exception | None = None
    if trainer.args.process_index == 0:
        try:
            found = choose(trainer, callback.save_dir)
        except Exception as wrong:
            problem, found = wrong, {"problem": f"rank 0 could not make a directory to resume from: {wrong}"}
    if trainer.args.world_size > 1:
        found = decode(gather_bytes(encode(found))[0])
    if problem is not None:
        raise problem
    if "problem" in found:
        raise RestoreError(found["problem"])
    callback.bind(trainer, found)
    return found.get("directory")
