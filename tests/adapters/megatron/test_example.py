"""``examples/megatron_gpt`` trains on the host, in several layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.megatron.nursery import Nursery
from tests.ports import free_port

pytestmark = [pytest.mark.xdist_group("megatron"), pytest.mark.timeout(400)]

SMALL = ["--layers", "2", "--heads", "2", "--width", "16", "--context", "8", "--micro-batch-size", "1"]


def run(nursery: Nursery, directory: Path, *flags: str) -> list[str]:
    """Run the example and return the output of the rank that knows the loss."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = [*SMALL, "--save-dir", str(directory / "checkpoints"), *flags]
    codes = nursery.run(directory, "example", env=env, arguments=arguments)
    out = (directory / "rank3.out").read_text()
    assert codes == [0] * 4, out
    return out.splitlines()


def test_the_example_trains_on_the_host(nursery: Nursery, tmp_path: Path) -> None:
    lines = run(nursery, tmp_path, "--tp", "2", "--steps", "3")
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/3", "2/3", "3/3"]
    assert any(line.startswith("rank 3  weights ") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--pp", "2"], ["--tp", "2", "--bf16"]])
def test_the_example_trains_in_other_layouts(nursery: Nursery, tmp_path: Path, flags: list[str]) -> None:
    lines = run(nursery, tmp_path, *flags, "--steps", "12", "--lr", "0.02")
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step ")]
    assert len(losses) == 12 and losses[-1] < losses[0]
