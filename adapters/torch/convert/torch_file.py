"""Writes and reads a torch file: ``{"model": ..., "optim": ..., "version": ...}``, loadable with ``weights_only=True``.

``model`` is for ``model.load_state_dict``, and ``optim`` for ``optimizer.load_state_dict``: its param groups have names
of parameters instead of numbers, which torch accepts and ``set_optimizer_state_dict`` needs. ``scheduler``, if there is
one, is for the LR scheduler's ``load_state_dict``. ``extra`` holds the modules that were given as ``extra_state``.
``ttp`` is for ttp, which can make a checkpoint from the file again: it shows that no name has the prefix of a wrapper.

Memory: ``torch.save`` takes all tensors at once. So the tensors are first written one by one to an unnamed file beside
the target, and mapped from there, so that the kernel can drop them from memory. That file needs as much free space on
the disk as the target.
"""

from __future__ import annotations

import mmap
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, cast

import torch
from torch import Tensor

from ttp.adapters.torch.convert.contents import LazyTensor, WholeState, bytes_of, digest_of, leaves_of, tree
from ttp.adapters.torch.convert.foreign import to_whole_state
from ttp.adapters.torch.saving.flatten_state import dump
from ttp.errors import CheckpointError, ToldAs
from ttp.store.digest import HashingFile, Progress

_ALIGNMENT = 64


def write(target: Path, contents: WholeState, progress: Progress) -> tuple[dict[str, str], list[str]]:
    """Write the file, durably.

    Returns:
        The digest of every tensor by its flattened name, and the names of the values that were left out.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: the storage failed.
    """
    plain = [leaf for leaf in contents.leaves if not isinstance(leaf.value, LazyTensor)]
    left_out = [leaf.key for leaf in plain if dump(leaf.value, Tensor.cpu) is None]
    kept = [leaf for leaf in contents.leaves if leaf.key not in left_out]
    with TemporaryFile(dir=target.parent) as scratch:
        mapped = _Mapped(scratch, progress)
        entries = {leaf.key: leaf.value for leaf in kept if isinstance(leaf.value, LazyTensor)}
        for entry in entries.values():
            mapped.add(entry)
        state = tree(kept, mapped.tensor)
        if "optim" in state:
            state["optim"].setdefault("state", {})  # plain SGD has none, and load_state_dict() needs the key
        rest, unsafe = _rest(contents)
        with HashingFile(target, progress) as file:
            torch.save(state | rest, cast("Any", file))
            file.sync_and_close()
    return {key: mapped.digests[entry.identity] for key, entry in entries.items()}, left_out + unsafe


def _rest(contents: WholeState) -> tuple[dict[str, Any], list[str]]:
    """Return the entries besides model, optimizer and extra, and the names of those that cannot be stored."""
    rest: dict[str, Any] = {"version": contents.version, "ttp": {}}
    if not contents.has_optimizer:
        return rest, []
    job = dict(contents.job or {})
    ours = {"optimizer": contents.optimizer, "job": {key: value for key, value in job.items() if key != "scheduler"}}
    given = {"scheduler": job.get("scheduler"), "ttp": ours}
    safe = {key: value for key, value in given.items() if value is not None and dump(value, Tensor.cpu) is not None}
    return rest | safe, [key for key in given if given[key] is not None and key not in safe]


class _Mapped:
    """Tensors that are written one by one to the file ``scratch`` and then mapped into memory."""

    def __init__(self, scratch: Any, progress: Progress) -> None:
        self._scratch, self._progress = scratch, progress
        self._places: dict[Any, int] = {}
        self._memory: mmap.mmap | None = None
        self.digests: dict[Any, str] = {}

    def add(self, entry: LazyTensor) -> None:
        """Write the tensor to the file, unless it has been written under another name."""
        if entry.identity in self._places:
            return
        tensor = entry.read()
        self.digests[entry.identity] = digest_of(tensor)
        self._scratch.write(b"\0" * (-self._scratch.tell() % _ALIGNMENT))
        self._places[entry.identity] = self._scratch.tell()
        self._scratch.write(bytes_of(tensor))
        self._progress(entry.nbytes)

    def tensor(self, entry: LazyTensor) -> Tensor:
        """Return the tensor in the mapped file. ``add`` may not be called after this."""
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if self._memory is None:
            self._scratch.flush()
            self._memory = mmap.mmap(self._scratch.fileno(), 0, access=mmap.ACCESS_COPY)
        start = self._places[entry.identity]
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=entry.nbytes, offset=start)
        return flat.view(entry.dtype).view(entry.shape)


def read_back(path: Path, digests: Mapping[str, str], progress: Progress) -> None:
    """Load the file, mapped into memory, and compare the digests with what was written.

    Raises:
        CheckpointError: they differ, or the file cannot be read.
    """
    with ToldAs(CheckpointError, f"{path} cannot be read back", Exception):
        state = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        found = {leaf.key: leaf.value for leaf in leaves_of(state) if isinstance(leaf.value, LazyTensor)}
    for key, digest in digests.items():
        if key not in found or digest_of(found[key].read()) != digest:
            raise CheckpointError(f"{key} in {path} differs from what was written: check the disk")
        progress(found[key].nbytes)


# --------------------------------------------------------------------------------------------------------- reading


def read_torch(path: Path, *, optimizer: bool) -> WholeState:
    """Read a torch file, with or without the optimizer's state. ``foreign.to_whole_state`` lists the accepted forms.

    Files in torch's zip format are mapped into memory. Older files are read into memory whole.

    Raises:
        CheckpointError: the file is damaged, cannot be loaded with ``weights_only=True``, or has another form.
    """
    try:
        loaded = torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except Exception as problem:
        raise CheckpointError(
            f"{path} cannot be loaded without running code from it ({_first_line(problem)}). Save plain state "
            'dicts: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)'
        ) from problem
    try:
        return to_whole_state(path, loaded, optimizer=optimizer)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as problem:
        raise CheckpointError(f"{path} does not have the form of a state dict: {problem!r}") from problem


def _first_line(problem: Exception) -> str:
    lines: Iterator[str] = (line.strip() for line in str(problem).splitlines())
    return next((line for line in lines if line), type(problem).__name__)
