"""One exit code for a job, and launches that bring no new version."""

from __future__ import annotations

import pytest

from ttp.core.controller.job_verdict import FRUITLESS_MAX, JobVerdict
from ttp.core.layout import Version


def launched(fruitless: int = 0) -> JobVerdict:
    verdict = JobVerdict()
    verdict.launch_begins(same_job=True)
    verdict.remember(fruitless, progress=False)
    return verdict


def test_nothing_is_known_before_the_end() -> None:
    assert launched().now.code is None


@pytest.mark.parametrize(("claims", "code"), [([75, 70], 70), ([75, 1], 75), ([0, 75], 75), ([1, 0], None)])
def test_without_an_end_of_its_own_the_worst_claim_counts(claims: list[int], code: int | None) -> None:
    verdict = launched()
    for host, claim in enumerate(claims):
        verdict.asks(str(host), claim)
    assert verdict.now.code == code


@pytest.mark.parametrize("claim", [0, 1, 70, 75])
def test_what_the_ranks_were_told_counts_more_than_what_one_host_saw(claim: int) -> None:
    """A fenced rank exits with 70 although the others were saved."""
    verdict = launched()
    assert verdict.released(75, "saved", "rank 1 died").code == 75
    verdict.asks("one", claim)
    assert verdict.now.code == 75


@pytest.mark.parametrize("order", ["before", "after", "claimed"])
def test_what_is_wrong_comes_first(order: str) -> None:
    verdict = launched()
    if order == "before":
        verdict.is_wrong("rank 3 exited with code 64")
    told = verdict.released(75, "saved", "rank 3 exited with code 64")
    assert (told.code, "rank 3" in told.text, "saved" in told.text) == (
        (64, True, True) if order == "before" else (75, False, True)
    )
    if order == "after":
        verdict.is_wrong("rank 3 exited with code 64")
    if order == "claimed":
        verdict.asks("one", 64)
    assert (verdict.now.code, verdict.now.final) == (64, True)
    told_where = "the launcher on one: see its log" in verdict.now.text
    assert told_where == (order == "claimed"), "only the ranks know the reason"
    verdict.starts()
    assert verdict.now.code is None, "that was the last launch"


def test_the_start_of_ranks_forgets_also_what_was_wrong_without_an_end() -> None:
    verdict = launched()
    verdict.is_wrong("rank 3 exited with code 64")
    verdict.starts()
    assert verdict.now.code is None


def test_the_history_that_is_read_late_takes_nothing_back() -> None:
    verdict = launched(2)
    verdict.drained = frozenset({"a"})
    verdict.remember(1, progress=False, drained=frozenset({"b"}))
    assert (verdict.fruitless, verdict.drained) == (2, frozenset({"a", "b"}))


def test_the_third_launch_in_a_row_without_a_new_version_is_the_last() -> None:
    verdict = JobVerdict()
    codes = []
    for _ in range(FRUITLESS_MAX):
        verdict.starts()
        verdict.launch_begins(same_job=True)
        codes.append(verdict.released(75, "version 4 is on disk already", "rank 0 raised").code)
    assert codes == [75, 75, 70]
    assert verdict.now.final and "no progress" in verdict.now.text and "rank 0 raised" in verdict.now.text


def test_a_new_version_begins_the_count_again() -> None:
    verdict = launched(fruitless=2)
    verdict.progress = True
    assert verdict.released(75, "saved", "").code == 75
    verdict.launch_begins(same_job=True)
    assert verdict.fruitless == 0


def test_a_launch_that_sigterm_ends_does_not_count() -> None:
    verdict = launched(fruitless=FRUITLESS_MAX - 1)
    for _ in range(FRUITLESS_MAX):
        told = verdict.released(75, "saved", "rank 0 was asked to end", preempted=True)
        assert (told.code, told.final) == (75, False)
        verdict.launch_begins(same_job=True)
        assert verdict.fruitless == FRUITLESS_MAX - 1
    assert verdict.released(75, "", "").code == 70


def test_launches_before_this_controller_count_as_its_own() -> None:
    assert launched(fruitless=1).released(75, "", "").code == 75
    assert launched(fruitless=2).released(75, "", "").code == 70


def test_another_job_begins_with_nothing() -> None:
    verdict = launched(fruitless=2)
    verdict.launch_begins(same_job=False)
    assert verdict.released(75, "", "").code == 75


def test_a_drained_host_is_one_until_the_next_launch() -> None:
    verdict = launched(fruitless=0)
    verdict.drained |= {"n17"}
    verdict.released(75, "saved", "")
    verdict.starts()  # the launcher of another host was faster
    assert verdict.drained == {"n17"}
    verdict.launch_begins(same_job=True)
    assert not verdict.drained


def test_a_job_that_has_trained_to_its_end_got_on() -> None:
    verdict = launched(fruitless=2)
    verdict.finished(Version(9), Version(0))
    verdict.remember(2, progress=False)  # a slow disk
    assert verdict.now.code == 0
    verdict.launch_begins(same_job=True)
    assert verdict.fruitless == 0
