"""Tensors of every form are copied from a device that hangs."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import RunCase

pytestmark = pytest.mark.gpu


def test_every_form_byte_for_byte(run_case: RunCase) -> None:
    run_case("copies:every_form")


@pytest.mark.parametrize("connections", ["", "1", "8", "32"])
def test_while_other_streams_hang_too(run_case: RunCase, connections: str) -> None:
    run_case("copies:many_streams", **({"CUDA_DEVICE_MAX_CONNECTIONS": connections} if connections else {}))


@pytest.mark.parametrize("connections", ["", "1"])
def test_while_the_host_waits_for_room_to_launch_a_kernel(run_case: RunCase, connections: str) -> None:
    done = run_case("copies:full_queue", **({"CUDA_DEVICE_MAX_CONNECTIONS": connections} if connections else {}))
    assert done.numbers["host stands"], "the device takes more launches than the case makes"


def test_while_all_kernels_are_loaded(run_case: RunCase) -> None:
    run_case("copies:kernel_loaded_late", CUDA_MODULE_LOADING="EAGER")


def test_while_the_host_loads_a_kernel(run_case: RunCase) -> None:
    """Prints the result only: it is reported that the driver lets no other thread do anything meanwhile."""
    done = run_case("copies:kernel_loaded_late", check=False, CUDA_MODULE_LOADING="LAZY")
    done.numbers["saved"] = done.code == 0


def test_a_tensor_on_a_second_device(run_case: RunCase) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    run_case('copies:every_form{"two_devices": true}')
