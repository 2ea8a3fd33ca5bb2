"""MindSpore 2.10's own, unchanged client against ttp: two processes, with a faked device."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.forking import ForkedPython
from tests.ports import free_port
from ttp.compat.mindio.placing import tell_children

pytestmark = pytest.mark.xdist_group("mindspore-jobs")  # one process with the import for all of them

CLIENT = Path(__file__).with_name("mindspore_client.py")


def _run(directory: Path, fault: str, ranks: int = 2) -> tuple[list[int], str]:
    directory.mkdir()
    base = {k: v for k, v in os.environ.items() if not k.startswith(("TTP_", "MS_"))} | {
        "JOB_DIR": str(directory), "MS_ENABLE_TFT": "{TTP:1,UCE:1}", "MINDIO_FOR_MINDSPORE": "1", "GLOG_v": "3",
        "MS_TFT_IP": "127.0.0.1", "MS_TFT_PORT": str(free_port()), "MS_WORKER_NUM": str(ranks),
        "TTP_RUN_DIR": str(directory / "run"), "TTP_ABANDONED_S": "5", "TTP_OT": "60", "MS_ROLE": "",
    }  # fmt: skip
    tell_children(base)
    processes = []
    for rank in range(ranks):
        env, log = base | {"MS_NODE_ID": str(rank)}, directory / f"rank{rank}.out"
        processes.append(ForkedPython(CLIENT, [fault], env, log, cwd=directory, mindspore=True))
    try:
        codes = [process.wait(240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return codes, "\n".join(f"--- {p.name}\n{p.read_text()[-4000:]}" for p in sorted(directory.glob("rank*.out")))


def _result(directory: Path, rank: int) -> dict[str, Any]:
    return dict(json.loads((directory / f"result{rank}.json").read_text()))


def test_a_rank_is_killed_and_its_replica_saves_by_its_own_callback(tmp_path: Path) -> None:
    codes, story = _run(tmp_path / "job", "kill")
    assert codes == [1, -9], story  # its exit callback says 1
    saves = tmp_path / "job" / "saves"
    assert [path.name for path in saves.iterdir()] == ["ttp_saved_checkpoints-step_2"], story
    assert (saves / "ttp_saved_checkpoints-step_2" / "rank_0" / "ttp_rank_0-1_2.ckpt").stat().st_size > 0


@pytest.mark.slow
def test_lost_memory_is_repaired_by_its_own_callbacks(tmp_path: Path) -> None:
    codes, story = _run(tmp_path / "unhurt", "none")
    assert codes == [0, 0], story
    codes, story = _run(tmp_path / "job", "uce")
    assert codes == [0, 0], story
    for rank in range(2):
        hurt, unhurt = _result(tmp_path / "job", rank), _result(tmp_path / "unhurt", rank)
        assert hurt["weights"] == unhurt["weights"], story
        assert "send_recv 0 1" in hurt["said"] and "resume" in hurt["said"]
