"""Reads a GradScaler after each update, without waiting for the device that may have its numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.optim import Optimizer

from ttp.adapters.torch.device.accelerator import Numbers, number

_RECORDS = "_per_optimizer_states"
"""An attribute of the scaler. ``update()`` replaces its value, so a new value shows that it was called."""


class ScalerReading(NamedTuple):
    """The state of a GradScaler in one version.

    Args:
        scaler: the scaler.
        numbers: brings its numbers from the device.
        values: its ``state_dict()``, in which numbers may still be on their way.
        records: the value of ``_RECORDS`` when the update ended.
        skipping: the flags by which the scaler has told fused optimizers to skip the step.
        updated: whether ``values`` are those after the ``scaler.update()`` that follows the update.
    """

    scaler: Any
    numbers: Numbers
    values: dict[str, Any]
    records: Any
    skipping: tuple[Any, ...]
    updated: bool = False

    @property
    def elsewhere(self) -> bool:
        """Whether the scale is on a device."""
        return self.numbers.elsewhere(getattr(self.scaler, "_scale", None))

    def was_updated(self) -> bool:
        """Return whether the host has called ``scaler.update()`` since the update."""
        return self.updated or (self.records is not None and getattr(self.scaler, _RECORDS, None) is not self.records)

    def brought_up(self, *, training: bool) -> ScalerReading:
        """Return the reading with the ``scaler.update()`` that followed, or this one if none did, or it cannot be read.

        Args:
            training: whether this is the training thread. Only there are numbers on a device read, in the order of its
                work: another thread could read them as they were before the update that the host has queued.
        """
        if self.updated or not self.was_updated() or not (training or not self.elsewhere):
            return self
        return self._replace(values=_brought(self.scaler, self.numbers), updated=True)

    def state(self) -> dict[str, Any]:
        """Return the scaler's ``state_dict()``, with numbers of Python. May wait for the device.

        Raises:
            CheckpointError: numbers did not arrive from the device.
        """
        return {key: number(value) for key, value in self.values.items()}

    def skips(self) -> bool:
        """Return whether a fused optimizer was told to skip the step. Waits and raises as ``state`` does."""
        return any(float(number(flag)) for flag in self.skipping)

    def skipped_since(self) -> bool:
        """Return whether the scaler skipped a step since this reading. Waits for the device."""
        now, before = _values(self.scaler), self.state()
        return bool(now["_growth_tracker"] == 0 and now["scale"] <= before["scale"])


def read_scaler(scaler: Any, numbers: Numbers, optimizers: Iterable[Optimizer]) -> ScalerReading:
    """Read a scaler when an update ends. Does not wait; for the training thread."""
    flags = (getattr(each, "found_inf", None) for each in optimizers)
    skipping = tuple(numbers.bring(flag) for flag in flags if flag is not None)
    return ScalerReading(scaler, numbers, _brought(scaler, numbers), getattr(scaler, _RECORDS, None), skipping)


def _brought(scaler: Any, numbers: Numbers) -> dict[str, Any]:
    return {key: numbers.bring(value) for key, value in _values(scaler).items()}


def _values(scaler: Any) -> dict[str, Any]:
    """Return ``scaler.state_dict()`` with tensors for the numbers on a device, so that it need not wait for them."""
    try:
        scale, tracker = scaler._scale, scaler._growth_tracker
        return {
            "scale": scaler._init_scale if scale is None else scale,
            "growth_factor": scaler._growth_factor,
            "backoff_factor": scaler._backoff_factor,
            "growth_interval": scaler._growth_interval,
            "_growth_tracker": scaler._init_growth_tracker if tracker is None else tracker,
        }
    except AttributeError:  # this version of torch has other attributes
        return dict(scaler.state_dict())
