"""Captures Megatron's state besides weights and moments: counters of samples, the loss scale, random streams.

The state is captured at the end of every update. At that moment Megatron's training loop has not yet counted the
iteration that made the update, so this module adds that iteration: the captured state belongs to the finished version.
It adds nothing to a counter that the loop has raised already since the iteration began, or raises before it begins.
An iteration whose gradients overflowed makes no version; Megatron counts it, and after a resume it is run again.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ttp.adapters.torch.local_state.rng import RngState

log = logging.getLogger("ttp.adapters.megatron")

PROGRESS, STREAMS = "megatron.progress", "megatron.streams"
"""Names of the objects that the adapter adds to the user's ``extra_state``."""
SAMPLES, VALIDATED, LEFT_OUT = "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"
COUNTERS = (SAMPLES, VALIDATED, LEFT_OUT)
"""Names of the sample counters in Megatron-LM's ``args``; a counter that is missing or None is not saved."""

UNKNOWN_BATCH = (
    "the number of samples of an iteration is unknown: args.%s is saved as if each had as many as the one before, and "
    "the first had none: set args.global_batch_size, or Megatron's calculator of batch sizes"
)
"""Log message for a program with a counter of samples and no size of a batch."""


class Progress:
    """An extra state that is equal on all ranks: counters in ``args``, and the loss scale of each optimizer.

    Args:
        args: Megatron-LM's namespace; None: the program keeps its counters itself.
        optimizers: Megatron's optimizers, without chains.
    """

    ttp_completes_itself = True  # the running iteration is added to the counters, and replicas lend the loss scale

    def __init__(self, args: Any, optimizers: Sequence[Any]) -> None:
        self._args = args
        self._scalers = [s for s in (getattr(each, "grad_scaler", None) for each in optimizers) if s is not None]
        self._read: dict[tuple[int, str], tuple[Tensor, int, Any]] = {}
        self._batch = 0  # samples of the last iteration
        self._stand()

    def _stand(self) -> None:
        """Note that no iteration has begun since the registration, or since a restore."""
        self._begun: dict[str, int] | None = None  # the counters when the running iteration began
        self._start, self._early = self._counters(), set[str]()
        self._open = self._forward = False

    def updated(self) -> None:
        """Note that an update has ended."""
        self._open = False

    def update_begins(self) -> None:
        """Note that an update has begun: it shows an iteration of which no other pass was seen."""
        if not self._open:
            self.iteration_begins(forward=False)

    def iteration_begins(self, *, forward: bool = True) -> None:
        """Note that an iteration has begun.

        Args:
            forward: its forward pass begins; else its backward pass, which counts only if no forward pass was seen. If
                gradients have overflowed, no update has ended the iteration before, but the loop has counted it.
        """
        if self._args is None:
            return
        now, before = self._counters(), self._begun
        if self._open and not forward and (self._forward or now.get("iteration") == (before or {}).get("iteration")):
            return
        self._open, self._forward = True, forward
        if before is None:
            more, raised = self._of_iteration(), {name: n - self._start.get(name, n) for name, n in now.items()}
            loaded = raised.get("iteration", 0) > more["iteration"]  # from a checkpoint of the program's own
            if not loaded and raised.get(LEFT_OUT, 0) <= more[LEFT_OUT]:  # else Megatron's loop has skipped iterations
                self._early = {k for k in more if raised.get(k) and raised[k] == (more[k] or raised[k])}
            if SAMPLES in now and SAMPLES not in self._early and not more[SAMPLES]:
                log.warning(UNKNOWN_BATCH, SAMPLES)
        elif (batch := now.get(SAMPLES, 0) - before.get(SAMPLES, 0)) > 0:
            self._batch = batch
        self._begun = now

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the version that the last update made."""
        state: dict[str, Any] = {
            "scalers": [
                {key: self._number((place, key), value) for key, value in scaler.state_dict().items()}
                for place, scaler in enumerate(self._scalers)
            ]
        }
        if self._args is None:
            return state
        counters, begun = self._counters(), self._begun or {}
        for name, more in self._of_iteration().items():
            if name not in self._early and counters.get(name) == begun.get(name, -1):
                counters[name] += more
        if counters.get(VALIDATED) == begun.get(VALIDATED, -1):
            counters[VALIDATED] += _samples_to_validate(self._args, counters.get("iteration", 0))
        return state | {"counters": counters}

    def _counters(self) -> dict[str, int]:
        """Return the counters of ``args``, as they are now."""
        args = self._args
        found = {name: getattr(args, name, None) for name in COUNTERS}
        found["iteration"] = getattr(args, "curr_iteration", getattr(args, "iteration", None))
        return {name: int(value) for name, value in found.items() if value is not None}

    def _of_iteration(self) -> dict[str, int]:
        """Return how much an iteration adds to each counter that it raises."""
        made, left_out = _batch_size(self._args)
        return {"iteration": 1, SAMPLES: made or self._batch, LEFT_OUT: left_out}

    def _number(self, place: tuple[int, str], value: Any) -> Any:
        """Return ``value`` of a scaler as a number. A tensor on a device is read only if it has changed: reading waits.

        Megatron seldom makes a new tensor of the scale. When it does, it has just waited for the device itself, to
        learn whether gradients overflowed.
        """
        if not isinstance(value, Tensor):
            return value
        known = self._read.get(place)
        if known is None or known[0] is not value or known[1] != value._version:
            known = self._read[place] = value, value._version, value.item()
        return known[2]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned, and set the number of microbatches accordingly."""
        for scaler, numbers in zip(self._scalers, state["scalers"], strict=False):
            scale = {"scale": torch.tensor([numbers["scale"]], device=scaler.scale.device)} if numbers else {}
            scaler.load_state_dict(numbers | scale)
        for name, value in state.get("counters", {}).items():
            if self._args is not None:
                setattr(self._args, name, value)
        if self._args is not None and hasattr(self._args, "iteration"):
            if hasattr(self._args, "curr_iteration"):  # else the loop sets only ``iteration``
                self._args.curr_iteration = self._args.iteration
            _resize_batches(self._args)
        self._stand()


def _batch_size(args: Any) -> tuple[int, int]:
    """Return two numbers of samples of one iteration, over all ranks: computed ones, and ones that are left out.

    Megatron leaves samples out if a batch cannot be divided evenly (``--decrease-batch-size-if-needed``).
    """
    calculator = _calculator()
    if calculator is not None:
        running = int(calculator.get_current_running_global_batch_size())
        return running, int(calculator.get_current_global_batch_size()) - running
    return int(getattr(args, "global_batch_size", 0) or 0), 0


def _samples_to_validate(args: Any, iteration: int) -> int:
    """Return the samples that Megatron-LM's loop validates with when ``iteration`` is over; 0: it does not validate."""
    every, rounds = getattr(args, "eval_interval", 0), getattr(args, "eval_iters", 0)
    begins_anew = getattr(args, "full_validation", False) or getattr(args, "multiple_validation_sets", False)
    if not getattr(args, "do_valid", False) or begins_anew or not every or iteration % every:
        return 0
    size = getattr(args, "eval_global_batch_size", None) or getattr(args, "global_batch_size", None)
    return int(rounds or 0) * int(size or 0)


def samples_after(steps: int, batch_size: int) -> int:
    """Return the samples that the first ``steps`` iterations have consumed, and set the size of the next batch.

    Args:
        steps: finished iterations.
        batch_size: samples of an iteration; used only if Megatron's calculator of batch sizes is not set up. With the
            calculator, batches may grow during training (``--rampup-batch-size``).
    """
    calculator = _calculator()
    if calculator is None:
        return steps * batch_size
    consumed = 0
    for _ in range(steps):  # the size of a batch depends on the samples consumed before it
        calculator.update_num_microbatches(consumed, consistency_check=False)
        consumed += int(calculator.get_current_running_global_batch_size())
    calculator.update_num_microbatches(consumed, consistency_check=False)
    return consumed


def _resize_batches(args: Any) -> None:
    """Set the number of microbatches by the consumed samples, because batches may grow during training."""
    calculator = _calculator()
    if calculator is not None:
        calculator.update_num_microbatches(args.consumed_train_samples, consistency_check=False)


def _calculator() -> Any:
    """Return Megatron's module that calculates batch sizes; None: the program has not set it up."""
    module = sys.modules.get("megatron.core.num_microbatches_calculator")
    return module if getattr(module, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None) is not None else None


class TrackedStreams:
    """An extra state of this rank: the named random streams of Megatron's tracker."""

    ttp_completes_itself = True  # they are complete once the last backward pass begins: only forward passes draw

    def state_dict(self) -> dict[str, Any]:
        """Return all streams, and this rank's place in the model (see ``_place``)."""
        return {"place": _place(), "streams": {name: _bytes_of(state) for name, state in _tracker_states().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the streams. At another place in the model they stay as this job made them from its seed."""
        if list(state["place"]) != _place():
            log.warning(
                "the checkpoint has another layout: Megatron's random streams stay as this job's seed made them"
            )
            return
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        tracker: Any = get_cuda_rng_tracker()
        states = tracker.get_states()
        for name, saved in state["streams"].items():
            if isinstance(states.get(name), torch.Generator):
                states[name].set_state(saved)
            else:
                states[name] = saved.clone()
        tracker.set_states(states)


def streams_now() -> dict[str, Any]:
    """Return a copy of all random streams of this rank: the global ones and those of Megatron's tracker."""
    data = b"".join(bytes(part) for part in _global_streams().capture())
    tracked = {name: _bytes_of(state).clone() for name, state in _tracker_states().items()}
    return {
        "random": torch.frombuffer(bytearray(data), dtype=torch.uint8),
        "tracked": {"place": _place(), "streams": tracked},
    }


def set_streams(saved: dict[str, Any]) -> list[str]:
    """Set all random streams to a result of ``streams_now``. Data-parallel ranks may exchange theirs.

    Returns notes for the log on streams that this process lacks.
    """
    TrackedStreams().load_state_dict({**saved["tracked"], "place": _place()})
    return _global_streams().restore(saved["random"].numpy().tobytes())


@functools.cache
def _global_streams() -> RngState:
    """Return the same object each time: to find the memory of the streams takes half a millisecond."""
    return RngState()


def _tracker_states() -> dict[str, Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states: dict[str, Any] = get_cuda_rng_tracker().get_states()
    return states


def _bytes_of(state: Any) -> Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state


def _place() -> list[int]:
    """Return this rank, the world size, and the tensor, pipeline, expert and context parallel sizes."""
    from megatron.core import parallel_state as state

    return [
        torch.distributed.get_rank(),
        torch.distributed.get_world_size(),
        state.get_tensor_model_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_expert_model_parallel_world_size(),
        state.get_context_parallel_world_size(),
    ]
