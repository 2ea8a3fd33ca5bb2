"""What a launcher's reporter of deaths keeps open."""

from __future__ import annotations

from tests.waiting import until
from ttp.launch.fault_report import FaultReporter


def test_a_controller_that_is_in_the_ring_no_more_keeps_no_connection() -> None:
    """A launcher outlives many launches, each with standby controllers at other ports."""
    home, first, second = (f"127.0.0.1:{port}" for port in (1, 2, 3))
    ring: list[tuple[str, ...]] = [(first, home)]
    reporter = FaultReporter(lambda: ring[0], home, "")
    try:
        until(lambda: set(reporter._channels) == {home, first})
        ring[0] = (second, home)
        until(lambda: second in reporter._channels)
        ring[0] = (home,)
        until(lambda: set(reporter._channels) == {home}, timeout_s=20.0, story=lambda: sorted(reporter._channels))
    finally:
        reporter.close()
