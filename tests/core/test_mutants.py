"""The tests of the core can fail: each mutant of the core is caught by one of the suites."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.mutants import MUTANTS, ROOT, _source, apply


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_mutant_is_caught() -> None:
    command = [sys.executable, "-m", "tests.core.mutants", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_place_to_break_is_there(name: str) -> None:
    module, old, new = MUTANTS[name]
    source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
    assert source.count(old) == 1
    assert old != new


def test_a_mutant_that_would_take_effect_in_part_only_is_refused() -> None:
    """The modules are imported already: a constant that is another one in the text stays as it is."""
    module = "ttp.core.controller.retries"
    mutant = _source(module).replace("REFUSALS_MAX = 16", "REFUSALS_MAX = 15").replace("retries += 1", "retries += 2")
    with pytest.raises(AssertionError, match="outside of functions"):
        apply(module, mutant)
