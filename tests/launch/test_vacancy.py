"""When a host that stands by takes a place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from ttp.errors import ConfigError
from ttp.launch.run import _parse
from ttp.launch.stand_by import StandBy, vacancies


@pytest.mark.parametrize(
    ("round_number", "complete", "there", "waiting", "expected"),
    [
        (0, False, "", "", 0),  # nobody has come yet
        (0, False, "a", "", 0),  # the job has not formed: whoever it lacks may be on the way
        (0, True, "ab", "", 0),
        (0, True, "b", "a", 0),  # a meets again, b still saves
        (0, True, "", "a", 1),  # b is silent
        (1, False, "a", "", 1),
        (1, False, "ab", "", 0),
        (1, False, "", "", 0),  # between the last that leaves a round and the first that enters the next
        (1, True, "a", "", 0),  # b is silent, and nobody waits for it: its ranks may train
        (2, True, "ab", "", 0),
    ],
)
def test_a_place_is_empty_when_others_meet_without_a_host(
    round_number: int, complete: bool, there: str, waiting: str, expected: int
) -> None:
    state = SimpleNamespace(
        round=round_number, complete=complete, participants=dict.fromkeys(there, 0), wait_list=set(waiting)
    )
    assert vacancies(state, hosts=2) == expected


def test_a_rendezvous_that_lets_nobody_in_later_is_refused() -> None:
    static = SimpleNamespace(get_backend=lambda: "static")
    with pytest.raises(ConfigError, match=r"--stand-by needs .* and static is none: start all hosts .* c10d"):
        StandBy(static, 1.0, lambda store: None)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ""),
        (["--rdzv-backend", "c10d"], "keep_alive_interval=1"),
        (["--rdzv-backend", "c10d", "--rdzv-conf", "join_timeout=9"], "join_timeout=9,keep_alive_interval=1"),
        (["--rdzv-backend", "c10d", "--rdzv-conf", "keep_alive_interval=4"], "keep_alive_interval=4"),
        (["--rdzv-backend", "c10d", "--nnodes", "1:65"], ""),
    ],
)
def test_a_lost_host_is_noticed_sooner_than_by_torch(flags: list[str], expected: str) -> None:
    assert _parse([*flags, "x.py"]).rdzv_conf == expected
