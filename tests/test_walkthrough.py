"""``docs/walkthrough.md`` is up to date: its paths are files, and its names stand in the files beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "walkthrough.md").read_text()
QUOTED = re.findall(r"`([^`\n]+)`", PAGE)
PATHS = sorted({quoted for quoted in QUOTED if quoted.endswith(".py")})
SOURCE = {path: (ROOT / path).read_text() for path in PATHS if (ROOT / path).is_file()}
DEFINED = r"(?:class|def) {0}\b|^\s*{0} ?[:=]"
COMMANDS = {"kill -9"}


def defined(name: str, text: str) -> bool:
    return re.search(DEFINED.format(re.escape(name)), text, re.MULTILINE) is not None


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
    sources = [p.read_text() for folder in ("ttp", "controller", "adapters") for p in (ROOT / folder).rglob("*.py")]
    everything = "\n".join(sources)
    unknown = [
        name
        for name in sorted({*QUOTED} - {*PATHS} - COMMANDS)
        if not all(defined(part, everything) for part in name.split("."))
    ]
    assert not unknown
