"""Limits of messages. Everybody who reaches the port can send anything: more than this is refused or cut.

Names that are too long, numbers that are too large to compute with, and lists that are longer than any real message
needs are refused. Texts for people are cut instead: a very long error still has to be reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ttp.core.layout import WORLD_SIZE_MAX

VERSION_MAX = 10**18 - 2
"""A directory's name holds eighteen digits, and the next version must fit too."""
COUNT_MAX = (1 << 32) - (1 << 20)
"""Launches and incarnations: thirty-two bits on the wire, and each is counted on from the largest that was heard."""
TERM_MAX = (1 << 16) - (1 << 10)
"""Generations of a term are 32 bits with the term in the upper half; see ``ttp.core.controller.saving``."""

NAME_MAX = 4096
"""Characters of what names something: a path is the longest of them."""
TEXT_MAX = 16_384
"""Characters of what people read. A traceback has a few thousand."""
TEXTS_MAX = 100
"""Such texts in one message."""
ENTRIES_MAX = 1 << 18
"""Fields of a message and of what is directly in it: every piece, group or candidate is one."""
FREE_BYTES = 1 << 20
"""Below this a message is not looked at before it is parsed: it cannot become larger than 60 times its bytes."""

NUMBERS = {
    "world_size": WORLD_SIZE_MAX,
    "version": VERSION_MAX,
    "base_version": VERSION_MAX,
    "launch": COUNT_MAX,
    "incarnation": COUNT_MAX,
    "term": TERM_MAX,
    "term_seen": TERM_MAX,
}
_FILE_NAME = re.compile(r"[\w.:@%+=-]{0,200}", re.ASCII)

TEXTS = frozenset({"text", "detail", "broken", "activity", "skipped", "bad", "cause", "reason", "error", "table"})
UNCUT = frozenset({"table"})
"""Texts for programs, as long as they have to be."""
FILE_NAMES = frozenset({"incident", "draft"})
"""Become names of files and directories."""
CUT_LISTS = frozenset({"skipped", "bad", "candidates", "readings", "standbys"})
"""Lists whose beginning says the most; of others all entries are needed."""


class WireError(Exception):
    """A message that does not make sense: an empty one, an unknown enum value, a number beyond all limits."""


def number(name: str, value: int) -> int:
    """``value``.

    Raises:
        WireError: it is beyond what ``name`` can be.
    """
    most = NUMBERS.get(name)
    if most is not None and value > most:
        raise WireError(f"{name} {value} is more than the {most} that can be")
    return value


def text(name: str, value: str) -> str:
    """``value``, cut when it is for people.

    Raises:
        WireError: it is a name, and too long for one, or the file that it names could be anywhere.
    """
    if name in UNCUT:
        return value
    if name in TEXTS:
        return value if len(value) <= TEXT_MAX else f"{value[:TEXT_MAX]}... ({len(value) - TEXT_MAX} characters more)"
    if len(value) > NAME_MAX:
        raise WireError(f"{name} is {len(value)} characters long, {NAME_MAX} can be; it begins with {value[:40]!r}")
    if "\0" in value or (name in FILE_NAMES and not _FILE_NAME.fullmatch(value)):
        raise WireError(f"{name} {value!r:.80} cannot name anything")
    return value


def entries(name: str, count: int) -> int:
    """How many of ``count`` entries are taken.

    Raises:
        WireError: all are needed, and there are too many.
    """
    if name in CUT_LISTS:
        return min(count, TEXTS_MAX)
    if count > WORLD_SIZE_MAX:
        raise WireError(f"{name} has {count} entries, {WORLD_SIZE_MAX} can be")
    return count


def check_size(data: bytes) -> None:
    """Count the fields of a serialised report before it is parsed: two bytes can become an object of a hundred.

    By hand, as all that protobuf offers for it (unknown fields of an empty message) makes the objects, too.

    Raises:
        WireError: it has too many, or is no message at all.
    """
    if len(data) <= FREE_BYTES:
        return
    left = ENTRIES_MAX
    for start, end in _fields(data, 0, len(data)):
        left -= 1
        for _ in _fields(data, start, end):
            left -= 1
            if left <= 0:
                break
        if left <= 0:
            raise WireError(f"a message of {len(data)} bytes has more than {ENTRIES_MAX} fields")


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int]]:
    """Where the contents of the fields of a message begin and end; empty for what holds no others."""
    while at < end:
        tag, at = _varint(data, at, end)
        size = 0
        match tag & 7:
            case 0:
                _, at = _varint(data, at, end)
            case 1:
                at += 8
            case 2:
                size, at = _varint(data, at, end)
            case 5:
                at += 4
            case _:
                raise WireError("these bytes are no message")
        if at + size > end:
            raise WireError("a message that is cut short")
        yield at, at + size
        at += size


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise WireError("a message that is cut short")
