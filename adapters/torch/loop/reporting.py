"""Reports updates to the processor in jobs whose state is on devices."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ttp.adapters.torch.source import TorchSource

if TYPE_CHECKING:
    from ttp.processor.processor import Processor

log = logging.getLogger("ttp.adapters.torch")


class DeviceReporter:
    """Passes reports on to the processor, and queues marks on the device: gradient reduced, update begun."""

    def __init__(self, processor: Processor, source: TorchSource) -> None:
        self._processor, self._reduced, self._begun = processor, source.reduced, source.begun
        self._host_values = source.host_values

    @property
    def mark(self) -> int:
        """See ``UpdateReporter``."""
        return self._processor.mark

    @mark.setter
    def mark(self, mark: int) -> None:
        self._processor.mark = mark

    @property
    def activity(self) -> str:
        """See ``UpdateReporter``."""
        return self._processor.activity

    @activity.setter
    def activity(self, activity: str) -> None:
        self._processor.activity = activity

    def begin_update(self, again: bool = False) -> None:
        """See ``UpdateReporter``."""
        self._reduced.record(self._processor.gate.version + 1)
        self._processor.begin_update(again)
        self._begun.record(self._processor.gate.version + 1)

    def stand_between(self) -> None:
        """See ``UpdateReporter``."""
        self._processor.stand_between()

    def leave_update(self) -> None:
        """See ``UpdateReporter``."""
        self._processor.leave_update()

    def end_update(self) -> None:
        """See ``UpdateReporter``."""
        try:
            self._host_values.note(self._processor.gate.version + 1)
        except Exception as problem:  # a save of this version will raise and say so
            log.debug("the numbers that the optimizer has on the host were not copied: %s", problem)
        self._processor.end_update()
