"""The ring of a job's controllers, as launchers and commands find it: the file, and who of those that answer leads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttp.launch import ring
from ttp.launch.ring import FILE, Ring, places, read_ring, reigning, rescue_goes_on, write_ring

KNOWN = Ring("job", 2, 3, "home:1", "led:1", ("led:1", "b:1"))


@pytest.mark.parametrize(
    ("change", "written"),
    [
        ({"standbys": ("c:1",)}, True),
        ({"term": 4}, True),
        ({"term": 2}, False),
        ({"term": 1, "incarnation": 3}, True),
        ({"term": 1, "run_id": "next"}, True),
    ],
)
def test_a_controller_that_was_replaced_does_not_get_its_place_back(
    change: dict[str, Any], written: bool, tmp_path: Path
) -> None:
    write_ring(tmp_path, KNOWN)
    write_ring(tmp_path, newer := replace(KNOWN, **change))
    assert read_ring(tmp_path) == (newer if written else KNOWN)


def test_who_led_last_is_asked_first(tmp_path: Path) -> None:
    assert places(tmp_path, "home:1") == ("home:1",)
    write_ring(tmp_path, KNOWN)
    assert places(tmp_path, "home:1") == ("led:1", "home:1", "b:1")


@pytest.mark.parametrize("text", ['{"run_id": 1, "incarnation": Infinity}', "[]", "{", '{"run_id": 1}', "[" * 10**5])
def test_a_file_that_is_no_ring_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    assert read_ring(tmp_path) is None


def answer(**facts: Any) -> Any:
    return SimpleNamespace(**{"attached": False, "world_size": 2, "incarnation": 1, "term": 1} | facts)


@pytest.mark.parametrize(
    ("leads", "other"),
    [
        (answer(attached=True), answer(incarnation=9, term=9)),
        (answer(), answer(world_size=0, incarnation=9, term=9)),
        (answer(incarnation=2), answer(term=9)),
        (answer(term=2), answer()),
    ],
    ids=["has ranks", "has a job", "incarnation", "term"],
)
def test_which_of_two_controllers_leads(leads: Any, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for answers in ([leads, other], [other, leads]):
        monkeypatch.setattr(ring, "ask_everybody", lambda *_, said=answers: iter(zip("ab", said, strict=True)))
        assert (found := reigning((), "")) is not None and found[1] is leads


def test_only_the_answer_of_one_that_leads_shortens_the_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    left_s: list[float] = []

    def asked(_around: Any, _ask: Any, ends: Any) -> Iterator[tuple[str, Any]]:
        for size in (0, 2):
            yield "a:1", answer(world_size=size)
            left_s.append(ends())

    monkeypatch.setattr(ring, "ask_everybody", asked)
    reigning((), "", timeout_s=1000.0)
    assert left_s[0] - left_s[1] > 900


@pytest.mark.parametrize(
    ("stage", "goes_on"), [("", False), ("freezing", True), ("saved", True), ("released", False), ("closed", False)]
)
def test_a_rescue_goes_on_until_its_end_is_known(stage: str, goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    status = SimpleNamespace(last_incident=SimpleNamespace(stage=stage))
    monkeypatch.setattr(ring, "reigning", lambda *_: ("a:1", status))
    assert rescue_goes_on((), "") is goes_on
