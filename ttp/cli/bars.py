"""Progress of commands that read and write many bytes, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ttp.cli.output import aside

Watch = Callable[[str, "int | None"], Callable[[int], None]]
"""Begins a phase of so many bytes, if that is known; what it returns is called with the bytes that are done."""


@contextmanager
def bars() -> Iterator[Watch]:
    """A bar for every phase, on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = aside()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:

        def watch(what: str, total: int | None) -> Callable[[int], None]:
            task = bar.add_task(what, total=total)
            return lambda count: bar.advance(task, count)

        yield watch
