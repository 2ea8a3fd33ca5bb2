"""The kernels that the rescue needs are loaded at start: behind a kernel that spins, loading may wait for ever."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import RunCase

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_in_a_fresh_process_under_a_hang(run_case: RunCase, loading: str) -> None:
    run_case("copies:first_look", CUDA_MODULE_LOADING=loading)
