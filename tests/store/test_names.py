"""The names of checkpoints and drafts, and names that are neither."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttp.core.layout import Rank, Version
from ttp.store import names

VERSIONS = st.integers(0, 10**18 - 1).map(Version)
INCIDENTS = st.text(min_size=1, max_size=40).filter(lambda text: text.isprintable())


@given(VERSIONS)
def test_a_checkpoints_name_tells_its_version(version: Version) -> None:
    name = names.checkpoint_name(version)
    assert names.parse_checkpoint_name(name) == version
    assert not names.is_draft(name)


@given(VERSIONS, INCIDENTS)
def test_a_draft_is_never_taken_for_a_checkpoint(version: Version, incident: str) -> None:
    draft = names.draft_name(version, incident)
    for name in (draft, names.claim_name(draft, 3, Rank(7)), names.removed_name(version, 0)):
        assert names.is_draft(name)
        assert names.parse_checkpoint_name(name) is None
        assert names.parse_superseded_name(name) is None
        assert "/" not in name
    assert names.parse_draft_name(draft) == (version, incident)
    assert names.parse_draft_name(names.claim_name(draft, 3, Rank(7))) == (version, incident)


def test_the_names_people_and_other_programs_rely_on() -> None:
    assert names.checkpoint_name(Version(12)) == "tft_saved_checkpoints-step_12"
    assert names.draft_name(Version(12), "20260101-1-ab") == ".draft-step_12-20260101-1-ab"
    assert names.superseded_name(Version(12), 0) == ".superseded-step_12-0"


@pytest.mark.parametrize(
    "name",
    [
        "tft_saved_checkpoints-step_",
        "tft_saved_checkpoints-step_012",
        "tft_saved_checkpoints-step_-1",
        "tft_saved_checkpoints-step_1.tmp",
        "tft_saved_checkpoints-step_1\n",
        "tft_saved_checkpoints-step_٣",
        " tft_saved_checkpoints-step_1",
        "tft_saved_checkpoints-step_" + "9" * 19,
        "step_1",
        "",
    ],
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert names.parse_checkpoint_name(name) is None


@pytest.mark.parametrize(
    "name", [".draft-step_x-1", ".draft-step_1", ".draft-step_1-", ".draft", "draft-step_1-a", ".superseded-step_1-0"]
)
def test_other_names_are_no_drafts(name: str) -> None:
    assert not names.is_draft(name)


def test_names_of_two_incidents_differ() -> None:
    pairs = [("a", "a@g1-r1"), ("a/b", "a%2Fb"), ("..", "."), ("a b", "a+b")]
    for one, other in pairs:
        assert names.draft_name(Version(1), one) != names.draft_name(Version(1), other)
