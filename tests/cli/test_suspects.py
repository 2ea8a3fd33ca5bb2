"""``ttp suspects``: the hosts that several incidents have named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ttp
from tests.cli.test_incidents import SAVED, Story, write
from ttp.store.history import FILE, line_of

RELEASED = SAVED[-2]


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


def test_checkpoints_on_request_do_not_hide_the_last_failure(tmp_path: Path, ttp: Ttp) -> None:
    asked = {"snapshot": True}
    write(tmp_path, "20260101-000000-1-a", [SAVED[0], against(0, "older")])
    write(tmp_path, "20260102-000000-1-a", [SAVED[0], against(3, "n2")])
    write(tmp_path, "20260103-000000-1-a", [(0.0, "opened", asked), against(-1, "", "snapshot")])
    assert [each["host"] for each in ttp("suspects", tmp_path, "--json").json] == ["n2"]
    assert [each["host"] for each in ttp("suspects", tmp_path, "--last", 2, "--json").json] == ["n2", "older"]
    write(tmp_path, "20260104-000000-1-a", [(0.0, "opened", asked), against(0, "n3")])  # a rank died during the save
    assert [each["host"] for each in ttp("suspects", tmp_path, "--json").json] == ["n3"]


@pytest.mark.parametrize("hosts", [("n0", "n1"), ("", "")])
def test_the_larger_side_of_a_launch_that_was_cut_in_two_is_believed(
    tmp_path: Path, ttp: Ttp, hosts: tuple[str, str]
) -> None:
    """Both sides recorded how the launch ended: what the smaller one says accuses hosts that lived."""
    opened = (0.0, "opened", {"run_id": "job", "incarnation": 4, "snapshot": False})
    (tmp_path / "incidents").mkdir()
    begins = line_of("incarnation", 1.7e9, {"run_id": "job", "incarnation": 4})
    (tmp_path / "incidents" / FILE).write_text(begins)
    cut_off = [opened, *(against(rank, host, "lost") for rank, host in enumerate(hosts)), RELEASED]
    write(tmp_path, "20260101-000000-1-a", [SAVED[0], against(0, "older")])
    write(tmp_path, "20260102-000000-1-a", [opened, against(3, "n2", "lost"), RELEASED])
    write(tmp_path, "20260102-000001-1-b", cut_off)
    assert [each["host"] for each in ttp("suspects", tmp_path, "--json").json] == ["n2"]
    assert [each["host"] for each in ttp("suspects", tmp_path, "--last", 2, "--json").json] == ["n2", "older"]


def test_an_older_incident_does_not_stand_for_the_newest_whose_host_is_not_known(tmp_path: Path, ttp: Ttp) -> None:
    """The lost host was in no answer, and a host that had failed before, and was well, was left out in its place."""
    write(tmp_path, "20260101-000000-1-a", [SAVED[0], against(1, "b")])
    write(tmp_path, "20260102-000000-1-b", [SAVED[0], against(0, "", "lost"), against(2, "", "lost"), RELEASED])
    said = ttp("suspects", tmp_path)
    assert said.code == 1 and "accuses ranks 0,2, whose host is not known" in said.err
    both = ttp("suspects", tmp_path, "--last", 2, "--json")
    assert [each["host"] for each in both.json] == ["b"] and "ranks 0,2, whose host is not known" in both.err


def test_the_newest_incident_may_be_one_that_a_full_disk_did_not_take(tmp_path: Path, ttp: Ttp) -> None:
    write(tmp_path, "20260101-000000-1-a", [SAVED[0], against(1, "b"), RELEASED])
    lines = line_of("incarnation", 1.79e9, {"run_id": "job"}) + line_of("released", 1.8e9, {"exit_code": 75})
    (tmp_path / "incidents" / FILE).write_text(lines)
    assert ttp("suspects", tmp_path).err == ""
    lines += line_of("incarnation", 1.9e9, {"run_id": "job"}) + line_of("released", 2e9, {"exit_code": 70})
    (tmp_path / "incidents" / FILE).write_text(lines)
    said = ttp("suspects", tmp_path)
    assert said.code == 0 and "the incident that ended the last launch is not here" in said.err
    asked: Story = [(2e11, "opened", {"snapshot": True}), (2e11, "released", {"exit_code": 75})]  # `ttp save --again`
    write(tmp_path, "20260102-000000-1-a", asked)
    assert ttp("suspects", tmp_path).err == ""


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
