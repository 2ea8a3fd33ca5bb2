"""The old names: a program that drives the protocol by hand, in a process of its own, with a real controller."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.ports import free_port
from ttp import legacy
from ttp.config import RankEnv
from ttp.errors import UsageError, told_by_code
from ttp.legacy import Program, replica_set
from ttp.mindio.handlers import Call
from ttp.mindio.protocol.replica_lists import Replicas

PROGRAM = """
import os, sys
from pathlib import Path
import ttp

out = Path(sys.argv[1])
weights = {"value": 0}

def save(save_rank, rank_list, args):
    (out / "step.tmp").write_text(f"{save_rank} {rank_list} {args[0]} {args[1]['value']}")

def rename(args):
    (out / "step.tmp").rename(out / f"step_{args[0]}")
    return 0

@ttp.ttp_to_persist
def train():
    port = int(os.environ["TTP_PORT"])
    assert ttp.ttp_init_controller(0, 1, 1, False) == 0
    assert ttp.ttp_start_controller("127.0.0.1", port) == 0
    assert ttp.ttp_init_processor(0, [0], 1, 1, 1, False) == 0
    assert ttp.ttp_start_processor("127.0.0.1", port) == 0
    ttp.ttp_register_save_ckpt_handler(save)
    ttp.ttp_register_rename_handler(rename)
    for step in range(1, 6):
        ttp.ttp_set_ckpt_args((step - 1, dict(weights)))
        assert ttp.ttp_start_updating_os(-1) == 0
        weights["value"] += 10
        assert ttp.ttp_end_updating_os(step) == 0
        ttp.ttp_set_ckpt_args((step, dict(weights)))
        if step == 5:
            raise ValueError("out of luck")

train()
"""


LAUNCHERS = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize("launcher", [LAUNCHERS, {}], ids=["launcher", "by-hand"])
def test_the_program_of_the_guide(tmp_path: Path, launcher: dict[str, str]) -> None:
    """Rank, world size and address are arguments of its calls, so it needs no launcher that sets them."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TTP_") and k not in LAUNCHERS} | launcher | {
        "TTP_PORT": str(free_port()),
        "TTP_RUN_DIR": str(tmp_path / "run"), "TTP_SAVE_DIR": str(tmp_path), "TTP_ABANDONED_S": "5",
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 75, done.stderr
    assert (tmp_path / "step_5").read_text() == "0 [0] 5 50"
    assert "ValueError: out of luck" in done.stderr


def test_functions_return_one_when_they_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legacy, "_program", Program())
    assert legacy.ttp_init_controller(3, 2) == legacy.ttp_init_processor(5, [0, 1], 2, 2) == 1
    assert legacy.ttp_start_processor("127.0.0.1", 1) == 1
    assert legacy.ttp_start_updating_os() == legacy.ttp_end_updating_os(1) == 1


@pytest.mark.parametrize("wrong", [None, "0", 1.5])
def test_arguments_of_a_wrong_type_are_named(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert legacy.ttp_init_controller(wrong, 2) == legacy.ttp_init_controller(0, wrong) == 1
    assert legacy.ttp_init_processor(wrong, [0, 1], 2, 2) == legacy.ttp_init_processor(0, [0, 1], 2, wrong) == 1
    assert caplog.text.count(f"not whole numbers: {{'rank': {wrong!r}") == 2
    assert caplog.text.count(f"'world_size': {wrong!r}") == 2
    assert legacy.ttp_init_processor(0, [0, 1], 2, 2, wrong) == 1
    assert f"not whole numbers: {{'replica': {wrong!r}}}" in caplog.messages[-1]
    assert legacy.ttp_init_processor(0, wrong, 2, 2) == 1
    assert "dp_ranks" in caplog.messages[-1]
    for register in (legacy.ttp_register_save_ckpt_handler, legacy.ttp_register_rename_handler):
        with pytest.raises(TypeError, match="is a function"):
            register(wrong)


@pytest.mark.parametrize("wrong", [None, "abc", 0, 65536, 1.5])
def test_a_port_that_is_none_is_named_before_a_process_is_started(
    wrong: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(legacy, "_program", Program())
    for name in ("ttp.legacy.ensure_controller", "ttp.mindio.handlers.Participant"):
        monkeypatch.setattr(name, None)
    assert legacy.ttp_init_processor(0, [0], 1, 1) == 0
    for start in (legacy.ttp_start_controller, legacy.ttp_start_processor):
        assert start("127.0.0.1", wrong) == 1
        assert f"port='{wrong}' is not valid: expected a port number from 1 to 65535" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("told", "local_rank"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, 0),  # one rank on each host
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 0),
        ({"MS_ROLE": "MS_WORKER", "MS_NODE_ID": "1", "MS_WORKER_NUM": "2", "DEVICE_ID": "0"}, 0),
        ({}, 1),
    ],
)
def test_what_a_launcher_says_of_the_host_counts(
    told: dict[str, str], local_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank of each host starts its relay."""
    joined: list[int] = []

    def join(env: RankEnv, _: object) -> None:
        joined.append(env.local_rank)
        raise UsageError("it does not join")

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ttp.mindio.handlers.Participant", join)
    monkeypatch.setattr(legacy, "_program", Program())
    assert legacy.ttp_init_processor(1, [0, 1], 2, 2, 1) == 0
    assert legacy.ttp_start_processor("127.0.0.1", 1) == 1
    assert joined == [local_rank]


@pytest.mark.parametrize(
    ("returned", "fails"), [(None, False), (0, False), (True, False), (1, True), (False, True), (-1, True)]
)
def test_what_a_rename_handler_returns_matters(returned: Any, fails: bool) -> None:
    program, call = Program(), cast("Call", SimpleNamespace(step=5))
    program.rename = lambda args: returned
    with pytest.raises(RuntimeError, match="the rename handler returned") if fails else nullcontext():
        program.finish(call)


@pytest.mark.parametrize(
    ("dp_ranks", "shards", "holders"),
    [
        ([0, 1, 2, 3], 2, [(0, 2), (1, 3)]),
        ([0, 1, 2, 3], 1, [(0, 1, 2, 3)]),
        ([0, 1], 0, [(0, 1)]),
        ([0, 1, 2], 1, [(0, 1, 2)]),
        ([0, 1, 2, 3, 4], 2, [(0, 2, 4), (1, 3)]),
        ([0, 1, 2, 3, 4], 3, [(0, 3), (1, 4), (2,)]),
    ],
)
def test_replica_groups_of_the_replicated_optimizer(
    dp_ranks: list[int], shards: int, holders: list[tuple[int, ...]]
) -> None:
    layout = Replicas(len(dp_ranks), ((replica_set(dp_ranks, shards),),)).layout()
    assert list(layout.groups.values()) == holders


def test_a_call_of_another_form_is_no_failure_of_the_function() -> None:
    """It is a mistake in the program, which would go on as if the manager's request had been refused."""

    def double(number: int) -> None:
        raise TypeError(f"{number} cannot be doubled")

    answers: Any = told_by_code(logging.getLogger(), TypeError)(double)
    assert answers(1) == 1
    for wrong in ({}, {"numbre": 1}, {"number": 1, "more": 2}):
        with pytest.raises(TypeError):
            answers(**wrong)
