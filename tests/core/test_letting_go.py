"""When a rank may abort the communicators of its device."""

from __future__ import annotations

import pytest

from ttp.core.layout import Version
from ttp.core.messages import Phase
from ttp.core.rank.letting_go import why_never, why_not_yet


@pytest.mark.parametrize(
    ("closed", "phase", "finished", "begun", "why"),
    [
        (True, Phase.IDLE, 5, 5, ""),
        (True, Phase.DONE, 5, 5, ""),
        (True, Phase.IDLE, 5, 0, ""),  # none has begun since it was restored
        (True, Phase.TORN, 5, 6, ""),
        (False, Phase.IDLE, 5, 5, "its gate is open"),
        (False, Phase.TORN, 5, 6, "its gate is open"),
        (True, Phase.UPDATING, 5, 5, "it is making an update"),
        (True, Phase.IDLE, 5, 6, "its device has begun update 6"),
        (True, Phase.DONE, 5, 6, "its device has begun update 6"),
    ],
)
def test_nothing_that_writes_to_the_state_is_behind_it(
    closed: bool, phase: Phase, finished: int, begun: int, why: str
) -> None:
    assert why_not_yet(closed, phase, Version(finished), Version(begun)).startswith(why)
    assert bool(why_not_yet(closed, phase, Version(finished), Version(begun))) == bool(why)


@pytest.mark.parametrize(
    ("version", "base", "may"), [(0, 0, False), (1, 0, False), (2, 0, True), (8, 7, False), (9, 7, True)]
)
def test_never_in_the_first_steps(version: int, base: int, may: bool) -> None:
    assert (why_never(Version(version), Version(base)) == "") is may
