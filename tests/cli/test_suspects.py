"""``ttp suspects``: the hosts that several incidents have named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cli.conftest import Ttp
from tests.cli.test_incidents import SAVED, write


def against(rank: int, host: Any, kind: str = "exited") -> tuple[float, str, dict[str, Any]]:
    return 0.5, "evidence", {"rank": rank, "evidence": kind, "text": f"rank {rank} of {host}: {kind}", "host": host}


def test_the_hosts_of_the_last_incident(tmp_path: Path, ttp: Ttp) -> None:
    write(tmp_path, "20260101-000000-1-a", [SAVED[0], against(9, "old")])
    told = [against(3, "n2"), against(2, "n2", "hung"), against(1, "n1", "collective"), against(0, "n0", "silent")]
    write(tmp_path, "20260102-000000-1-a", [SAVED[0], *told, (0.9, "retracted", {"rank": 0, "evidence": "silent"})])
    said = ttp("suspects", tmp_path, "--json")
    assert said.code == 0
    (n2,) = said.json
    assert (n2["host"], n2["incidents"], n2["ranks"], n2["kinds"]) == ("n2", 1, [2, 3], ["exited", "hung"])
    assert n2["text"] == "rank 2 of n2: hung" and n2["unix_s"] > 1e9
    assert "rank 2 of n2: hung" in ttp("suspects", tmp_path).out


def test_a_host_that_is_named_again_and_again(tmp_path: Path, ttp: Ttp) -> None:
    for number in range(4):
        hosts = ["often", *(["once"] if number == 2 else [])]
        write(tmp_path, f"20260101-000000-{number}-a", [SAVED[0], *(against(n, host) for n, host in enumerate(hosts))])
    found = ttp("suspects", tmp_path, "--last", 10, "--json").json
    assert [(each["host"], each["incidents"]) for each in found] == [("often", 4), ("once", 1)]
    assert [each["host"] for each in ttp("suspects", tmp_path, "--last", 10, "--at-least", 2, "--json").json] == [
        "often"
    ]


def test_checkpoints_on_request_and_what_a_host_that_was_cut_off_recorded_do_not_hide_the_last_failure(
    tmp_path: Path, ttp: Ttp
) -> None:
    asked = {"snapshot": True}
    write(tmp_path, "20260101-000000-1-a", [SAVED[0], against(0, "older")])
    write(tmp_path, "20260102-000000-1-a", [SAVED[0], against(3, "n2")])
    write(tmp_path, "20260102-000001-1-b", [SAVED[0], against(0, "", "lost"), against(1, "", "lost")])
    write(tmp_path, "20260103-000000-1-a", [(0.0, "opened", asked), against(-1, "", "snapshot")])
    assert [each["host"] for each in ttp("suspects", tmp_path, "--json").json] == ["n2"]
    assert [each["host"] for each in ttp("suspects", tmp_path, "--last", 2, "--json").json] == ["n2", "older"]
    write(tmp_path, "20260104-000000-1-a", [(0.0, "opened", asked), against(0, "n3")])  # a rank died during the save
    assert [each["host"] for each in ttp("suspects", tmp_path, "--json").json] == ["n3"]


def test_a_hang_of_all_ranks_names_nobody(tmp_path: Path, ttp: Ttp) -> None:
    write(tmp_path, "20260101-000000-1-a", [SAVED[0], against(0, "n1")])
    write(tmp_path, "20260102-000000-1-a", [SAVED[0], against(-1, "", "hung")])
    assert (ttp("suspects", tmp_path).code, ttp("suspects", tmp_path, "--last", 2).code) == (1, 0)


def test_nobody_is_named(tmp_path: Path, ttp: Ttp) -> None:
    write(tmp_path, "20260101-000000-1-a", [*SAVED[:3], against(0, None), against(1, 7)])  # as before hosts were noted
    assert (ttp("suspects", tmp_path, "--json").code, ttp("suspects", tmp_path, "--json").json) == (1, [])
    assert ttp("suspects", tmp_path / "typo").code == 64


def test_a_hostile_host_is_shown_as_text(tmp_path: Path, ttp: Ttp) -> None:
    write(tmp_path, "20260101-000000-1-a", [SAVED[0], against(0, "[red]\x1b[2J")])
    assert "[red]" in ttp("suspects", tmp_path).out and "\x1b" not in ttp("suspects", tmp_path).out
