"""What commands share: output (results go to stdout, everything else to stderr), and options."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from ttp.store.digest import Watch

WIDE = 200
"""Columns of the output if stdout is no terminal: enough that paths in a pipe are not wrapped."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]

NOTES_SHOWN_MAX = 20
SECONDS_MAX = 1e7
"""Most seconds that an option takes, 115 days: the system and gRPC refuse to wait for much longer."""


def seconds(flag: str, *, least: float = 0.1, most: float = SECONDS_MAX, about: str) -> Any:
    """Return an option that takes seconds: a number from ``least`` to ``most``, which NaN is not."""
    return typer.Option(flag, min=least, max=most, callback=_number, help=about)


def _number(value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise typer.BadParameter("nan is not a number of seconds")
    return value


def screen() -> Console:
    """Return a console on stdout."""
    return _console(stderr=False)


def aside() -> Console:
    """Return a console on stderr, for progress, notes and errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDE
    return Console(stderr=stderr, highlight=False, width=width, soft_wrap=False)


def say(text: str | Text, console: Console | None = None) -> None:
    """Print one paragraph without wrapping it. Square brackets are printed as they are, and not taken for markup."""
    (console or screen()).print(shown(text), soft_wrap=True)


def shown(text: str | Text) -> Text:
    """Return ``text`` with every unprintable character replaced: file names and errors may hold control characters."""
    safe = text.copy() if isinstance(text, Text) else Text(text)
    if not safe.plain.isprintable():
        safe.plain = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in safe.plain)
    return safe


def say_notes(notes: Sequence[str]) -> None:
    """Print the first notes below a line of output, and the number of the others."""
    for note in notes[:NOTES_SHOWN_MAX]:
        say(f"         note: {note}")
    if (more := len(notes) - NOTES_SHOWN_MAX) > 0:
        say(f"         note: and {more} more (--json lists them)")


def complain(text: str) -> None:
    """Print an error as one line on stderr."""
    try:
        say(Text.assemble(("ttp: ", "bold red"), " ".join(text.split())), aside())
    except (OSError, SystemExit):  # rich exits so when the reader has closed the pipe; the exit code still tells
        silence(sys.stderr)


def open_streams() -> None:
    """Let every command print: to nowhere if a stream is closed, and with a "?" for a character that stdout lacks."""
    if not os.environ.get("COLUMNS", "80").strip("0"):  # containers set 0; in a width of 0 rich prints nothing
        del os.environ["COLUMNS"]
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def silence(stream: TextIO) -> None:
    """Let a stream that cannot be written lead nowhere, or Python would fail to flush it when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def unread() -> Iterator[None]:
    """Go on if the output of the block cannot be written or nobody reads it: for a command whose exit code says all."""
    try:
        yield
    except (OSError, SystemExit):  # rich exits so when the reader has closed the pipe
        silence(sys.stdout)


class Complaints:
    """Prints messages on stderr, but not the same message twice in a row."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, text: str) -> None:
        """Print a message unless it was the last one. An empty text means that the trouble is over."""
        if text and text != self._last:
            complain(text)
        self._last = text


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON on stdout."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # the text has a file name that is no UTF-8, or the terminal is not UTF-8
        text = json.dumps(value, indent=2) + "\n"
    sys.stdout.write(text)
    sys.stdout.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right: Sequence[str] = ()) -> Table:
    """Make a table of plain text; columns named in ``right`` are aligned to the right."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(shown, row))
    return made


def show_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    most: int,
    *,
    right: Sequence[str] = (),
    noun: str = "",
) -> None:
    """Print a table of the first ``most`` rows, and below it the number of the others, with their noun if given."""
    screen().print(table(columns, rows[:most], right=right))
    if (more := len(rows) - most) > 0:
        say(f"and {count_text(more, noun) if noun else more} more (--json lists them)")


@contextmanager
def bars() -> Iterator[Watch]:
    """Show a progress bar on stderr for every phase while the block runs; show nothing if stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = aside()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:

        def watch(what: str, total: int | None) -> Callable[[int], None]:
            task = bar.add_task(what, total=total)
            return lambda count: bar.advance(task, count)

        yield watch


def fields_of(value: Any, *names: str) -> dict[str, Any]:
    """Return these attributes of an object, for JSON."""
    return {name: getattr(value, name) for name in names}


# ---------------------------------------------------------------------------------------------------------------- words
#
# Formats numbers and times for people.


def duration_text(seconds: float) -> str:
    """Return seconds as ``0.3 s``, ``4 min 12 s``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours, days = int(seconds) // 60, int(seconds) // 3600, int(seconds) // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds) % 60} s"


def when_text(unix_s: float) -> str:
    """Return seconds since 1970 as local time, to the second; empty for 0 and for numbers that are no time."""
    if not unix_s:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return ""


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
