"""For all tests: settings of hypothesis for busy machines, and what the workers of one run share."""

from __future__ import annotations

import gc
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import tests.site.sitecustomize  # noqa: F401 - what it does is done when it is imported

settings.register_profile(
    "ttp",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors, HealthCheck.data_too_large],
)
settings.load_profile("ttp")

os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "site"), os.environ.get("PYTHONPATH")])
)
"""Every Python that a test starts imports tests/site/sitecustomize.py, as this one does."""

os.environ["OMP_NUM_THREADS"] = "1"
"""Also for every process that a test starts. Models of tests are tiny: threads of torch would spin while they wait."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
"""Images of containers set it. Each process that a test starts would compile ttp: twice the time of its imports."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
"""Scripts have what they start in the background ignore SIGINT. Those that tests end with it would inherit that."""


ALL = Path(__file__).parent.name


def pytest_configure(config: pytest.Config) -> None:
    """Let the workers of a run of all tests share one process that has imported torch, instead of one each."""
    if of_all_tests(config):
        from tests import forking

        forking.share()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the workers of a run of all tests from one process that has imported the tests, for them all."""
    if of_all_tests(config):
        from tests import workers

        python, end = workers.start()
        config.add_cleanup(end)
        for spec in specs:
            spec.python = python


def of_all_tests(config: pytest.Config) -> bool:
    """Return whether this process starts the workers of a run of all tests."""
    return config.args == [ALL] and bool(getattr(config.option, "numprocesses", None))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mix the files of a run with workers: those of one folder wait alike, or compute alike.

    In the order of names all workers wait at the same time for a minute, and compete for the processors in the next.
    """
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: zlib.crc32(item.nodeid.partition("::")[0].encode()))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what the collection has made out of all later garbage collections and searches, which are many.

    And check that ``--dist loadgroup`` has an effect: without it the suite takes a third longer, and nothing tells why.

    Raises:
        UsageError: this pytest and this pytest-xdist do not fit.
    """
    gc.collect()
    gc.freeze()
    grouped = (item for item in session.items if item.get_closest_marker("xdist_group") is not None)
    if getattr(session.config.option, "loadgroup", False) and any("@" not in item.nodeid for item in grouped):
        raise pytest.UsageError("pytest-xdist cannot group tests with this pytest: pip install 'pytest>=8,<9.1'")


@pytest.fixture(autouse=True)
def _sigterm_and_tracer_are_given_back() -> Iterator[None]:
    """A handler of ttp that a test leaves behind ends the worker a second after a SIGTERM of another test.

    Without its tracer coverage sees nothing of all tests that follow.
    """
    before, tracer = signal.getsignal(signal.SIGTERM), sys.gettrace()
    yield
    assert signal.getsignal(signal.SIGTERM) == before, "this test has left a handler of SIGTERM"
    assert sys.gettrace() is tracer, "this test has left another tracer, or none"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why tests were tried again: pytest-rerunfailures only counts them."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"tried again: {report.nodeid}", sep="_")
        terminalreporter.write_line(report.longreprtext)
