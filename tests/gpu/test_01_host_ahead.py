"""The host is one or three updates ahead of a device that hangs: the saved bytes are those that the device holds."""

from __future__ import annotations

import json

import pytest

from tests.gpu.conftest import RunCase

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "optimizer", ["adam", "adam-foreach", "adam-fused", "adam-capturable", "adam-rate-there", "nadam", "sgd"]
)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
def test_bytes_equal_a_reference(run_case: RunCase, optimizer: str, scaled: bool) -> None:
    cases = [
        "ahead:host_ahead" + json.dumps({"optimizer": optimizer, "scaled": scaled, "lead": lead}) for lead in (0, 2)
    ]
    run_case(*cases)


def test_an_average_that_is_queued_behind_the_update(run_case: RunCase) -> None:
    run_case("ahead:average_behind")
