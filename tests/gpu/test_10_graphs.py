"""CUDA graphs of a part of the step work; one of the whole step is refused."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import RunCase

pytestmark = pytest.mark.gpu


@pytest.mark.supports("CUDA graphs (part of the step)")
@pytest.mark.parametrize(
    "case", ["forward_and_backward", "captured_late", "of_the_compiler", "saved_meanwhile", "whole_step"]
)
def test_graphs(run_case: RunCase, case: str) -> None:
    run_case(f"graphs:{case}")
