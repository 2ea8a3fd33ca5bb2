"""Tensors of every form are copied from a device that hangs."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import RunCase

pytestmark = pytest.mark.gpu


def test_every_form_byte_for_byte(run_case: RunCase) -> None:
    run_case("copies:every_form")


def test_a_tensor_on_a_second_device(run_case: RunCase) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    run_case('copies:every_form{"two_devices": true}')
