"""Every row of docs/mindx.md names tests that exist, or says that there is nothing to show."""

from __future__ import annotations

import ast
import re

from tests.test_support import _tests
from tests.test_tidy import OWN, ROOT

NOTHING = ("not done", "theirs")
PAGE = ROOT / "docs" / "mindx.md"


def rows() -> list[list[str]]:
    """Return the cells of all tables, without their heads."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    heads = {number for number, line in enumerate(lines) if line.startswith("|---")}
    heads |= {number - 1 for number in heads}
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for n, line in enumerate(lines) if n not in heads
    ]


def exists(name: str) -> bool:
    path, _, test = name.partition("::")
    file = ROOT / "tests" / path
    return file.is_file() and test in {known for known, _ in _tests(ast.parse(file.read_text()))}


def test_every_row_names_tests_that_exist() -> None:
    listed = rows()
    assert len(listed) > 35
    assert [row[0] for row in listed if "::" not in row[-1] and row[-1] not in NOTHING] == []
    assert [test for row in listed for test in re.findall(r"`([^`]+::[^`]+)`", row[-1]) if not exists(test)] == []


def test_what_is_not_read_is_nowhere_in_the_code() -> None:
    (names,) = [row[0] for row in rows() if row[1] == "not read"]
    code = "".join(path.read_text() for path in OWN.values())
    assert len(found := re.findall(r"`(\w+)`", names)) == 3 and [name for name in found if name in code] == []
