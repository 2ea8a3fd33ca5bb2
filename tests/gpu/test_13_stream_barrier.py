"""The barrier before an update of sharded layouts on the training's stream."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import RunCase

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("connections", ["", "1"])
def test_a_stream_waits_for_a_word_of_the_host(run_case: RunCase, connections: str) -> None:
    run_case("hold:stream_waits", **({"CUDA_DEVICE_MAX_CONNECTIONS": connections} if connections else {}))
