"""Implements ``ttp convert``: chooses reader and writer. The target appears only when it is whole and has been checked.

Memory that a conversion takes, in addition to that of the libraries themselves:

=========================  ========================================================================================
checkpoint -> safetensors  the largest tensor, and the largest chunk of it where several ranks wrote it
checkpoint -> torch        the same; on disk, while it runs, as much space again as the target takes
file -> any                the largest non-contiguous tensor; the whole file if it is older than torch's zip format
=========================  ========================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ttp.adapters.torch.convert import safetensors_file, torch_file
from ttp.adapters.torch.convert.contents import WholeState
from ttp.adapters.torch.convert.from_checkpoint import read_checkpoint
from ttp.adapters.torch.convert.to_checkpoint import write_checkpoint
from ttp.adapters.torch.convert.torch_file import read_torch
from ttp.adapters.torch.saving.piece_index import left_out_of
from ttp.core.layout import Version
from ttp.errors import CheckpointError, ToldAs, UsageError, strerror_of
from ttp.store import names
from ttp.store.digest import Watch
from ttp.store.durable import make_directory, sync_directory
from ttp.store.manifest import Manifest
from ttp.store.plain_file import open_plain
from ttp.store.verify import verify_checkpoint

Form = Literal["safetensors", "torch", "dcp"]


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion.

    Args:
        source: path of the source.
        target: path of the target that was written.
        version: finished updates; None: the source does not tell.
        tensors: number of tensors that were written; tied ones count once.
        size: bytes of the target on disk.
        optimizer: True if the optimizer's state is in the target.
        tied: for each further name of a tied weight, the name under which it is stored; safetensors only.
        left_out: names of the values that the target's format cannot hold.
        notes: differences from the saved state, in words.
    """

    source: Path
    target: Path
    version: int | None
    tensors: int
    size: int
    optimizer: bool
    tied: Mapping[str, str]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def convert(
    source: Path,
    target: Path,
    to: Form,
    *,
    watch: Watch,
    optimizer: bool | None = None,
    force: bool = False,
    step: int | None = None,
    verified: bool = False,
) -> Converted:
    """Convert ``source`` to ``target``, durably. The target gets its name only when it is whole.

    A checkpoint of ttp is verified before it is read. What was written is read back and compared.

    Args:
        source: a checkpoint of ttp, a torch file or a safetensors file.
        target: the file to write; for ``dcp`` the checkpoint's directory, or the ``save_dir`` in which to make it.
        to: the form of the target.
        watch: reports progress; see ``Watch``.
        optimizer: whether to write the optimizer's state; None: write it if there is one, but not to safetensors.
        force: True to replace an old target. An old checkpoint is kept under another name.
        step: finished updates, for ``dcp``; None: the source's number, or else that in the target's name, or 0.
        verified: True if the source has just been verified; then it is not verified again.

    Returns:
        A description of what was written.

    Raises:
        UsageError: the arguments do not fit together, or the target exists.
        ConfigError: the package ``safetensors`` is needed and not installed.
        CheckpointError: the source is damaged or cannot be converted, the target differs from what was written, or
            the storage failed.
    """
    if to == "dcp":
        if source.is_dir():
            raise UsageError(f"{source} is a directory, and --to dcp makes a checkpoint of a file: name a file")
        return _to_checkpoint(source, target, watch, optimizer, force, step)
    if step is not None:
        raise UsageError("--step is the number of the new checkpoint: use it with --to dcp only")
    if to == "safetensors":
        safetensors_file.require()
    _refuse_existing(target, force)
    want = to == "torch" if optimizer is None else optimizer
    contents = _read_checkpoint(source, watch, verified) if source.is_dir() else _read_file(source, want)
    return _to_file(source, target, to, _wanted(contents, want, asked=optimizer), watch)


# --------------------------------------------------------------------------------------------------------- reading


def _read_checkpoint(source: Path, watch: Watch, verified: bool) -> WholeState:
    if not verified and (problems := verify_checkpoint(source, watch("verifying", Manifest.load(source).size))):
        raise CheckpointError(f"{source} is damaged: {'; '.join(problems)}. Nothing was written")
    return read_checkpoint(source)


def _read_file(source: Path, optimizer: bool) -> WholeState:
    with ToldAs(UsageError, f"{source} cannot be read", OSError, reason=strerror_of), open_plain(source) as file:
        head = file.read(9)
    if safetensors_file.looks_like(head):
        return safetensors_file.read_safetensors(source)
    return read_torch(source, optimizer=optimizer)


def _wanted(contents: WholeState, optimizer: bool, *, asked: bool | None) -> WholeState:
    """Return what to write. Raises an error if the user wants the optimizer's state and there is none."""
    if asked and not contents.has_optimizer:
        raise CheckpointError(f"{contents.source} holds no state of an optimizer: leave --optimizer out")
    return contents if optimizer and contents.has_optimizer else contents.without_optimizer()


# --------------------------------------------------------------------------------------------------------- writing


def _refuse_existing(target: Path, force: bool) -> None:
    if target.exists() and not target.is_file():
        raise UsageError(f"{target} is not a regular file: name the file to write")
    if not force and os.path.lexists(target):
        raise UsageError(f"{target} exists: --force replaces it")


def _to_file(source: Path, target: Path, to: Form, contents: WholeState, watch: Watch) -> Converted:
    write = _write_safetensors if to == "safetensors" else _write_torch
    draft = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        make_directory(target.parent)
        tensors, tied, left_out = write(draft, contents, watch)
        size = draft.stat().st_size
        draft.replace(target)
        sync_directory(target.parent)
    except OSError as problem:
        raise CheckpointError(f"{target} cannot be written: {problem}") from problem
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    optimizer, notes = contents.has_optimizer, contents.notes
    return Converted(source, target, contents.version, tensors, size, optimizer, tied, left_out, notes)


_Written = tuple[int, Mapping[str, str], tuple[str, ...]]
"""The number of tensors written, the tied names, and the names of left-out values."""


def _write_safetensors(draft: Path, contents: WholeState, watch: Watch) -> _Written:
    plan = safetensors_file.plan(contents)
    total = sum(entry.nbytes for entry in plan.tensors.values())
    digests = safetensors_file.write(draft, plan, watch("writing", 2 * total))  # each byte is written, then synced
    safetensors_file.read_back(draft, plan, digests, watch("checking", total))
    return len(plan.tensors), plan.tied, plan.left_out


def _write_torch(draft: Path, contents: WholeState, watch: Watch) -> _Written:
    total = sum(tensor.nbytes for tensor in contents.tensors)
    digests, left_out = torch_file.write(draft, contents, watch("writing", 3 * total))
    torch_file.read_back(draft, digests, watch("checking", total))
    return len(contents.tensors), {}, tuple(left_out)


def _to_checkpoint(
    source: Path, target: Path, watch: Watch, optimizer: bool | None, force: bool, step: int | None
) -> Converted:
    contents = _read_file(source, optimizer is not False)
    save_dir, version = _place(target, step, contents.version)
    final = save_dir / names.checkpoint_name(version)
    if not force and os.path.lexists(final):
        raise UsageError(f"{final} exists: --force keeps it under another name and takes this one")
    contents = _wanted(contents, optimizer is not False, asked=optimizer)
    progress = watch("writing", 2 * sum(tensor.nbytes for tensor in contents.tensors))
    path = write_checkpoint(save_dir, version, contents, progress)
    manifest = Manifest.load(path)
    if problems := verify_checkpoint(path, watch("checking", manifest.size)):
        raise CheckpointError(f"{path} differs from what was written: {'; '.join(problems)}. Check the disk")
    count, left_out = len(contents.tensors), tuple(left_out_of(manifest.pieces))
    optimizer, notes = contents.has_optimizer, contents.notes
    return Converted(source, path, version, count, manifest.size, optimizer, {}, left_out, notes)


def _place(target: Path, step: int | None, in_source: int | None) -> tuple[Path, Version]:
    """Return the ``save_dir`` and the version of the new checkpoint.

    Args:
        target: the checkpoint's directory, if it has the name of one; else the ``save_dir``.
        step: the version that the user gave, if any.
        in_source: the version in the source, if any.
    """
    named = names.parse_checkpoint_name(target.name)
    version = next((number for number in (step, in_source, named) if number is not None), 0)
    if version < 0 or names.parse_checkpoint_name(names.checkpoint_name(Version(version))) is None:
        raise UsageError(f"--step {version} is not a number of finished updates: give 0 or more, 18 digits at most")
    if named is not None and named != version:
        raise UsageError(
            f"{target.name} is the name of step {named}, and this would be step {version}: --step {named}?"
        )
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is not a directory: --to dcp writes a directory")
    return (target if named is None else target.parent), Version(version)
