"""``ttp recover``: rebuilds lost or damaged files from the files of replicas."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ttp.cli.directories import existing
from ttp.cli.output import Json, bars, fields_of, print_json, say, show_table
from ttp.core.layout import WORLD_SIZE_MAX
from ttp.errors import UsageError

if TYPE_CHECKING:
    from ttp.mindspore_files.redundancy_recovery import Recovery

SHOWN_MAX = 100


class Way(str, Enum):
    """The ways to provide the file of a replica in place of a lost one."""

    MAP = "map"
    LINK = "link"
    COPY = "copy"


Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A directory of rank_0, rank_1, ..., or a save_dir (its newest).")
]
StrategyOf = Annotated[
    Path | None, typer.Option("--strategy", metavar="F", help="Strategy file, or the directory of all stages.")
]
GroupInfoOf = Annotated[list[Path] | None, typer.Option("--group-info", metavar="F", help="group_info.pb; repeatable.")]
DataParallel = Annotated[bool, typer.Option("--data-parallel", help="All ranks hold the same state.")]
Ranks = Annotated[
    int | None,
    typer.Option("--ranks", metavar="N", min=1, max=WORLD_SIZE_MAX, help="Ranks of the job, if no file says so."),
]
By = Annotated[Way, typer.Option("--by", help="map: write a JSON file; link, copy: make a complete directory.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="OUT", help="What to write; needed for link and copy.")]
Step = Annotated[
    str | None, typer.Option("--step", metavar="EPOCH_STEP", help="This one, as in file names, not the newest.")
]


def recover(
    directory: Directory,
    strategy: StrategyOf = None,
    group_info: GroupInfoOf = None,
    data_parallel: DataParallel = False,
    ranks: Ranks = None,
    by: By = Way.MAP,
    out: Out = None,
    step: Step = None,
    json: Json = False,
) -> None:
    """Rebuild lost or damaged MindSpore checkpoints of single ranks from those of ranks that hold the same slices.

    Takes the newest checkpoint, of the last five, of which every rank has its own file or a replica's. If there is none
    it takes the newest one, and lists what cannot be rebuilt. --step chooses a checkpoint.

    Every file is read to its end (CRC, digest of the manifest, shapes, step), and replicas are compared. --strategy,
    --group-info or --data-parallel say which ranks hold the same slices; else the manifest of a ttp checkpoint, else
    the group_info.pb in the folders of the ranks. The source is never written to; OUT appears whole or not at all.

    Exits with 0 if every rank has a file to load and replicas agree, with 1 if not.

    JSON keys: source, checkpoint (name of the files, * for the rank), told_by (source of the replica groups), files
    (path below source by rank; null: lost), ranks (list: rank, state own | replica | lost, source, why), disagreements,
    skipped (newer checkpoints, and why), out (null: nothing was written).
    """
    from ttp.mindspore_files.redundancy_recovery import examine, write

    if by is not Way.MAP and out is None:
        raise UsageError(f"--by {by.value} needs --out: where to put the files")
    wanted = _step(step)
    with bars() as watch:
        found, skipped = examine(
            existing(directory),
            lambda place: _known(place, strategy, group_info or [], data_parallel, ranks),
            wanted,
            watch("reading", None),
        )
        if out is not None:
            write(found, out, by.value, watch("writing", None))
    if json:
        print_json({**describe(found), "skipped": skipped, "out": None if out is None else str(out.absolute())})
    else:
        for reason in skipped:
            say(Text.assemble(("skipped  ", "yellow"), reason))
        _tell(found, by, out)
    if found.outcome.lost or found.outcome.disagreements:
        raise typer.Exit(1)


def _known(
    directory: Path, strategy: Path | None, group_info: list[Path], data_parallel: bool, ranks: int | None
) -> Any:
    from ttp.mindspore_files.rank_folders import known_replicas

    if sum((strategy is not None, bool(group_info), data_parallel)) > 1:
        raise UsageError("give exactly one of --strategy, --group-info and --data-parallel")
    return known_replicas(directory, strategy=strategy, group_info=group_info, data_parallel=data_parallel, ranks=ranks)


def _step(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9})_(\d{1,12})", text, re.ASCII)
    if found is None:
        raise UsageError(f"--step {text}: give epoch and step as in the file names, such as 2_1875")
    return int(found[1]), int(found[2])


def describe(found: Recovery) -> dict[str, Any]:
    """Return what ``ttp recover --json`` prints, except ``skipped`` and ``out``."""
    return {
        "source": str(found.directory),
        "checkpoint": found.template,
        "told_by": found.known.told_by,
        "files": found.mapping(),
        "ranks": [fields_of(fate, "rank", "state", "source", "why") for fate in found.outcome.fates],
        "disagreements": list(found.outcome.disagreements),
    }


def _tell(found: Recovery, by: Way, out: Path | None) -> None:
    say(f"{found.template} in {found.directory}; replicas as told by {found.known.told_by}")
    style = {"own": "green", "replica": "yellow", "lost": "bold red"}
    rows = [
        (str(fate.rank), Text(fate.state, style[fate.state]), found.file_for(fate.rank) or "", fate.why)
        for fate in found.outcome.fates
    ]
    rows.sort(key=lambda row: str(row[1]) == "own")
    show_table(("rank", "state", "loads", "why not its own"), rows, SHOWN_MAX, right=("rank",))
    for words in found.outcome.disagreements:
        say(Text.assemble(("differs  ", "bold red"), words))
    lost = found.outcome.lost
    if lost:
        say(f"{len(lost)} of {len(rows)} ranks cannot be rebuilt. --step EPOCH_STEP looks at another checkpoint.")
    if out is not None:
        what = "the file that each rank loads" if by is Way.MAP else "the files of all ranks that could be rebuilt"
        say(Text.assemble(("written  ", "green"), f"{out}: {what}"))
