"""docs/support.md and the tests that it names agree: every row has tests with its name, and no other test has one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from tests.test_tidy import OWN, ROOT, nodes_of

pytestmark = pytest.mark.xdist_group("tidy")

PAGE = ROOT / "docs" / "support.md"
VERDICTS = re.compile(r"works|works, with this note: .+|refused.*: .+", re.DOTALL)


@dataclass(frozen=True)
class Row:
    feature: str
    verdict: str
    tests: tuple[str, ...]

    @property
    def messages(self) -> tuple[str, ...]:
        """Return the quoted messages; the quote has dots where the text varies."""
        return tuple(re.findall(r"\"([^\"]+)\"", self.verdict))


def rows() -> list[Row]:
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in _table()]
    assert all(len(row) == 3 for row in cells), [row for row in cells if len(row) != 3]
    return [Row(feature, verdict, tuple(re.findall(r"`([^`]+)`", tests))) for feature, verdict, tests in cells]


def _table() -> list[str]:
    lines = PAGE.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    found = []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        found.append(line)
    return found


# ---------------------------------------------------------------------------------------------------------- the tests


@cache
def marked() -> dict[str, set[str]]:
    """Return features by the test that is marked for them; a mark on a class counts for the class."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "supports(" not in text:
            continue
        for name, node in _tests(ast.parse(text)):
            features = {feature for decorator in node.decorator_list if (feature := _feature(decorator))}
            if features:
                found[f"{path.relative_to(ROOT)}::{name}"] = features
    return found


def _tests(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}::{each.name}", each) for each in node.body if isinstance(each, ast.FunctionDef))


def _feature(decorator: ast.expr) -> str | None:
    """Return the feature of ``pytest.mark.supports(feature)`` or ``supports(feature)``."""
    if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("supports", "pytest.mark.supports")):
        return None
    (feature,) = decorator.args
    assert isinstance(feature, ast.Constant) and isinstance(feature.value, str), ast.unparse(decorator)
    return feature.value


def test_every_row_names_tests_that_carry_its_name() -> None:
    said = {(row.feature, test) for row in rows() for test in row.tests}
    carried = {(feature, test) for test, features in marked().items() for feature in features}
    assert said - carried == set(), "named by docs/support.md, but the test is gone or does not carry the row's name"
    assert carried - said == set(), "marked as a row's test, but docs/support.md does not name it"


def test_no_row_is_without_a_test_or_a_verdict() -> None:
    listed = rows()
    assert len({row.feature for row in listed}) == len(listed) > 30
    assert [row.feature for row in listed if not row.tests] == []
    assert [row.feature for row in listed if not VERDICTS.fullmatch(row.verdict)] == []
    assert [row.feature for row in listed if row.verdict.startswith("refused") and not row.messages] == []


def test_what_shows_an_assumption_is_there() -> None:
    named = re.findall(r"`(tests/[^`]+)`", (ROOT / "docs" / "assumptions.md").read_text())
    there = {path: [name for name, _ in _tests(ast.parse((ROOT / path).read_text()))] for path, _, _ in _parted(named)}
    assert len(named) > 15
    assert [f"{path}::{name}" for path, _, name in _parted(named) if name and name not in there[path]] == []


def _parted(named: list[str]) -> list[tuple[str, str, str]]:
    return [test.partition("::") for test in named]


# ------------------------------------------------------------------------------------------------------- the messages


def texts() -> str:
    """Return every text in the source, one a line, with dots where a value is inserted."""
    found = []
    for node in (node for name in OWN for node in nodes_of(name)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "..." for p in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return "\n".join(found)


def test_what_is_quoted_is_what_the_code_says() -> None:
    known = texts()
    quoted = [(row.feature, message) for row in rows() for message in row.messages]
    assert quoted, "the page quotes what is said at the start"
    assert [(feature, message) for feature, message in quoted if message.replace("…", "...") not in known] == []
