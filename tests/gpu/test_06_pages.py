"""Buffers that every forward pass changes: BatchNorm, and 8 MB at once."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import RunCase

pytestmark = pytest.mark.gpu


def test_the_page_equals_the_reference_at_each_step(run_case: RunCase) -> None:
    run_case("steady:pages")
