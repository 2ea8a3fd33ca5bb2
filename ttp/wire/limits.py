"""Limits of messages: any client that reaches the port can send any bytes, so excessive values are refused or cut.

Names that are too long, numbers that are too large to compute with, and lists that are longer than any real message
needs are refused. Texts for people are cut instead, because a very long error still has to be reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ttp.core.layout import WORLD_SIZE_MAX

VERSION_MAX = 10**18 - 2
"""Largest version: a directory's name holds eighteen digits, and the next version must fit too."""
COUNT_MAX = (1 << 32) - (1 << 20)
"""Largest launch and incarnation: they have 32 bits on the wire, and later ones are counted on from the largest."""
TERM_MAX = (1 << 16) - (1 << 10)
"""Largest term: a generation has 32 bits, and its term is the upper half; see ``ttp.core.controller.saving``."""

NAME_MAX = 4096
"""Most characters of a name; paths are the longest names."""
TEXT_MAX = 16_384
"""Most characters of a text for people. A traceback has a few thousand."""
TEXTS_MAX = 100
"""Most texts for people in one message."""
ENTRIES_MAX = 1 << 18
"""Most fields of a message, counted with the fields of its nested messages one level down."""
FREE_BYTES = 1 << 20
"""Messages of up to this many bytes are parsed without counting fields: they take at most 60 times that in memory."""

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
"""Fields whose texts programs read: they may have any length."""
FILE_NAMES = frozenset({"incident", "draft"})
"""Fields whose texts become names of files and directories."""
CUT_LISTS = frozenset({"skipped", "bad", "candidates", "readings", "standbys"})
"""Lists that are cut to ``TEXTS_MAX`` entries, as their first entries matter most. Other lists are needed whole."""


class WireError(Exception):
    """An invalid message: it is empty, has an unknown enum value, or exceeds a limit."""


def number(name: str, value: int) -> int:
    """Return ``value`` if it is within the limit of the field ``name``.

    Raises:
        WireError: the value is larger.
    """
    most = NUMBERS.get(name)
    if most is not None and value > most:
        raise WireError(f"{name} {value} is more than the maximum of {most}")
    return value


def text(name: str, value: str) -> str:
    """Return ``value``, cut to ``TEXT_MAX`` characters if the field ``name`` is a text for people.

    Raises:
        WireError: the field is a name, and the value is too long or not a safe file name.
    """
    if name in UNCUT:
        return value
    if name in TEXTS:
        return value if len(value) <= TEXT_MAX else f"{value[:TEXT_MAX]}... ({len(value) - TEXT_MAX} characters more)"
    if len(value) > NAME_MAX:
        raise WireError(f"{name} is {len(value)} characters long, more than {NAME_MAX}; it begins with {value[:40]!r}")
    if "\0" in value or (name in FILE_NAMES and not _FILE_NAME.fullmatch(value)):
        raise WireError(f"{name} {value!r:.80} is not a valid name")
    return value


def entries(name: str, count: int) -> int:
    """Return how many of the ``count`` entries of the list ``name`` to take.

    Raises:
        WireError: the list is needed whole and has too many entries.
    """
    if name in CUT_LISTS:
        return min(count, TEXTS_MAX)
    if count > WORLD_SIZE_MAX:
        raise WireError(f"{name} has {count} entries, more than the maximum of {WORLD_SIZE_MAX}")
    return count


def check_size(data: bytes) -> None:
    """Check the number of fields of a serialised message before it is parsed: 2 bytes can become an object of 100.

    The fields are counted here, because protobuf's own way (unknown fields of an empty message) makes the objects too.

    Raises:
        WireError: the message has too many fields, or the bytes are not a message.
    """
    if len(data) <= FREE_BYTES:
        return
    left = ENTRIES_MAX
    for start, end in _fields(data, 0, len(data)):
        left -= 1
        try:
            for _ in _fields(data, start, end):
                left -= 1
                if left <= 0:
                    break
        except WireError:
            pass  # packed numbers, which are no message
        if left <= 0:
            raise WireError(f"a message of {len(data)} bytes has more than {ENTRIES_MAX} fields")


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of the content of each length-delimited field; for other fields start and end are equal."""
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
                raise WireError("these bytes are not a valid message")
        if at + size > end:
            raise WireError("the message is cut short")
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
    raise WireError("the message is cut short")
