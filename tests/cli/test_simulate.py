"""``ttp simulate``: the same seed is the same run, and a broken run is printed as the command that repeats it."""

from __future__ import annotations

import shlex

import pytest

from tests.cli.conftest import Ttp
from ttp.core.layout import Rank
from ttp.testing import campaign, simulation
from ttp.testing.campaign import parse_faults
from ttp.testing.scenario import KINDS, Fault

HOSTS = ("h0", "h0", "h1", "h1")


def test_the_same_seed_is_the_same_run(ttp: Ttp) -> None:
    once, again, other = (ttp("simulate", "--seed", seed, "--json").json for seed in (3, 3, 4))
    assert once["digest"] == again["digest"] != other["digest"]
    assert (once["runs"], once["broken"]) == (1, [])


def test_what_is_asked_for_is_played(ttp: Ttp) -> None:
    said = ttp(
        "simulate", "--ranks", 6, "--shards", 2, "--hosts", 3, "--steps", 4, "--faults", "kill:5@0.15", "--trace"
    )
    assert said.code == 0
    assert "rank 5#0     is killed" in said.out
    assert "incarnation 0: 5 saved (75), 1 killed\nincarnation 1: 6 trained to the end\n" in said.out
    assert "1 run, 0 broken; 2 incarnations, 1 checkpoint, " in said.out


def test_many_runs_on_several_processes(ttp: Ttp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "SEEDS_AT_ONCE", 4)
    runs = ("simulate", "--seed", 5, "--runs", 10, "--ranks", 2, "--faults", "none", "--json")
    alone, shared = ttp(*runs).json, ttp(*runs, "--jobs", 2).json
    assert alone["digest"] == shared["digest"]
    assert alone["exits"] == {"0": 20}


def test_a_broken_run_is_a_command(ttp: Ttp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "EVENTS_MAX", 20)
    monkeypatch.setattr(simulation, "EVENTS_PER_RANK_MAX", 0)
    said = ttp("simulate", "--seed", 5, "--runs", 2, "--faults", "kill=1,flap:0@0.1")
    assert said.code == 1
    command = "ttp simulate --seed 6 --faults kill=1,flap:0@0.1 --trace"
    assert f"        {command}\n" in said.out
    assert "I6: it never ends" in ttp(*shlex.split(command)[1:]).out
    json = ttp("simulate", "--seed", 5, "--runs", 2, "--json").json
    assert [b["seed"] for b in json["broken"]] == [5, 6]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", 5, "--shards", 2], "5 ranks cannot hold 2 shards with 2 replicas each"),
        (["--ranks", 2, "--hosts", 3], "3 hosts for 2 ranks"),
        (["--trace", "--runs", 2], "--trace prints one run"),
        (["--faults", "kil:3"], "did you mean kill?"),
        (["--faults", "bogus"], "known kinds: kill, host, power, stop"),
        (["--ranks", 4, "--faults", "kill:4"], "'4' is neither a rank from 0 to 3"),
        (["--faults", "kill:1@soon"], "'soon' is neither a number of seconds nor one of the points in_restore"),
        (["--faults", "raise:1@0.3"], "'0.3' is not one of the points forward, update"),
        (["--faults", "kill:0+2"], "kill has no duration; leave out +2"),
        (["--faults", "stop:0+never"], "write +ever"),
        (["--faults", "split:0"], "split takes no rank or host"),
        (["--faults", "write:0@0.2"], "write applies during the whole run"),
        (["--faults", "kill@@3"], "write KIND:RANK@SECONDS+SECONDS"),
        (["--seed", "-1"], "--seed"),
        (["--faults", "kill=99999"], "at most 1000 faults of a kind"),
        (["--ranks", 99999999], "at most 100000 ranks"),
        (["--shards", 99999, "--replicas", 99], "at most 100000 ranks"),
    ],
)
def test_bad_usage(ttp: Ttp, arguments: list[object], complaint: str) -> None:
    said = ttp("simulate", *arguments)
    assert said.code == 64
    assert complaint in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("kill:3@0.2", (Fault("kill", 0.2, Rank(3)),)),
        (
            "kill:0@in_update#2, controller@1",
            (Fault("kill", 2.0, Rank(0), "in update"), Fault("controller", 1.0, Rank(2))),
        ),
        ("stop:1@before_frozen+ever", (Fault("stop", 1.0, Rank(1), "before Frozen", float("inf")),)),
        ("flap:*@0+0.5", tuple(Fault("flap", 0.0, Rank(r), lasts_s=0.5) for r in range(4))),
        ("kill:50%@1", (Fault("kill", 1.0, Rank(0)), Fault("kill", 1.0, Rank(1)))),
        ("kill:h1@1", (Fault("kill", 1.0, Rank(2)), Fault("kill", 1.0, Rank(3)))),
        ("partition:h1@1+2", (Fault("partition", 1.0, Rank(2), lasts_s=2.0),)),
        ("raise:1@forward#3", (Fault("raise", 3.0, Rank(1), "forward"),)),
        ("slow:1+0.1", None),
        ("none", ()),
        ("", ()),
    ],
)
def test_faults_in_words(text: str, faults: tuple[Fault, ...] | None) -> None:
    parsed = parse_faults(text, 1, HOSTS)
    if faults is not None:
        assert parsed == faults
    assert parse_faults(text, 1, HOSTS) == parsed


def test_every_kind_can_be_drawn() -> None:
    for kind in KINDS:
        assert [f.kind for f in parse_faults(f"{kind}=2", 1, HOSTS)] == [kind, kind]
    assert parse_faults("kill=2", 1, HOSTS) != parse_faults("kill=2", 2, HOSTS)
