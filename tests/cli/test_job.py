"""``ttp status``, ``save`` and ``report-fault`` against a real controller process."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from rich.console import Console

from tests.cli.conftest import Controller, Ttp
from tests.cli.test_saved import keys_in_help
from tests.core.talk import Talk
from tests.core.test_other_directory import everybody_fails, saving
from tests.ports import free_port
from ttp.cli import connection
from ttp.cli import status as status_command
from ttp.cli.connection import UnreachableError, Where, connected
from ttp.cli.status import LAUNCHER_WAITS, picture
from ttp.config import Config
from ttp.controller.service import _incident_status
from ttp.errors import ConfigError
from ttp.launch import ring
from ttp.launch.job_verdict import ask_verdict
from ttp.launch.ring import Ring, write_ring
from ttp.launch.run_dir import note_launcher, prepare_run_dir
from ttp.launch.token_file import write_token
from ttp.wire.v1 import controller_pb2 as pb

Start = Callable[..., Controller]


# --------------------------------------------------------------------------------------------------------------- status


def test_a_controller_without_a_job(ttp: Ttp, start: Start) -> None:
    controller = start()
    said = ttp("status", "--port", controller.port)
    assert said.code == 0
    assert "waiting · no rank has joined yet" in said.out
    seen = ttp("status", "--port", controller.port, "--json").json
    assert seen["ranks"] == []
    assert seen["last_incident"] is None
    assert seen["controller"]["pid"] == controller.process.pid
    for command, why in (
        ("save", "no job is training"),
        ("report-fault --rank 0", "no job has joined this controller yet"),
    ):
        said = ttp(*command.split(), "--port", controller.port)
        assert (said.code, said.out) == (1, "")
        assert why in said.err
    assert ttp("save", "--port", controller.port, "--json").json["saved"] is False


def test_status_of_a_job(ttp: Ttp, start: Start) -> None:
    controller = start()
    controller.form(4, version=7)
    seen = ttp("status", "--port", controller.port, "--json").json
    assert (seen["stage"], seen["run_id"], seen["world_size"], seen["framework"]) == ("training", "digits", 4, "torch")
    assert seen["groups"] == {"model": [0, 1, 2, 3]}
    shown = [(r["rank"], r["host"], r["pid"], r["version"], r["phase"], r["state"]) for r in seen["ranks"]]
    assert shown[0] == (0, "left", 100, 7, "idle", "live")
    assert shown[3] == (3, "right", 103, 7, "idle", "live")
    for nested in (seen, seen["ranks"][0], seen["controller"]):
        assert set(nested) <= keys_in_help(ttp, "status")
    said = ttp("status", "--port", controller.port).out
    assert "training · run digits · incarnation 1 · 4 ranks · torch" in said
    assert "shard model: ranks 0-3" in said
    assert re.search(r"3 +right +103 +7 +idle +live", said)


def test_it_says_what_an_incident_waits_for() -> None:
    (asked := Talk()).fault(1)
    everybody_fails(refused := saving(rescue_s=60.0))
    for talk, why in (asked, "not all ranks have reported"), (refused, "the storage refused rank 0 (disk full): "):
        now = _incident_status(talk.incident, open_now=True, now=0.0)
        assert f"now freezing: {why}" in rendered(pb.GetStatusResponse(last_incident=now))


def many_ranks(state: str, **facts: Any) -> list[pb.RankStatus]:
    return [pb.RankStatus(rank=r, host="h", pid=r, version=9, state=state, **facts) for r in range(200)]


def test_a_large_job_shows_who_stands_out() -> None:
    ranks = many_ranks("live")
    ranks[100].state, ranks[101].version, ranks[102].version = "lost", 7, 8
    now = pb.GetStatusResponse(ranks=ranks, world_size=200)
    short, long = rendered(now), rendered(now, all_ranks=True)
    assert re.findall(r"^ +(\d+) +h ", short, re.MULTILINE) == ["100", "101"]
    assert "198 ranks live at version 9 or one before: 0-99,102-199" in short
    assert len(re.findall(r"^ +(\d+) +h ", long, re.MULTILINE)) == 200


def test_lost_ranks_of_a_large_job_are_shown_while_the_others_are_frozen() -> None:
    ranks = many_ranks("frozen", silent_s=1)
    for rank in ranks[80:180]:
        rank.state = "lost"
    for rank in ranks[190:]:
        rank.CopyFrom(pb.RankStatus(rank=rank.rank, state="missing"))
    said = rendered(pb.GetStatusResponse(ranks=ranks, world_size=200))
    assert re.findall(r"^ +(\d+) +h ", said, re.MULTILINE) == [str(rank) for rank in range(80, 144)]
    assert "90 ranks frozen at version 9 or one before: 0-79,180-189" in said
    assert "10 ranks missing: 190-199" in said
    assert "and 36 more ranks: 144-179 (--all shows them)" in said


def test_what_a_job_could_go_back_to_is_shown() -> None:
    assert "second copies of version 120" in rendered(pb.GetStatusResponse(copied_version=120))
    assert "second copies of version 0" in rendered(pb.GetStatusResponse(copied_version=0)), "not yet"
    assert "second copies" not in rendered(pb.GetStatusResponse())


def test_of_a_job_with_very_many_shards_the_first_are_shown() -> None:
    groups = [pb.ShardGroup(name=f"s{number}", ranks=[number]) for number in range(20)]
    said = rendered(pb.GetStatusResponse(groups=groups))
    assert "shard s15: rank 15" in said and "s16" not in said and "and 4 more shards (--json lists them)" in said


def test_an_incident_shows_what_it_does_now_and_where_its_checkpoint_is() -> None:
    incident = pb.IncidentStatus(id="one", stage="saving", cause="rank 1 was lost")
    assert "now saving" in rendered(pb.GetStatusResponse(last_incident=incident))
    incident.outcome, incident.path = "exit 75", "/save/step_12"
    said = rendered(pb.GetStatusResponse(last_incident=incident))
    assert "now saving" not in said and "/save/step_12" in said


def test_how_this_host_restarts_is_shown() -> None:
    assert "will be warm" in str(status_command.restarts_line({"state": "preparing"}))
    assert "are cold: no memory" in str(status_command.restarts_line({"state": "no memory"}))


def test_host_names_that_clash_are_shown() -> None:
    said = rendered(pb.GetStatusResponse(shared_names=["node"]))
    assert "two machines name their host node: set TTP_HOST to another name on each" in said
    assert "TTP_HOST" not in rendered(pb.GetStatusResponse())


def test_what_becomes_of_the_others_when_a_rank_dies_is_shown() -> None:
    ranks = [pb.RankStatus(rank=r, state="live", can_continue=True) for r in range(3)]
    seen = rendered(pb.GetStatusResponse(ranks=ranks))
    assert "when a rank dies the other ranks go on in their processes, if the launcher of each host lives" in seen
    ranks[1].can_continue = False
    assert "all are started again: rank 1 cannot go on" in rendered(pb.GetStatusResponse(ranks=ranks))
    assert "when a rank dies" not in rendered(pb.GetStatusResponse(ranks=ranks[1:2]))


def rendered(now: pb.GetStatusResponse, *, all_ranks: bool = False) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(picture(now, all_ranks))
    return capture.get()


@pytest.mark.parametrize("shown", ["--json", "a pipe", "a terminal"])
def test_watch_goes_on_when_the_controller_is_gone_until_ctrl_c(
    ttp: Ttp, start: Start, monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    """Another controller may lead then, and Ctrl-C is no error."""
    controller = start()
    note_launcher(prepare_run_dir(Config(port=controller.port).resolved_run_dir()))
    pauses = iter([controller.close])

    def sleep(_: float) -> None:
        if (do := next(pauses, None)) is None:
            raise KeyboardInterrupt
        do()

    monkeypatch.setattr(status_command, "time", SimpleNamespace(sleep=sleep))
    if shown == "a terminal":
        console = partial(Console, force_terminal=True, width=200, legacy_windows=False)
        monkeypatch.setattr(status_command, "screen", lambda: console(file=sys.stdout))
    said = ttp("status", "--watch", "--interval", "0.05", "--port", controller.port, *["--json"] * (shown == "--json"))
    assert said.code == 0 and said.out.index("waiting") < said.out.index("no ttp controller answers")
    assert LAUNCHER_WAITS in " ".join(said.out.split())
    if shown == "--json":
        first, last = map(json.loads, said.out.splitlines())
        assert first["stage"] == "waiting" and "no ttp controller answers" in last["error"]


def test_a_failed_request_is_followed_by_a_new_connection() -> None:
    """gRPC would wait for up to two minutes before it looks for the controller of the next launch."""
    with connected(Where("127.0.0.1", free_port(), "")) as client:
        with pytest.raises(UnreachableError, match="no ttp controller answers"):
            client.status()
        assert client._channel is None


# ----------------------------------------------------------------------------------------------------------------- save


LATIN_1 = "caf\udce9"
"""An argument that is not UTF-8, as Python decodes it."""


def test_save(ttp: Ttp, start: Start) -> None:
    controller = start()
    controller.form(2, version=7)
    port = ("--port", controller.port)
    said = ttp("save", "--reason", "before the holidays", *port)
    assert (said.code, said.out) == (0, "saved version 7: /made/up/step_7\n")
    now = ttp("status", *port, "--json").json
    last = now["last_incident"]
    assert (now["stage"], last["version"], last["path"], last["stage"]) == ("training", 7, "/made/up/step_7", "closed")
    assert set(last) <= keys_in_help(ttp, "status")
    told = ttp("status", *port).out
    assert "before the holidays" in told and "saved version 7" in told
    seen = ttp("save", "--json", *port, "--reason", LATIN_1).json
    assert (seen["saved"], seen["version"], seen["path"]) == (True, 7, "/made/up/step_7")
    assert set(seen) <= keys_in_help(ttp, "save")


def test_save_that_fails_says_why(ttp: Ttp, start: Start) -> None:
    controller = start()
    controller.form(2, saves=False)
    said = ttp("save", "--port", controller.port)
    assert said.code == 1
    assert "no space left" in said.err


# --------------------------------------------------------------------------------------------------------- report-fault


def test_report_fault_of_some_that_are_and_some_that_are_not(ttp: Ttp, start: Start) -> None:
    controller = start()
    controller.form(4, version=7)
    port = ("--port", controller.port)
    for whom in (["--rank", "9"], ["--host", "nowhere"], ["--host", LATIN_1, "--drain"]):
        said = ttp("report-fault", *whom, *port)
        assert (said.code, said.out) == (1, "")
        assert "no such rank" in said.err
    assert ttp("status", *port, "--json").json["incidents_total"] == 0
    said = ttp("report-fault", "--rank", 2, "--rank", 9, "--reason", "its fan stands still", *port)
    assert said.code == 0
    assert "accused: rank 2." in said.out and "no such rank: 9" in said.out
    assert "its fan stands still" in ttp("status", *port, "--json").json["last_incident"]["cause"]


def test_a_host_that_is_drained_is_told_to_its_launcher(ttp: Ttp, start: Start) -> None:
    controller = start()
    controller.form(4)
    port = ("--port", controller.port)
    alone = ttp("report-fault", "--rank", 2, "--drain", *port)
    assert alone.code == 64 and "--drain takes a whole host: give --host NAME" in alone.err
    ask = [f"127.0.0.1:{controller.port}"], controller.token, "", 0
    assert list(ask_verdict(*ask).drained) == []
    said = ttp("report-fault", "--host", "right", "--drain", "--reason", LATIN_1, "--json", *port)
    assert said.code == 0 and said.json["accused"] == [2, 3]
    assert set(said.json) <= keys_in_help(ttp, "report-fault")
    assert list(ask_verdict(*ask).drained) == ["right"]
    assert ttp("status", *port, "--json").json["last_incident"]["cause"].endswith("caf?")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["status", "--address", LATIN_1, "--port", 1], 1),
        (["status", "--token", LATIN_1, "--port", 1], 1),
        (["report-fault", "--port", 1, "--rank", 1 << 32], 64),
        *((["status", "--watch", "--port", 1, "--interval", each], 64) for each in ("nan", "inf", "1e12")),
        *((["save", "--port", 1, "--timeout", each], 64) for each in ("nan", "inf", "1e300")),
        *((["watch-node", "--every", each, "--", "true"], 64) for each in ("nan", "inf")),
        *((["watch-node", "--timeout", each, "--", "true"], 64) for each in ("nan", "inf")),
        *((["clusterd", "--every", each], 64) for each in ("nan", "inf")),
        (["verdict", ".", "--since", "nan"], 64),
    ],
)
def test_words_and_numbers_that_make_no_sense_are_one_line(ttp: Ttp, arguments: list[Any], code: int) -> None:
    said = ttp(*arguments)
    assert (said.code, said.out, said.err.count("\n")) == (code, "", 1), said.err
    assert code == 1 or arguments[-2] in said.err or arguments[-4] in said.err


# ---------------------------------------------------------------------------------------------- finding the controller


def test_nobody_there(ttp: Ttp) -> None:
    for command in (["status"], ["save"], ["report-fault", "--rank", "0"]):
        said = ttp(*command, "--port", free_port(), "--address", "127.0.0.1")
        assert (said.code, said.out) == (1, "")
        assert "no ttp controller answers" in said.err and "`ttp verdict SAVE_DIR` says how a job ended" in said.err


def test_a_controller_that_stands_by_does_not_speak_for_the_job(
    ttp: Ttp, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's first controller is gone, and no rank has connected to the standby controller yet."""
    standby, home = start(), f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("TTP_RUN_DIR", str(tmp_path))
    write_ring(tmp_path, Ring("digits", 1, 1, home, home, (f"127.0.0.1:{standby.port}",)))
    for command in (["status"], ["status", "--json"], ["save"], ["report-fault", "--rank", "0"]):
        said = ttp(*command)
        assert (said.code, said.out) == (1, "")
        assert f"only a standby controller answers, at 127.0.0.1:{standby.port}" in said.err
    standby.form(4, version=7)
    assert ttp("status", "--json").json["world_size"] == 4
    standby.close()
    said = ttp("status")
    assert said.code == 1 and "no controller of this job answers, neither the first one nor a standby" in said.err


def test_a_job_that_forms_is_spoken_for_by_its_first_controller(
    ttp: Ttp, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby controller is left from an earlier launch, and its answer comes first."""
    first, standby = start(), start()
    monkeypatch.setenv("TTP_RUN_DIR", str(tmp_path))
    home, other = (f"127.0.0.1:{controller.port}" for controller in (first, standby))
    write_ring(tmp_path, Ring("digits", 1, 1, home, home, (other,)))
    everybody = ring.ask_everybody
    monkeypatch.setattr(ring, "ask_everybody", lambda *a: iter(sorted(everybody(*a), key=lambda one: one[0] != other)))
    assert ttp("status", "--json").json["world_size"] == 0


def test_the_token_comes_from_the_environment_or_the_run_dir(
    ttp: Ttp, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = start(token="secret")
    refused = ttp("status", "--port", controller.port)
    assert refused.code == 64
    assert "TTP_TOKEN" in refused.err
    assert ttp("status", "--port", controller.port, "--token", "secret").code == 0
    monkeypatch.setenv("TTP_TOKEN", "secret")
    assert ttp("status", "--port", controller.port).code == 0
    monkeypatch.delenv("TTP_TOKEN")
    run_dir = Config(port=controller.port).resolved_run_dir()
    write_token(prepare_run_dir(run_dir), "secret")
    assert ttp("status", "--port", controller.port).code == 0


def test_the_only_job_of_this_host_is_meant(ttp: Ttp, start: Start) -> None:
    nothing = ttp("status")
    assert nothing.code == 64
    assert "TTP_PORT" in nothing.err
    one, two = start(), start()
    over = free_port()
    for port in (one.port, over):
        prepare_run_dir(Config(port=port).resolved_run_dir())
    assert ttp("status", "--json").json["controller"]["port"] == one.port
    prepare_run_dir(Config(port=two.port).resolved_run_dir())
    several = ttp("status")
    assert several.code == 64
    assert str(one.port) in several.err
    assert str(two.port) in several.err
    assert str(over) not in several.err


def test_port_and_address_come_from_the_environment(ttp: Ttp, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = start()
    monkeypatch.setenv("TTP_PORT", str(controller.port))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert ttp("status", "--json").json["controller"]["address"] == "localhost"
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    unknown = ttp("status")
    assert unknown.code == 1 and "; the name no-such-host.invalid has no address on this host (" in unknown.err
    assert ttp("status", "--address", "127.0.0.1").code == 0


class Refusal(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        self._said = code, details

    def code(self) -> grpc.StatusCode:
        return self._said[0]

    def details(self) -> str:
        return self._said[1]


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, UnreachableError, "did not answer within 5 s"),
        (grpc.StatusCode.UNIMPLEMENTED, ConfigError, "not a ttp controller, or an older one"),
        (grpc.StatusCode.CANCELLED, UnreachableError, "ended before it answered"),
        (grpc.StatusCode.INVALID_ARGUMENT, ConfigError, "the details"),
        (grpc.StatusCode.UNAVAILABLE, UnreachableError, "is the job running"),
    ],
)
def test_what_grpc_says_is_translated(code: grpc.StatusCode, kind: type[Exception], text: str) -> None:
    problem = connection._explain(Refusal(code, "the details"), Where("here", 1, ""), 5)
    assert type(problem) is kind
    assert text in str(problem)


def test_an_ipv6_address_is_shown_in_brackets() -> None:
    assert str(Where("fd00::1", 23456, "")) == "[fd00::1]:23456"
