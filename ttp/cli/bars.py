"""Progress bars on stderr, for commands that read or write many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ttp.cli.output import aside
from ttp.store.digest import Watch


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
