"""The tests of the core can fail: each mutant of the core is caught by one of the suites."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.mutants import MUTANTS, ROOT, SUITES, caught


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name: str) -> None:
    assert any(caught(name, suite) for suite in SUITES)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_place_to_break_is_there(name: str) -> None:
    module, old, new = MUTANTS[name]
    source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
    assert source.count(old) == 1
    assert old != new
