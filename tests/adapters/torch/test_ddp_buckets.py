from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

WORKER = Path(__file__).with_name("ddp_worker.py")
ROOT = Path(__file__).parents[3]
WORLD = 4  # two ranks add in the same order whatever the layout: a + b = b + a
TIMEOUT_S = 120

ONE_BUCKET: dict[str, Any] = {}
SMALL_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.03}
ACCUMULATING: dict[str, Any] = {"bucket_cap_mb": 0.03, "accumulate": 2}
STATIC: dict[str, Any] = {"bucket_cap_mb": 0.03, "static_graph": True}


def run(directory: Path, name: str, **job: Any) -> dict[str, Any]:
    """Run one launch of the job in fresh processes and return what rank 0 said."""
    text = json.dumps(job | {"store": str(directory / f"store-{name}")})
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(WORLD):
            errors = stack.enter_context((directory / f"{name}-{rank}.err").open("w"))
            command = [sys.executable, str(WORKER), text, str(rank), str(WORLD)]
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in ranks]
    said = "".join((directory / f"{name}-{rank}.err").read_text() for rank in range(WORLD))
    assert [process.returncode for process in ranks] == [0] * WORLD, said
    result = json.loads(outputs[0])
    assert isinstance(result, dict) and result["same"], "the ranks differ from each other"
    return result


@pytest.mark.parametrize("kind", [ONE_BUCKET, SMALL_BUCKETS], ids=["one bucket", "small buckets"])
def test_a_resumed_job_has_the_bits_of_an_unbroken_one(tmp_path: Path, kind: dict[str, Any]) -> None:
    unbroken = run(tmp_path, "a", steps=20, save_at=10, save_to=str(tmp_path / "ckpt"), **kind)
    resumed = run(tmp_path, "b", steps=20, load=str(tmp_path / "ckpt"), **kind)
    assert resumed["digest"] == unbroken["digest"]
    assert resumed["shown"] == unbroken["shown"]
    assert resumed["notes"] == []
