"""A save on a device whose memory is all in use."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import RunCase

pytestmark = pytest.mark.gpu


def test_nothing_is_allocated_there_by_a_save(run_case: RunCase) -> None:
    run_case("memory:full")
