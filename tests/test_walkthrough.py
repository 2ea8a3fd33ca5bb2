"""``docs/walkthrough.md`` is up to date: its paths are files, and its names stand in the files beside them."""

from __future__ import annotations

import re

import pytest

from tests.test_tidy import OWN, ROOT

PAGE = (ROOT / "docs" / "walkthrough.md").read_text()
QUOTED = re.findall(r"`([^`\n]+)`", PAGE)
PATHS = sorted({quoted for quoted in QUOTED if quoted.endswith(".py")})
SOURCE = {path: (ROOT / path).read_text() for path in PATHS if (ROOT / path).is_file()}
COMMANDS = {"kill -9"}


@pytest.mark.parametrize("path", PATHS)
def test_the_file_is_there(path: str) -> None:
    assert path in SOURCE


@pytest.mark.parametrize("line", [line for line in PAGE.splitlines() if line.startswith("| `")])
def test_what_a_file_does_is_in_that_file(line: str) -> None:
    """Names in the second column are of the file in the first; a dotted name is a method."""
    path, does = (column.strip() for column in line.split("|")[1:3])
    text = SOURCE[path.strip("`")]
    for name in re.findall(r"`([^`]+)`", does):
        if name.endswith(".py"):
            continue
        for part in name.split("."):
            assert re.search(rf"\b{re.escape(part)}\b", text), f"{path} knows no {part}"


def test_every_name_is_defined_somewhere() -> None:
    everything = "\n".join(path.read_text() for path in OWN.values())
    found = re.findall(r"(?:class|def) (\w+)|^\s*(\w+) ?[:=]", everything, re.MULTILINE)
    defined = {name for names in found for name in names}
    named = {*QUOTED} - {*PATHS} - COMMANDS
    assert [name for name in sorted(named) if not defined.issuperset(name.split("."))] == []
