"""Every row of docs/mindx.md names tests that exist, or says that there is nothing to show."""

from __future__ import annotations

import re
from itertools import chain

from tests.test_support import exists, tables
from tests.test_tidy import OWN, ROOT

NOTHING = ("not done", "theirs")
ROWS = list(chain.from_iterable(tables(ROOT / "docs" / "mindx.md")))


def test_every_row_names_tests_that_exist() -> None:
    assert len(ROWS) > 35
    assert [row[0] for row in ROWS if "::" not in row[-1] and row[-1] not in NOTHING] == []
    assert [test for row in ROWS for test in re.findall(r"`([^`]+::[^`]+)`", row[-1]) if not exists(test)] == []


def test_what_is_not_read_is_nowhere_in_the_code() -> None:
    (names,) = [row[0] for row in ROWS if row[1] == "not read"]
    code = "".join(path.read_text() for path in OWN.values())
    assert len(found := re.findall(r"`(\w+)`", names)) == 3 and [name for name in found if name in code] == []
