"""``ttp watch-node``: a check of the node, and MindCluster's reset.json, against a real controller."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.cli.conftest import Controller, Ttp
from tests.waiting import has_ended, until
from ttp.launch.node_check import Finding, Health, ReportPolicy, read_reset, run_check

Start = Callable[..., Controller]
BROKEN = {"RankId": 3, "LogicId": 1, "Status": "unrecovered", "Policy": "reset", "ErrorCodeHex": ["0x80C98000"]}


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


@pytest.mark.parametrize(
    ("check", "found"),
    [
        ("echo all; echo well", Finding(Health.HEALTHY, "well")),
        ("echo warm >&2; exit 1", Finding(Health.SUB_HEALTHY, "warm")),
        ("exit 2", Finding(Health.FAULTY, "the check sh printed no reason")),
        ("sleep 60", Finding(Health.FAULTY, "the check sh did not end within 0.2 s")),
        ("echo bug; exit 127", "the check sh exited with 127, but it has to exit with 0, 1 or 2: bug"),
    ],
)
def test_what_a_check_says(check: str, found: Finding | str) -> None:
    assert run_check(shell(check), 0.2 if "sleep" in check else 30) == found


def test_a_check_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    found = run_check(shell(f"sleep 60 & echo $! > {tmp_path}/pid; wait"), 0.5)
    assert isinstance(found, Finding) and found.health is Health.FAULTY
    child = int((tmp_path / "pid").read_text())
    until(lambda: has_ended(child), 5)


def test_a_check_may_leave_a_process_behind() -> None:
    """It has the check's output still open."""
    assert run_check(shell("sleep 3 & echo well"), 2) == Finding(Health.HEALTHY, "well")


def test_a_check_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_check(["/no/check"], 1) == "the check /no/check cannot be run: No such file or directory"
    monkeypatch.setattr("ttp.launch.node_check.memory_file", Mock(side_effect=OSError(2, "No usable directory")))
    assert run_check(["true"], 1) == "the check true cannot be run: No usable directory"


@pytest.mark.parametrize(
    ("written", "found"),
    [
        (json.dumps({"RankList": []}), Health.HEALTHY),
        (json.dumps({"RankList": [BROKEN | {"Status": "recovered"}]}), Health.HEALTHY),
        (json.dumps({"RankList": [BROKEN | {"Policy": "ignore"}, "?", BROKEN | {"Policy": ""}]}), Health.HEALTHY),
        (json.dumps({"RankList": [BROKEN, BROKEN | {"RankId": 1}]}), (1, 3)),
        (json.dumps({"RankList": [BROKEN | {"RankId": "x" * 999}]}), ()),
        (json.dumps({"RankList": [BROKEN, BROKEN | {"RankId": 99999999999}]}), (3,)),
        (json.dumps({"RankList": [BROKEN]})[:-9], "is incomplete, or not JSON"),
        (json.dumps({"RankList": 7}), "has no RankList"),
        ("[]", "has no RankList"),
    ],
)
def test_what_reset_json_says(tmp_path: Path, written: str, found: Any) -> None:
    file = tmp_path / "reset.json"
    file.write_text(written)
    said = read_reset(file)
    if isinstance(found, str):
        assert isinstance(said, str) and found in said
    else:
        assert isinstance(said, Finding)
        assert (
            said.health is found if isinstance(found, Health) else (said.health, said.ranks) == (Health.FAULTY, found)
        )
        assert len(said.text) < 400
    assert read_reset(tmp_path / "none") == Finding(Health.HEALTHY, f"there is no {tmp_path / 'none'}")


def test_when_a_job_is_told() -> None:
    bad, ill, well = Finding(Health.FAULTY, "x"), Finding(Health.SUB_HEALTHY), Finding(Health.HEALTHY)
    policy = ReportPolicy(2, report_sub_healthy=False)
    assert [policy.report(each) for each in (bad, well, bad, ill, bad, bad, bad)] == [*[False] * 5, True, True]
    policy.told(bad)
    assert not policy.report(bad) and not policy.take_back(ill) and policy.take_back(well)
    policy.told(None)
    assert not policy.take_back(well) and not policy.report(bad) and policy.report(bad)
    assert ReportPolicy(1, report_sub_healthy=True).report(ill)


def test_a_job_is_told_again_when_it_gets_worse() -> None:
    """A sub-healthy host, or one with one broken rank, gets worse without recovering in between."""
    bad, ill = Finding(Health.FAULTY, "x"), Finding(Health.SUB_HEALTHY)
    policy = ReportPolicy(2, report_sub_healthy=True)
    assert not policy.report(ill) and policy.report(ill)
    policy.told(ill)
    assert not policy.report(bad) and policy.report(bad)
    policy.told(bad)
    assert not any(map(policy.report, (ill, ill, bad, bad)))
    one, other, both = (Finding(Health.FAULTY, ranks=ranks) for ranks in ((1,), (2,), (1, 2)))
    for told, news, old in ((one, both, one), (both, bad, other), (one, other, one), (bad, None, both)):
        policy = ReportPolicy(1, report_sub_healthy=True)
        policy.told(told)
        assert not policy.report(old) and not policy.report(ill)
        assert news is None or policy.report(news)


def test_a_faulty_host_is_reported_to_its_job(ttp: Ttp, start: Start) -> None:
    controller = start()
    controller.form(4)
    where = ["--port", controller.port, "--once"]
    well = ttp("watch-node", *where, "--host", "left", "--", *shell("exit 0"))
    assert (well.code, well.err) == (0, "")
    bad = ttp("watch-node", *where, "--host", "left", "--drain", "--", *shell("echo the fan stands still; exit 2"))
    assert bad.code == 2 and "left is faulty: the fan stands still" in bad.err and "accused: ranks 0-1" in bad.err
    back = ttp("report-fault", "--port", controller.port, "--host", "left", "--recovered")
    assert (back.code, back.out) == (0, "left may start ranks again\n")
    again = ttp("report-fault", "--port", controller.port, "--host", "left", "--recovered")
    assert again.code == 1 and "(drained: none); nothing was done" in again.err


def test_a_drained_host_is_moved_where_that_costs_no_restart(
    ttp: Ttp, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = start()
    controller.form(4)
    monkeypatch.setattr("ttp.cli.connection.Client.move", lambda self, host: (host == "left", ""))
    flags = ["--port", controller.port, "--host", "left", "--drain", "--once"]
    bad = ttp("watch-node", *flags, "--", *shell("exit 2"))
    assert "the ranks of left are moved" in bad.err and "accused" not in bad.err
    assert ttp("report-fault", *flags[:-1], "--json").json["accused"] == []
    assert ttp("status", "--port", controller.port, "--json").json["incidents_total"] == 0


def test_reset_json_may_be_unknown_and_name_ranks(ttp: Ttp, start: Start, tmp_path: Path) -> None:
    """What one check does not know another one may. That no job runs is no end of it."""
    controller = start()
    controller.form(4)
    reset = tmp_path / "reset.json"
    reset.write_text("{")
    where = ("watch-node", "--once", "--port", controller.port)
    once = ttp(*where, "--reset-json", reset)
    assert once.code == 3 and "is incomplete" in once.err
    assert ttp(*where, "--", "/no/check").code == 3
    worse = ttp("watch-node", "--once", "--port", 1, "--reset-json", reset, "--", *shell("exit 2"))
    assert worse.code == 2 and "is incomplete" in worse.err and "127.0.0.1:1" in worse.err
    reset.write_text(json.dumps({"RankList": [BROKEN]}))
    said = ttp(*where, "--reset-json", reset)
    assert said.code == 2 and "accused: rank 3" in said.err and "0x80C98000" in said.err


def test_a_host_of_unknown_health_stays_what_it_was(
    ttp: Ttp, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = start()
    controller.form(4)
    left = [2, 9, 9, 2, 9, 0]
    code = tmp_path / "code"

    def next_code(_s: float = 0.0) -> None:
        if not left:
            raise KeyboardInterrupt
        code.write_text(str(left.pop(0)))

    next_code()
    monkeypatch.setattr("ttp.cli.watch_node.time", SimpleNamespace(sleep=next_code))
    flags = ["--port", controller.port, "--host", "left", "--drain", "--strikes", 2]
    lines = ttp("watch-node", *flags, "--", *shell(f"echo bad; exit $(cat {code})")).err.splitlines()
    expected = ["left is faulty: bad", "exited with 9", "accused: ranks 0-1", "exited with 9", "left is healthy again"]
    assert len(lines) == len(expected) and all(map(str.__contains__, lines, expected)), lines
