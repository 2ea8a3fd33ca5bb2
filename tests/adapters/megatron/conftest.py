from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adapters.megatron.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Worlds of ranks that have already imported megatron-core."""
    made = Nursery()
    yield made
    made.close()
