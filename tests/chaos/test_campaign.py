"""The scripts and faults that a seed draws."""

from __future__ import annotations

from collections import Counter

import pytest

from ttp.chaos.campaign import KINDS, RUNS_PER_JOB, draw
from ttp.chaos.reading import parse
from ttp.chaos.script import Script, to_toml
from ttp.chaos.vocabulary import FEATURES

OFFERS = ("hosts", "mount")


def titles(scripts: list[Script]) -> Counter[str]:
    return Counter(run.title for script in scripts for run in script.runs)


def test_the_same_seed_draws_the_same_and_another_one_does_not() -> None:
    assert draw(7, 60, FEATURES, OFFERS) == draw(7, 60, FEATURES, OFFERS)
    assert draw(7, 60, FEATURES, OFFERS) != draw(8, 60, FEATURES, OFFERS)


@pytest.mark.parametrize("runs", [1, 5, 60, 200])
def test_as_many_runs_as_asked_for_in_jobs_of_bounded_length(runs: int) -> None:
    scripts = draw(1, runs, (), OFFERS)
    assert titles(scripts).total() == runs
    assert all(1 <= len(script.runs) <= RUNS_PER_JOB + 1 for script in scripts)


def test_every_kind_is_drawn_where_there_are_runs_enough() -> None:
    assert set(titles(draw(3, len(KINDS), FEATURES, OFFERS))) == {kind.title for kind in KINDS}


def test_what_is_drawn_is_a_script_that_can_be_written_down_and_read() -> None:
    for seed in range(2):
        for script in draw(seed, 2 * len(KINDS), FEATURES, OFFERS):
            assert parse(to_toml(script)) == script


def test_features_are_drawn_when_asked_for() -> None:
    asked_for = {kind.title for kind in KINDS if kind.features}
    assert asked_for and not asked_for & set(titles(draw(1, 500, (), OFFERS)))
    for feature in FEATURES:
        wanted = {kind.title for kind in KINDS if kind.features == {feature}}
        drawn = set(titles(draw(1, 500, [feature], OFFERS)))
        assert wanted <= drawn
        assert not (asked_for - wanted) & drawn


def test_nothing_is_drawn_that_the_machine_does_not_offer() -> None:
    assert all(not script.needs for script in draw(1, 300))
    assert any("hosts" in script.needs for script in draw(1, 300, (), ["hosts"]))


def test_what_costs_rank_local_state_comes_last() -> None:
    costly = {kind.title for kind in KINDS if kind.diverges}
    scripts = draw(2, 300, (), OFFERS)
    assert costly & set(titles(scripts))
    for script in scripts:
        assert not costly & {run.title for run in script.runs[:-1]}


def test_a_common_kind_meets_every_phase() -> None:
    met = {
        run.faults[0].phase for script in draw(4, 200, (), OFFERS) for run in script.runs if run.title == "kill a rank"
    }
    kind = next(kind for kind in KINDS if kind.title == "kill a rank")
    assert met == set(kind.phases)


def test_only_what_matches() -> None:
    drawn = set(titles(draw(5, 50, (), OFFERS, "the controller")))
    assert len(drawn) > 3 and all("the controller" in title for title in drawn)
    assert draw(5, 50, (), OFFERS, "no such thing") == []
