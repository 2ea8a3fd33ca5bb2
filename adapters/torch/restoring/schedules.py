"""Restores LR schedulers and the gradient scaler, and makes the calls that were due when the checkpoint was made.

A version is finished when the optimizer's step is. The scheduler's step and the scaler's update follow, and the rank
may have been saved in between. Then these calls are made here, because the resumed loop begins with the next step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ttp.adapters.torch.loop.unwrap_optimizer import listed
from ttp.adapters.torch.restoring.compare import hand_to
from ttp.adapters.torch.saving.job_state import JobState


def load_scheduler(scheduler: Any, job: JobState) -> list[str]:
    """Load the LR schedulers, and make the steps that were due.

    Call it after the optimizer's param groups have been restored, because the steps change them.

    Args:
        scheduler: the registered scheduler, or a list of them, or None.
        job: the job state of the checkpoint.

    Returns:
        Notes for the log on states that were not loaded and steps that were not made.
    """
    here, there = listed(scheduler), job.schedules
    if not here or not there:
        return _only_on_one_side("an LR scheduler", here or None, there)
    if len(here) != len(there):
        return [f"the checkpoint has {len(there)} LR schedulers and this job {len(here)}: they were not restored"]
    for each, saved in zip(here, there, strict=True):
        hand_to(f"load_state_dict() of the LR scheduler ({type(each).__name__})", each.load_state_dict, saved.state)
    due = [(each, saved.state) for each, saved in zip(here, there, strict=True) if saved.pending]
    return [note for each, state in due for note in _make_due_step(each, state)]


def _make_due_step(scheduler: Any, state: Any) -> list[str]:
    """Make the step; if the scheduler raises, bring it back to ``state`` and return a note."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice on the order of the two steps does not apply here
            scheduler.step()
    except Exception as problem:  # it needs an argument (a metric), or it is over (OneCycleLR)
        scheduler.load_state_dict(state)
        return [f"the LR scheduler could not make the step that was due ({problem})"]
    return []


def load_scaler(scaler: Any, job: JobState) -> list[str]:
    """Load the gradient scaler, with its update if that was due. Returns notes for the log if only one side has one."""
    here = scaler if scaler is not None and scaler.is_enabled() else None
    if here is None or not job.scaler:
        return _only_on_one_side("a gradient scaler", here, job.scaler)
    state = _updated(job.scaler, job.scaler_skipped) if job.scaler_pending else job.scaler
    hand_to("load_state_dict() of the gradient scaler", scaler.load_state_dict, state)
    return []


def _updated(scaler: Mapping[str, Any], skipped: bool) -> dict[str, Any]:
    """Return the scaler's state after the ``update()`` that follows a step that was made, or was ``skipped``."""
    tracker = int(scaler["_growth_tracker"]) + 1
    if skipped:
        return dict(scaler) | {"_growth_tracker": 0, "scale": _in_float32(scaler["scale"] * scaler["backoff_factor"])}
    if tracker < int(scaler["growth_interval"]):
        return dict(scaler) | {"_growth_tracker": tracker}
    grown = _in_float32(scaler["scale"] * scaler["growth_factor"])
    return dict(scaler) | {"_growth_tracker": 0, "scale": grown if math.isfinite(grown) else scaler["scale"]}


def _in_float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))


def _only_on_one_side(what: str, here: Any, there: Any) -> list[str]:
    if here is not None:
        return [f"the checkpoint has no state of {what}: that of this job was not restored"]
    return [f"the checkpoint has the state of {what}, and this job has none"] if there else []
