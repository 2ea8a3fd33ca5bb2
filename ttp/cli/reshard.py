"""``ttp reshard``: makes a MindSpore checkpoint for another number of cards or another parallel strategy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ttp.cli.output import Json, bars, count_text, fields_of, print_json, say, say_notes
from ttp.errors import ConfigError, UsageError
from ttp.store.digest import Watch
from ttp.store.room import size_text

if TYPE_CHECKING:
    from ttp.mindspore_files.reshard import Resharded


_MEMORY = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([kKMGT]?)B?")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

Source = Annotated[Path, typer.Argument(metavar="SRC_DIR", help="A directory of rank_0, rank_1, ..., or a save_dir.")]
Target = Annotated[Path, typer.Argument(metavar="DST_DIR", help="The directory to make; an empty one will do.")]
SrcStrategy = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Strategy of SRC_DIR; a pipeline's directory. [default: no tensor is split]"),
]
DstStrategy = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Strategy of DST_DIR; a pipeline's directory. [default: one file with all]"),
]
Ranks = Annotated[
    list[int] | None,
    typer.Option("--rank", metavar="R", help="Only this rank of DST_DIR, and no manifest; repeatable."),
]
Jobs = Annotated[int, typer.Option(metavar="N", help="Worker processes; 1: only this process.")]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Limit of all jobs together: 8G, 500M. [default: half of free]"),
]
Inference = Annotated[bool, typer.Option("--inference", help="Leave the optimizer's state and the step counters out.")]
TrustParts = Annotated[bool, typer.Option("--trust-parts", help="Equal parts of a tensor are not an error.")]


def reshard(
    source: Source,
    target: Target,
    src_strategy: SrcStrategy = None,
    dst_strategy: DstStrategy = None,
    rank: Ranks = None,
    jobs: Jobs = 1,
    memory: Memory = None,
    inference: Inference = False,
    trust_parts: TrustParts = False,
    json: Json = False,
) -> None:
    """Make a MindSpore checkpoint for another number of cards or another parallel strategy.

    Any change of data, model, optimizer and pipeline parallelism, from M to N cards, to one full file (without
    --dst-strategy), or from one. SRC_DIR may lack ranks whose parts others hold, as a power-off checkpoint does.

    Files and strategies are examined first: digests, shapes, copies that should be equal. If anything does not fit, the
    command refuses and nothing is written. Every element is compared with the source afterwards. MindSpore is not
    needed. DST_DIR appears whole or not at all.

    Exits with 1 if the files are damaged or the strategies do not fit.

    JSON keys: source, target, version (finished updates; null: unknown), ranks (made), world_size (of DST_DIR), tensors
    (in all files), size (bytes), notes.
    """
    from_memory = None if memory is None else _bytes(memory)
    with bars() as watch:
        done = _reshard(
            watch,
            source=source,
            target=target,
            src_strategy=src_strategy,
            dst_strategy=dst_strategy,
            ranks=tuple(rank or ()),
            jobs=jobs,
            memory=from_memory,
            inference=inference,
            trust_parts=trust_parts,
        )
    if json:
        print_json(describe(done))
    else:
        _tell(done)


def _reshard(watch: Watch, **wish: Any) -> Resharded:
    try:
        from ttp.mindspore_files.reshard import Wish, reshard
    except ModuleNotFoundError as problem:
        if problem.name != "numpy":
            raise
        raise ConfigError("numpy is not installed: pip install 'ttp-ft[mindspore]'") from None
    return reshard(Wish(**wish), watch)


def _bytes(text: str) -> int:
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--memory {text}: give bytes, or a number with K, M, G or T, such as 8G")
    whole, _, part = match[1].partition(".")
    return int(whole + part) * _UNITS[match[2].upper()] // int(10 ** len(part))


def describe(done: Resharded) -> dict[str, Any]:
    """Return what ``ttp reshard --json`` prints."""
    return {
        "source": str(done.source),
        "target": str(done.target),
        **fields_of(done, "version", "ranks", "world_size", "tensors", "size"),
        "notes": list(done.notes),
    }


def _tell(done: Resharded) -> None:
    step = "" if done.version is None else f" of step {done.version}"
    made = count_text(len(done.ranks), "rank")
    whole = "" if len(done.ranks) == done.world_size else f" of {done.world_size}"
    counted = f"{count_text(done.tensors, 'tensor')}{step}, {size_text(done.size)}"
    say(Text.assemble(("written  ", "green"), f"{done.target}: {made}{whole}, {counted}, every element checked"))
    say_notes(done.notes)
