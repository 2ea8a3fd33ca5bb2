"""A program in the style of nanoGPT on a device: float16 with a scaler, two ranks over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttp.testing import kit

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]


@pytest.mark.parametrize("phase", ["forward", "backward", "in_step", "stepped"])
def test_nano_gpt(phase: str, tmp_path: Path) -> None:
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    kit.run(kit.Job("tests.programs.nano_gpt", [kit.Kill(phase, 1, 3)], env=env), tmp_path).check()
