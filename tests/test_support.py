"""docs/support.md and the tests that it names agree: every row has tests with its name, and no other test has one."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import ttp
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


def tables(page: Path) -> list[list[list[str]]]:
    """Return the rows of each table of a page, without its head."""
    bodies = re.findall(r"^\|---.*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    return [
        [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body.splitlines()] for body in bodies
    ]


def rows() -> list[Row]:
    cells = tables(PAGE)[0]
    assert all(len(row) == 3 for row in cells), [row for row in cells if len(row) != 3]
    return [Row(feature, verdict, tuple(re.findall(r"`([^`]+)`", tests))) for feature, verdict, tests in cells]


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


def exists(test: str) -> bool:
    """Return whether there is this file of tests, or this test: ``path::name``."""
    path, _, name = test.partition("::")
    file = ROOT / "tests" / path.removeprefix("tests/")
    return file.is_file() and (not name or name in {known for known, _ in _tests(ast.parse(file.read_text()))})


def test_what_shows_an_assumption_is_there() -> None:
    named = re.findall(r"`(tests/[^`]+)`", (ROOT / "docs" / "assumptions.md").read_text())
    assert len(named) > 15 and [test for test in named if not exists(test)] == []


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


def test_the_first_page_shows_all_arguments_of_wrap_optimizer() -> None:
    page = (PAGE.parent / "index.md").read_text()
    (shown,) = re.findall(r"```python\noptimizer = (ttp\.wrap_optimizer\(.*?)```", page, re.DOTALL)
    call = ast.parse(shown, mode="eval").body
    assert isinstance(call, ast.Call)
    keywords = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    real = inspect.signature(ttp.wrap_optimizer).parameters
    assert [*real] == ["optimizer", *keywords]
    assert keywords == {name: each.default for name, each in real.items() if name in keywords}
