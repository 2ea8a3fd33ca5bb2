"""``Result``: one measured number with its unit and budget; and functions that measure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """A measurement.

    Args:
        what: what was measured.
        value: the median, or the ratio.
        unit: "us", "ms", "s", "x", "KiB", "MB/s".
        budget: largest value that the design allows, in the same unit; None: there is no budget.
        how: how it was measured, in a few words.
        p90: the 90th percentile, if there are enough samples.
    """

    what: str
    value: float
    unit: str
    budget: float | None = None
    how: str = ""
    p90: float | None = None

    @property
    def met(self) -> bool:
        return self.budget is not None and self.value <= self.budget

    @property
    def shown(self) -> str:
        tail = "" if self.p90 is None else f" (p90 {self.p90:.4g})"
        return f"{self.value:.4g} {self.unit}{tail}"

    @property
    def budget_shown(self) -> str:
        return "" if self.budget is None else f"{self.budget:g} {self.unit}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met if self.budget is not None else None}


def median_of(samples: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 90th percentile of the samples."""
    ordered = sorted(samples)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))]


def ratio_of(these: Sequence[float], those: Sequence[float]) -> float:
    """Return the median of the ratios of two measurements that were made by turns."""
    return statistics.median(this / that for this, that in zip(these, those, strict=True))


def time_us(call: Callable[[], object], repeat: int) -> list[float]:
    """Call ``call`` ``repeat`` times; return the microseconds of each call."""
    samples = []
    for _ in range(repeat):
        begin = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    return samples
