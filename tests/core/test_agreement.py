"""Which checkpoint all ranks restore, and the error if they see different ones."""

from __future__ import annotations

import pytest

from ttp.core.layout import Rank, Version
from ttp.core.restore_choice import UPGRADE, agree, fallback_note, is_fallback_note, is_unread
from ttp.core.restore_messages import Candidate, Reading, RestoreView


def candidate(version: int, digest: str = "d") -> Candidate:
    return Candidate(Version(version), f"xxh3_128:{digest * 32}", f"tft_saved_checkpoints-step_{version}")


def view(rank: int, *found: Candidate, skipped: tuple[str, ...] = ()) -> RestoreView:
    return RestoreView(Rank(rank), found, skipped)


def test_the_newest_that_all_have() -> None:
    assert agree([view(0, candidate(12), candidate(8)), view(1, candidate(8), candidate(4))]) == candidate(8)


def test_nothing_anywhere_is_a_start_from_nothing() -> None:
    assert agree([view(0, skipped=("a draft",)), view(1)]) == Candidate(Version(0), "", "")


@pytest.mark.parametrize(("version", "refused"), [(8, False), (9, False), (10, True)])
def test_one_that_needs_a_newer_ttp_is_an_obstacle_if_it_is_the_newest(version: int, refused: bool) -> None:
    skipped = (f"{candidate(version).name}: has format 2{UPGRADE}",)
    agreed = agree([view(0, candidate(9)), view(1, candidate(9), skipped=skipped)])
    assert agreed == candidate(9) or (refused and skipped[0] in str(agreed))
    assert isinstance(agreed, str) == refused


def test_of_two_at_one_version_all_take_the_same() -> None:
    one, other = candidate(12, "a"), candidate(12, "b")
    assert agree([view(0, one, other), view(1, other, one)]) == other
    assert agree([view(0, one, other), view(1, one)]) == one


def test_nothing_in_common_says_who_saw_what() -> None:
    verdict = agree([view(1, skipped=("step_4: a piece is missing",)), view(0, candidate(12))])
    assert isinstance(verdict, str)
    assert (
        "rank 1 found nothing whole (skipped: step_4: a piece is missing); rank 0 found step 12 (dddddddd)" in verdict
    )
    assert verdict.endswith("Is save_dir shared by all hosts?")


def test_damage_that_one_of_many_ranks_found_is_said_first() -> None:
    """Each rank reads a share of the files; the other ranks found their shares whole."""
    bad = candidate(12)
    verdict = agree([*(view(rank, bad) for rank in range(40)), view(40, skipped=(f"{bad.name}: piece x is damaged",))])
    assert isinstance(verdict, str)
    assert f"one common checkpoint: rank 40 found nothing whole (skipped: {bad.name}: piece x is damaged)" in verdict
    assert verdict.endswith(
        f"Repair {bad.name}, which some ranks found damaged, or move it away: the ranks have no other checkpoint in "
        "common"
    )


def test_what_lacks_files_on_one_host_may_be_whole_on_another() -> None:
    """Each host has a disk of its own, and a copy was not finished. The checkpoint is not damaged."""
    lacking = view(1, candidate(8), skipped=(f"{candidate(12).name}: piece __1_0.distcp is missing",))
    verdict = agree([view(0, candidate(12)), lacking])
    assert isinstance(verdict, str) and verdict.endswith("in common. Is save_dir shared by all hosts?")


def test_the_fallback_is_named_when_that_is_what_not_all_see() -> None:
    note = fallback_note("/mnt/ck", [candidate(12), candidate(8)])
    verdict = agree([view(0, candidate(12), candidate(8), skipped=(note,)), view(1)])
    assert isinstance(verdict, str)
    found = "rank 0 found step 12 (dddddddd), step 8 (dddddddd), in the fallback directory /mnt/ck: step 12, 8; rank 1"
    assert found in verdict
    assert "Not all ranks see the fallback directory (TTP_FALLBACK_DIR): copy the checkpoint" in verdict
    assert "skipped" not in verdict


def test_notes_and_reasons_are_told_apart() -> None:
    assert is_fallback_note(fallback_note("/x", [candidate(1)]))
    assert not is_fallback_note("tft_saved_checkpoints-step_4: in the fallback directory")


@pytest.mark.parametrize(
    ("readings", "unread"),
    [
        ([Reading("a", 0, 2), Reading("a", 1, 2)], False),
        ([Reading("a", 0, 2), Reading("a", 1, 2), Reading("b", 0, 1)], False),
        ([Reading("a", 0, 2), Reading("a", 1, 2), Reading("a", 0, 3)], False),
        ([Reading("a", 0, 1), Reading("a", 1, 2)], False),
        ([Reading("", 0, 1)], False),
        ([], False),
        ([Reading("a", 0, 2), Reading("a", 0, 2)], True),
        ([Reading("a", 0, 2), Reading("b", 1, 2)], True),
        ([Reading("a", 0, 2), Reading("b", 0, 1)], True),
        ([Reading("a", 0, 2), Reading("a", 1, 3), Reading("a", 2, 3)], True),
        ([Reading("", 0, 2), Reading("", 1, 2)], True),
        ([Reading("a", 2, 2), Reading("a", 0, 2)], True),
        ([Reading("a", 0, 0)], True),
    ],
)
def test_what_nobody_has_read_is_noticed(readings: list[Reading], unread: bool) -> None:
    views = [RestoreView(Rank(n), (candidate(12),), (), (reading,)) for n, reading in enumerate(readings)]
    assert is_unread(candidate(12), [*views, view(len(views), candidate(12))]) is unread
