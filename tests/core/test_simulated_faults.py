"""Single faults of a simulated job, each test readable as a story."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest

from ttp.core.layout import Layout, Rank
from ttp.testing.scenario import POINTS, Fault, Scenario, grid
from ttp.testing.simulation import Simulation

EVER = float("inf")
HOSTS = ("h0", "h0", "h1", "h1")
Codes: TypeAlias = Sequence[Sequence[int | None]]
WELL = "nothing is broken after all"


def run(
    layout: Layout, *faults: Fault, steps: int = 4, hosts: tuple[str, ...] = (), seed: int = 1, **more: Any
) -> tuple[Codes, str]:
    """Return the exit codes of every incarnation, and the trace."""
    hosts = hosts or ("h",) * layout.world_size
    scenario = Scenario(seed, layout, hosts, steps, delay_s=0.0005, repeats=0.0, faults=(faults,), **more)
    result = Simulation(scenario, keep_trace=True).run()
    return result.exits, result.trace


def kill(rank: int, point: str, times: int = 1) -> Fault:
    return Fault("kill", times, Rank(rank), point)


ALL = [0, 0, 0]
STORIES: dict[str, tuple[Layout, list[Fault], dict[str, Any], Codes, int, str]] = {
    "nothing": (grid(1, 3), [], {}, [ALL], 0, ""),
    "SIGTERM to all": (grid(1, 3), [Fault("sigterm", 0.11, Rank(0))], {}, [[75, 75, 75], ALL], 1, ""),
    "a short flap": (grid(1, 3), [Fault("flap", 0.11, Rank(1), lasts_s=0.05)], {}, [ALL], -1, WELL),
    "a long flap": (grid(1, 3), [Fault("flap", 0.11, Rank(1), lasts_s=2.0)], {}, [[75, 70, 75], ALL], 1, "fenced"),
    "the controller and a rank": (
        grid(1, 3), [Fault("controller", 0.12, Rank(0)), Fault("kill", 0.1201, Rank(2))], {"steps": 5, "seed": 4},
        [[75, 75, None], ALL], 1, "did not come back to the new controller",
    ),
    "the only copy of a shard": (
        grid(2, 1), [kill(1, "in forward", times=2)], {}, [[70, None], [0, 0]], 0, "shard 's1' has no whole copy left",
    ),
    "the host of the controller": (
        grid(2, 2), [Fault("host", 0.12, Rank(0))], {"hosts": HOSTS}, [[None, None, 75, 75], [0] * 4], 1,
        "controller 2 starts on h1",
    ),
    "a host that is cut off for a moment": (
        grid(2, 2), [Fault("partition", 0.12, Rank(3), lasts_s=0.1)], {"hosts": HOSTS}, [[0] * 4], -1, WELL,
    ),
    **{
        f"{kind} for a moment": (grid(1, 3), [Fault(kind, 0.11, Rank(1), lasts_s=0.2)], {}, [ALL], 0, "")
        for kind in ("stop", "silent", "hang")
    },
    "stopped for long": (
        grid(1, 3), [Fault("stop", 0.11, Rank(1), lasts_s=4.0)], {}, [[75, 70, 75], ALL], 1,
        "refused this rank (fenced)",
    ),
    "stopped for ever, until the launcher kills it": (
        grid(1, 3), [Fault("stop", 0.11, Rank(1), lasts_s=EVER)], {}, [[75, None, 75], ALL], 1, "",
    ),
}  # fmt: skip
"""Layout, faults, what else ``run`` takes, exit codes, number of commits (-1: none is needed), and a text of the trace
(empty: no incident, if nothing is committed either).
"""


@pytest.mark.parametrize(("layout", "faults", "more", "codes", "commits", "text"), STORIES.values(), ids=STORIES)
def test_a_single_fault(
    layout: Layout, faults: list[Fault], more: dict[str, Any], codes: Codes, commits: int, text: str
) -> None:
    exits, trace = run(layout, *faults, **more)
    assert exits == codes and text in trace
    assert commits < 0 or trace.count("] committed") == commits
    assert commits or text or "opened" not in trace


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("point", [p for p in POINTS[1:11] if p not in ("parked", "in barrier")])
def test_a_rank_killed_at_any_point_of_a_step_costs_nothing(rank: int, point: str) -> None:
    exits, trace = run(grid(1, 3), kill(rank, point, times=4 if point == "in update" else 2))
    assert [code for code in exits[0] if code is not None] == [75, 75]
    assert exits[1] == [0, 0, 0]
    assert trace.count("] committed") == 1


@pytest.mark.parametrize("point", [p for p in POINTS[1:11] if p != "parked"])
def test_with_a_barrier_two_shards_lose_nothing_either(point: str) -> None:
    for seed in range(4):
        exits, trace = run(grid(2, 2), kill(seed, point, times=4 if point == "in update" else 2), seed=seed)
        assert [code for code in exits[0] if code is not None] == [75, 75, 75]
        assert exits[1] == [0, 0, 0, 0]
        assert trace.count("] committed") == 1


@pytest.mark.parametrize(
    ("point", "said"),
    [("after Frozen", "the training thread does not wait at the gate"), ("admitted", "is admitted: leave")],
)
def test_who_has_left_the_gate_makes_no_ordered_update(point: str, said: str) -> None:
    """It saves the version that it holds, unless the finished one is on all ranks of another shard."""
    outcomes = Counter[str]()
    for seed, leaver in itertools.product(range(12), range(4)):
        leave = Fault("leave", 1, Rank(leaver), point)
        exits, trace = run(grid(2, 2), kill(seed % 4, "before update", times=2), leave, seed=seed)
        assert exits[-1] == [0, 0, 0, 0]
        if said in trace:
            outcomes["saved" if 75 in exits[0] else "lost"] += 1
    assert outcomes["saved"] > outcomes["lost"] > 0


@pytest.mark.parametrize("point", ["before save", "in save", "after save", "before Saved", "after Saved", "in commit"])
def test_another_one_saves_when_the_saver_dies(point: str) -> None:
    first = kill(2, "in forward", times=3)
    _, trace = run(grid(1, 3), first)
    saver = int(trace.split("'savers': {'s0': ")[1][0])
    exits, trace = run(grid(1, 3), first, kill(saver, point))
    assert exits[0][saver] is None
    assert sorted(map(str, exits[0])) == ["75", "None", "None"]
    assert trace.count("] committed") == 1


def test_a_checkpoint_on_request_and_the_training_goes_on() -> None:
    exits, trace = run(grid(2, 2), Fault("save", 0.1, Rank(0)))
    assert exits == [[0, 0, 0, 0]]
    assert "the checkpoint is written" in trace or "could not be written" in trace


# ------------------------------------------------------------------------------------------------- hosts, networks


def test_a_host_dies_with_its_pages() -> None:
    exits, trace = run(grid(2, 2), Fault("host", 0.12, Rank(2)), hosts=HOSTS)
    assert exits == [[75, 75, None, None], [0, 0, 0, 0]]
    assert "'pages_0_0'" in trace or "'pages_1_0'" in trace
    assert "'pages_2_0'" not in trace and "'pages_3_0'" not in trace


def test_the_pages_of_a_lost_host_are_kept_on_another_one() -> None:
    scenario = Scenario(1, grid(2, 2), HOSTS, 4, 0.0005, 0.0, ((Fault("host", 0.12, Rank(2)),),), mirror=True)
    simulation = Simulation(scenario)
    assert simulation.run().exits[0] == [75, 75, None, None]
    assert not simulation.judge.approximate  # else the end would not have been compared
    simulation = Simulation(Scenario(1, grid(2, 2), HOSTS, 4, 0.0005, 0.0, ((Fault("host", 0.12, Rank(2)),),)))
    simulation.run()
    assert simulation.judge.approximate


def test_two_controllers_never_make_a_mixed_checkpoint() -> None:
    seen: set[tuple[int | None, ...]] = set()
    for seed in range(12):
        hosts = ("h0", "h1", "h2", "h3")
        exits, trace = run(grid(2, 2), Fault("split", 0.12, Rank(0), lasts_s=5.0), hosts=hosts, seed=seed)
        seen.add(tuple(exits[0]))
        assert "controller 2 starts" in trace
        assert set(exits[-1]) == {0}
    assert len(seen) > 1


def test_a_controller_that_is_killed_twice_in_one_incident() -> None:
    killed = 0
    for seed in range(8):
        faults = kill(2, "in forward", times=3), Fault("controller_twice", 1, Rank(0), "before Frozen")
        exits, trace = run(grid(1, 3), *faults, seed=seed)
        killed += trace.count("controller 1 is killed") + trace.count("controller 2 is killed")
        assert sorted(map(str, exits[0])) == ["75", "75", "None"]
        assert exits[-1] == [0, 0, 0]
    assert killed > 8


# ------------------------------------------------------------------------------------------- standing still, disks


@pytest.mark.parametrize("kind", ["stop", "silent", "hang"])
def test_a_hang_is_seen_where_it_is_looked_for(kind: str) -> None:
    exits, trace = run(grid(1, 3), Fault(kind, 0.6, Rank(1), lasts_s=EVER), steps=30, watched=True)
    assert [code for r, code in enumerate(exits[0]) if r != 1] == [75, 75]
    assert exits[1] == [0, 0, 0]
    assert "'evidence': 'hung'" in trace
    assert "'evidence': 'outside'" not in trace


def test_a_slow_disk_is_waited_for_and_a_hanging_one_is_not() -> None:
    first = kill(2, "in forward", times=3)
    exits, trace = run(
        grid(1, 3), first, Fault("slow", 0.0, Rank(0), lasts_s=1.0), Fault("slow", 0.0, Rank(1), lasts_s=1.0)
    )
    assert exits[0] == [75, 75, None]
    assert "save_failed" not in trace
    exits, trace = run(grid(1, 3), first, Fault("slow", 0.0, Rank(0), lasts_s=EVER))
    assert exits[0] == [75, 75, None]
    assert trace.count("] committed") == 1


def test_a_disk_that_refuses_everybody_and_a_second_one() -> None:
    faults = kill(2, "in forward", times=3), *(Fault("write", 0.0, Rank(r), lasts_s=EVER) for r in range(3))
    exits, trace = run(grid(1, 3), *faults)
    assert exits[0] == [70, 70, None]
    assert "TTP_OT" in trace and "no space left" in trace.split("] released")[1], "what refused is said at the end too"
    exits, trace = run(grid(1, 3), *faults, fallback=True)
    assert exits[0] == [75, 75, None]
    assert "] fallback" in trace


@pytest.mark.parametrize("what", ["write", "commit", "sync"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_disk_that_refuses_everybody_for_a_moment(what: str, ranks: int) -> None:
    dies = Fault("raise", 3, Rank(0), "forward") if ranks == 1 else kill(2, "in forward", times=3)
    exits, trace = run(grid(1, ranks), dies, *(Fault(what, 0.0, Rank(r), lasts_s=1.0) for r in range(ranks)))
    assert exits[0] == ([75] if ranks == 1 else [75, 75, None])
    assert "] retry" in trace and trace.count("] committed") == 1


# ----------------------------------------------------------------------------------------------------------- redo, undo


def mixed_versions(*, undo: bool) -> list[str]:
    """Return traces of jobs of two shards in which rank 0 dies as it begins its third update."""
    return [run(grid(2, 2), kill(0, "update begun", times=3), seed=seed, undo=undo)[1] for seed in range(30)]


def test_updates_that_some_have_made_are_made_by_others_too() -> None:
    traces = mixed_versions(undo=False)
    assert any("'redo'" in trace and "] committed" in trace for trace in traces)
    assert not any("'undo'" in trace for trace in traces)


def test_updates_that_others_cannot_make_are_unmade() -> None:
    traces = mixed_versions(undo=True)
    assert any("'undo'" in trace and "] committed" in trace for trace in traces)


@pytest.mark.parametrize("kind", ["kill", "host"])
def test_a_shard_without_replicas_comes_back_from_its_second_copy(kind: str) -> None:
    for seed in range(3):
        fault = Fault(kind, 6, Rank(1), "in forward")
        exits, trace = run(grid(2, 1), fault, steps=8, hosts=("h0", "h1"), seed=seed, buddy=True)
        assert exits == [[75, None], [0, 0]]
        assert "from kept copies of s0, s1: " in trace
        assert "] nothing_new" not in trace
    without, _ = run(grid(2, 1), fault, steps=8, hosts=("h0", "h1"), seed=seed)
    assert without[0] == [70, None]


@pytest.mark.parametrize("others", [(), (Fault("controller", 0.12, Rank(0)),), (kill(2, "before update", times=3),)])
def test_what_one_rank_alone_finds_wrong_ends_all_with_64(others: tuple[Fault, ...]) -> None:
    """Also if the controller or another rank dies at about that time. The finished version is saved."""
    for seed in range(4):
        exits, trace = run(grid(1, 3), Fault("raise", 3, Rank(1), "refused"), *others, seed=seed)
        assert {code for code in exits[0] if code is not None} == {64}, trace
        assert "] committed" in trace
        assert exits[1] == [0, 0, 0]


def test_no_controller_starts_on_a_host_without_power() -> None:
    """Where no standby could be started either, the launcher has to end the ranks that are left."""
    for seed in range(12):
        twice = Fault("controller_twice", 0.105, Rank(0)), Fault("power", 0.106, Rank(0))
        exits, trace = run(grid(1, 2), *twice, hosts=("h0", "h1"), seed=seed)
        assert exits[-1] == [0, 0]
        dark = trace.partition("loses power")[2].partition("starts incarnation 1")[0]
        assert "starts on h0" not in dark, f"seed {seed}"
