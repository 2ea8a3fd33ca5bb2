"""``ttp redundancy``: lists the ranks that hold the same slices."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ttp.cli.directories import checkpoint_meant
from ttp.cli.output import Json, print_json, say, show_table
from ttp.core.layout import compact_ranks
from ttp.errors import CheckpointError
from ttp.store.manifest import MANIFEST, Manifest

SHOWN_MAX = 40

Source = Annotated[
    Path,
    typer.Argument(
        metavar="GROUP_INFO|STRATEGY|MANIFEST", help="A file, or a directory of strategies or checkpoints (its newest)."
    ),
]

ReplicaGroups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Told:
    """Which ranks hold the same data, according to a file.

    Args:
        kind: ``group_info``, ``strategy`` or ``manifest``.
        groups: ranks whose whole checkpoints are the same.
        parameters: ranks that hold the same slice, for each parameter (a strategy) or shard (a manifest).
    """

    kind: str
    groups: ReplicaGroups
    parameters: Mapping[str, ReplicaGroups] = field(default_factory=dict)


def redundancy(source: Source, json: Json = False) -> None:
    """List the ranks that hold the same slices, so that each can stand for the others when one is lost.

    Reads group_info.pb of MindSpore (or of a ttp job), strategy files (protobuf or JSON; a directory with those of all
    stages of a pipeline), and the manifest of a checkpoint or of the newest in a save_dir. MindSpore need not be
    installed. Exits with 1 if the file cannot be read.

    JSON keys: source, kind (group_info, strategy, manifest), groups (lists of ranks whose whole checkpoints are the
    same), parameters (of a strategy: by parameter, of a manifest: by shard; lists of ranks that hold the same slice).
    """
    told = read(source)
    if json:
        print_json({"source": str(source.absolute()), **describe(told)})
    else:
        _tell(told)


def read(source: Path) -> Told:
    """Read from ``source`` which ranks hold the same data.

    Raises:
        UsageError: ``source`` does not exist.
        CheckpointError: it is no group_info.pb, strategy or manifest, or it is damaged.
    """
    from ttp.mindspore_files.group_info import read_group_info
    from ttp.mindspore_files.rank_folders import groups_of_manifest
    from ttp.mindspore_files.redundancy import groups_of_stages
    from ttp.mindspore_files.strategy_file import read_stages, require

    require(source, "give a group_info.pb, a strategy file or a manifest")
    directory = source.parent if source.name == MANIFEST else source
    if source.is_dir():
        with contextlib.suppress(CheckpointError):  # it holds no checkpoint of ttp, so it may be one of strategies
            directory = checkpoint_meant(source)
    if source.name == MANIFEST or (directory / MANIFEST).exists():
        manifest = Manifest.load(directory)
        shards: dict[str, ReplicaGroups] = {
            str(shard): (tuple(int(rank) for rank in ranks),) for shard, ranks in manifest.groups.items()
        }
        return Told("manifest", groups_of_manifest(manifest), shards)
    try:
        return Told("strategy", *groups_of_stages(read_stages(source)))
    except CheckpointError as no_strategy:
        if source.is_dir() or source.suffix == ".json":
            raise
        try:
            return Told("group_info", (read_group_info(source).replicas,))
        except CheckpointError as no_group_info:
            raise no_group_info if source.suffix == ".pb" else no_strategy from None


def describe(told: Told) -> dict[str, Any]:
    """Return what ``ttp redundancy --json`` prints besides the source."""
    parameters = {name: [list(ranks) for ranks in groups] for name, groups in told.parameters.items()}
    return {"kind": told.kind, "groups": [list(ranks) for ranks in told.groups], "parameters": parameters}


def _tell(told: Told) -> None:
    rows = [(compact_ranks(ranks), str(len(ranks)), "" if len(ranks) > 1 else "none") for ranks in told.groups]
    show_table(("ranks with the same checkpoint", "copies", "replica"), rows, SHOWN_MAX, right=("copies",))
    if told.kind == "group_info":
        say("A group_info.pb lists only the ranks from which its own rank can be restored.")
    if not told.parameters:
        return
    what = "shard" if told.kind == "manifest" else "parameter"
    listed = [(name, "; ".join(map(compact_ranks, told.parameters[name]))) for name in sorted(told.parameters)]
    show_table((what, "ranks with the same slice"), listed, SHOWN_MAX, noun=what)
