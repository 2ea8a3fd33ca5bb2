"""Marks, in the queues of devices, how far the training's work has come, in jobs whose state is on devices."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ttp.adapters.torch.loop.bracket import Calls

if TYPE_CHECKING:
    from ttp.adapters.torch.source import TorchSource
    from ttp.processor.gate.gate import Gate

log = logging.getLogger("ttp.adapters.torch")


def with_marks(calls: Calls, source: TorchSource, gate: Gate) -> Calls:
    """Return ``calls`` that also mark where the gradient is reduced, and where the update begins.

    They also keep the numbers that the optimizer has on the host, because the host may be ahead of its devices.
    """

    def before_gate() -> None:
        source.reduced.record(gate.version + 1)
        calls.before_gate()

    def before_update(version: int, fresh: bool) -> None:
        source.begun.record(version + 1)
        calls.before_update(version, fresh)

    def after_update() -> None:
        try:
            source.host_values.note(gate.version + 1)
        except Exception as problem:  # a save of this version will raise and say so
            log.debug("the numbers that the optimizer has on the host were not copied: %s", problem)
        calls.after_update()

    return calls._replace(before_gate=before_gate, before_update=before_update, after_update=after_update)
