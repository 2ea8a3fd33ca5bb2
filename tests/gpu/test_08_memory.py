"""A save on a device whose memory is all in use."""

from __future__ import annotations

import os

import pytest

from tests.gpu.conftest import RunCase

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(
    os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1", reason="tests beside it would find no memory: run it alone"
)
def test_nothing_is_allocated_there_by_a_save(run_case: RunCase) -> None:
    run_case("memory:full")
