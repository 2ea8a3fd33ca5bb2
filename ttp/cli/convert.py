"""``ttp convert``: makes one full file from a checkpoint, or a checkpoint from a file."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ttp.cli.directories import is_checkpoint
from ttp.cli.output import Json, aside, bars, count_text, fields_of, print_json, say, say_notes
from ttp.errors import CheckpointError, ConfigError, UsageError
from ttp.store.catalog import newest_whole
from ttp.store.digest import Watch
from ttp.store.room import size_text

if TYPE_CHECKING:
    from ttp.adapters.torch.convert.conversion import Converted


class Form(str, Enum):
    """The formats that can be written."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


Source = Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint, a save_dir (its newest), or a file.")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="The file to write; for dcp a save_dir or a checkpoint.")]
To = Annotated[Form, typer.Option("--to", help="What to write.")]
WithOptimizer = Annotated[
    bool | None,
    typer.Option("--optimizer/--no-optimizer", help="Include the optimizer's state. [default: not for safetensors]"),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an old DST; an old checkpoint is kept as superseded.")]
Step = Annotated[int | None, typer.Option(metavar="N", help="For dcp: finished updates, if SRC does not tell.")]


def convert(
    source: Source,
    target: Target,
    to: To,
    optimizer: WithOptimizer = None,
    force: Force = False,
    step: Step = None,
    json: Json = False,
) -> None:
    """Write one full safetensors or torch file from a checkpoint of any layout, or make a checkpoint of such a file.

    safetensors: the weights and buffers, for inference; with --optimizer also its tensors as optim.state.PARAMETER.KEY.
    torch: {"model", "optim", "version", ...} for torch.load(weights_only=True), to go on with in a plain torch job.
    dcp: a checkpoint that ttp.restore() starts from and that stock torch.distributed.checkpoint reads.

    A checkpoint is verified before it is converted, and DST is read back afterwards. DST appears whole or not at all.
    Tensors are read one at a time. Exits with 1 if SRC is damaged or cannot be converted.

    JSON keys: source, target, to, version (finished updates; null: unknown), tensors (count), size (bytes), optimizer
    (whether it is in DST), tied (other name: stored name), left_out (names that DST has no place for), notes.
    """
    with bars() as watch:
        meant, verified = _meant(source, watch)
        settings = {"optimizer": optimizer, "force": force, "step": step, "verified": verified}
        done = _convert(meant, target, to, watch, **settings)
    if json:
        print_json(describe(done, to))
    else:
        _tell(done)


def _convert(source: Path, target: Path, to: Form, watch: Watch, **settings: Any) -> Converted:
    try:
        from ttp.adapters.torch.convert.conversion import convert as work
    except ModuleNotFoundError as problem:
        if problem.name not in ("torch", "numpy"):
            raise
        raise ConfigError(f"{problem.name} is not installed: pip install 'ttp-ft[torch,convert]'") from None
    return work(source, target.absolute(), to.value, watch=watch, **settings)


def _meant(source: Path, watch: Watch) -> tuple[Path, bool]:
    """Return the checkpoint or file to convert (of a ``save_dir`` the newest whole one), and whether it is verified."""
    if not source.exists():
        raise UsageError(f"{source} does not exist: give a checkpoint, a save_dir or a file")
    source = source.absolute()
    if not source.is_dir() or is_checkpoint(source):
        return source, False
    try:
        newest, skipped = newest_whole(source, watch("verifying", None))
    except CheckpointError:
        if not (source / ".metadata").is_file():
            raise
        raise CheckpointError(
            f"{source} is a checkpoint of torch.distributed.checkpoint that ttp did not write: without a manifest it "
            "can only be read by unpickling. Use torch's own dcp_to_torch_save, then --to dcp"
        ) from None
    for reason in skipped:
        say(f"skipped  {reason}", aside())
    return newest, True


def describe(done: Converted, to: Form) -> dict[str, Any]:
    """Return what ``ttp convert --json`` prints."""
    return {
        "source": str(done.source),
        "target": str(done.target),
        "to": to.value,
        **fields_of(done, "version", "tensors", "size", "optimizer"),
        "tied": dict(done.tied),
        "left_out": list(done.left_out),
        "notes": list(done.notes),
    }


def _tell(done: Converted) -> None:
    what = "weights and optimizer" if done.optimizer else "weights"
    step = "" if done.version is None else f" of step {done.version}"
    counted = f"{what}{step}, {count_text(done.tensors, 'tensor')}, {size_text(done.size)}"
    say(Text.assemble(("written  ", "green"), f"{done.target}: {counted}"))
    lines = [
        *(f"{name} shares its memory with {kept}; it is stored once, as {kept}" for name, kept in done.tied.items()),
        *(f"{name} cannot be stored in this format and was left out" for name in done.left_out),
        *done.notes,
    ]
    say_notes(lines)
