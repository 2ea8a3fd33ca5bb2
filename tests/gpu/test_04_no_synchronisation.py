"""ttp never makes the training thread wait for the device: torch raises at each implicit synchronisation."""

from __future__ import annotations

import json

import pytest

from tests.gpu.conftest import RunCase

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["plain", "statistics", "accumulation", "scaled", "ddp", "fsdp", "hsdp"])
def test_of_the_training_thread(run_case: RunCase, kind: str) -> None:
    run_case("steady:no_synchronisation" + json.dumps({"kind": kind}))


def test_a_program_with_a_default_device(run_case: RunCase) -> None:
    run_case("steady:default_device")
