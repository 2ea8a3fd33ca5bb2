"""For all tests: settings of hypothesis for busy machines, and tests that share a run stay on one worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ttp",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors, HealthCheck.data_too_large],
)
settings.load_profile("ttp")

os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "site"), os.environ.get("PYTHONPATH")])
)
"""Every Python that a test starts imports tests/site/sitecustomize.py."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check that ``--dist loadgroup`` has an effect: without it the suite takes a third longer, and nothing tells why.

    Raises:
        UsageError: this pytest and this pytest-xdist do not fit.
    """
    grouped = (item for item in session.items if item.get_closest_marker("xdist_group") is not None)
    if getattr(session.config.option, "loadgroup", False) and any("@" not in item.nodeid for item in grouped):
        raise pytest.UsageError("pytest-xdist cannot group tests with this pytest: pip install 'pytest>=8,<9.1'")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why tests were tried again: pytest-rerunfailures only counts them."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"tried again: {report.nodeid}", sep="_")
        terminalreporter.write_line(report.longreprtext)
