"""Writes and reads ``safetensors`` files. Only one tensor at a time is in memory.

The library's own ``save_file`` needs all tensors in memory. The format is simple (a length, a JSON header, the bytes of
the tensors), so this module writes files itself. It reads them with the library, to import them and to check what was
written.

Names: a weight or buffer has its name in ``model.state_dict()``. If the optimizer's state is included, its tensors are
``optim.state.<parameter>.<key>``, and ``ttp.optim`` in the metadata is JSON of the param groups and of the plain values
in the state. A tied weight is stored once, under the first of its names; as in files of the library's ``save_model``,
the metadata has ``{other name: stored name}``, which ``load_model`` understands. ``ttp.version`` in the metadata is the
number of finished updates.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ttp.adapters.torch.convert.contents import LazyTensor, WholeState, bytes_of, digest_of
from ttp.adapters.torch.saving.flatten_state import StateValue, put
from ttp.errors import GARBLED, CheckpointError, ConfigError, ToldAs
from ttp.store.digest import HashingFile, Progress

HEADER_MAX = 100_000_000
"""The largest header, in bytes. The library refuses a larger one."""

_STATE = "optim.state."
_VERSION, _SOURCE, _KIND, _OPTIM = "ttp.version", "ttp.source", "ttp.optimizer", "ttp.optim"
_TUPLE = "__tuple__"
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
    "float64": "F64", "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The planned contents of a file.

    Args:
        tensors: the tensors by name, in the order in which they are stored.
        metadata: the strings in the header's metadata, by name.
        tied: for each further name of a tied weight, the name under which it is stored.
        left_out: names of the values that the format cannot hold.
    """

    tensors: Mapping[str, LazyTensor]
    metadata: Mapping[str, str]
    tied: Mapping[str, str]
    left_out: tuple[str, ...]


def require() -> Any:
    """Return the ``safetensors`` library.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        import safetensors
    except ImportError:
        raise ConfigError("safetensors is not installed: pip install 'ttp-ft[convert]'") from None
    return safetensors


# --------------------------------------------------------------------------------------------------------- writing


def plan(contents: WholeState) -> FilePlan:
    """Decide which values of ``contents`` the file holds, under which names, and where.

    Raises:
        CheckpointError: a value or a name cannot be stored in this format.
    """
    named, left_out = _weights(contents)
    metadata = {"format": "pt", _SOURCE: contents.source}
    if contents.version is not None:
        metadata[_VERSION] = str(contents.version)
    stored, tied = _untie(named)
    if contents.has_optimizer:
        stored |= _moments(contents, named)
        metadata |= {_KIND: contents.optimizer, _OPTIM: _encode_optimizer(contents)}
    clash = sorted(tied.keys() & metadata.keys())
    if clash:
        raise CheckpointError(f"{clash[0]} cannot be the name of a weight in a safetensors file: use --to torch")
    # As the library does: with the widest elements first, every tensor is aligned to the size of its elements.
    ordered = sorted(stored.items(), key=lambda pair: (-pair[1].dtype.itemsize, pair[0]))
    return FilePlan(dict(ordered), metadata | tied, tied, left_out)


def write(target: Path, what: FilePlan, progress: Progress) -> dict[str, str]:
    """Write the file, durably, and return the digest of every tensor by name.

    Raises:
        CheckpointError: a tensor cannot be read, or the header would be too long.
        OSError: the storage failed.
    """
    with HashingFile(target, progress) as file:
        file.write(_header(what))
        digests = {name: _append(file, entry) for name, entry in what.tensors.items()}
        file.sync_and_close()
    return digests


def read_back(path: Path, what: FilePlan, digests: Mapping[str, str], progress: Progress) -> None:
    """Read the file with the library and compare names, metadata and digests with what was written.

    Raises:
        CheckpointError: they differ, or the file cannot be read.
    """
    with ToldAs(CheckpointError, f"{path} cannot be read back", OSError, require().SafetensorError):
        with require().safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(digests) or dict(file.metadata() or {}) != dict(what.metadata):
                raise CheckpointError(f"{path} does not hold the names that were written")
            for name, digest in digests.items():
                tensor = file.get_tensor(name)
                if digest_of(tensor) != digest:
                    raise CheckpointError(f"{name} in {path} differs from what was written: check the disk")
                progress(tensor.nbytes)


def _append(file: HashingFile, entry: LazyTensor) -> str:
    """Write one tensor and return its digest. The tensor's memory is free afterwards."""
    tensor = entry.read()
    file.write(bytes_of(tensor))
    return digest_of(tensor)


def _weights(contents: WholeState) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    named: dict[str, LazyTensor] = {}
    left_out: list[str] = []
    for leaf in contents.below("model"):
        if isinstance(leaf.value, LazyTensor) and len(leaf.path) == 2:
            named[str(leaf.path[1])] = leaf.value
        else:
            left_out.append(leaf.key)
    return named, tuple(left_out)


def _moments(contents: WholeState, weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}
    for leaf in contents.below("optim"):
        if not isinstance(leaf.value, LazyTensor):
            continue
        plain = leaf.path[1] == "state" and len(leaf.path) == 4 and not leaf.int_keys and "." not in str(leaf.path[3])
        if not plain or leaf.key in weights:
            raise CheckpointError(
                f"{leaf.key} cannot be named in a safetensors file: use --to torch, or leave --optimizer out"
            )
        found[leaf.key] = leaf.value
    return found


def _encode_optimizer(contents: WholeState) -> str:
    root: dict[str, Any] = {}
    for leaf in contents.below("optim"):
        if not isinstance(leaf.value, LazyTensor):
            put(root, leaf.path, _plain(leaf), leaf.int_keys)
    return json.dumps(root.get("optim", {}), separators=(",", ":"))


def _plain(leaf: StateValue) -> Any:
    value = {_TUPLE: list(leaf.value)} if isinstance(leaf.value, tuple) else leaf.value
    with suppress(TypeError, ValueError):
        kept = not leaf.int_keys and _TUPLE not in leaf.path
        if kept and json.loads(json.dumps(value, allow_nan=False), object_hook=_tuples) == leaf.value:
            return value
    raise CheckpointError(f"{leaf.key} cannot be stored in a safetensors file: use --to torch")


def _untie(named: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    first: dict[Hashable, str] = {}
    stored: dict[str, LazyTensor] = {}
    tied: dict[str, str] = {}
    for name in sorted(named):
        kept = first.setdefault(named[name].identity, name)
        if kept == name:
            stored[name] = named[name]
        else:
            tied[name] = kept
    return stored, tied


def _header(what: FilePlan) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(what.metadata)}
    position = 0
    for name, entry in what.tensors.items():
        end = position + entry.nbytes
        header[name] = {"dtype": _dtype(name, entry), "shape": entry.shape, "data_offsets": (position, end)}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_MAX:
        raise CheckpointError(f"the header would have {len(text)} bytes, and the limit is {HEADER_MAX}: use --to torch")
    return len(text).to_bytes(8, "little") + text


def _dtype(name: str, entry: LazyTensor) -> str:
    spelled = str(entry.dtype).removeprefix("torch.")
    if spelled not in _DTYPES:
        raise CheckpointError(f"{name} has the dtype {spelled}, which safetensors does not support: use --to torch")
    return _DTYPES[spelled]


# --------------------------------------------------------------------------------------------------------- reading


def read_safetensors(path: Path) -> WholeState:
    """Read a file except for the content of its tensors, which stay mapped into memory.

    Raises:
        CheckpointError: the file is damaged, or its optimizer state does not have the form that the module describes.
    """
    safetensors = require()
    with ToldAs(CheckpointError, f"{path} cannot be read", OSError, safetensors.SafetensorError):
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - file is not a mapping
            metadata = dict(file.metadata() or {})
    if not tensors:
        raise CheckpointError(f"{path} holds no weights")
    with ToldAs(CheckpointError, f"the optimizer state of {path} cannot be understood", *GARBLED, reason=repr):
        return _contents(path, tensors, metadata)


def _contents(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> WholeState:
    optim = json.loads(metadata[_OPTIM], object_hook=_tuples) if _OPTIM in metadata else {}
    weights = {name: t for name, t in tensors.items() if not (optim and name.startswith(_STATE))}
    weights |= {name: weights[kept] for name, kept in metadata.items() if kept in weights and name not in tensors}
    found = [StateValue(("model", name), (), LazyTensor.of(tensor)) for name, tensor in sorted(weights.items())]
    for name in tensors.keys() - weights.keys():
        owner, _, key = name.removeprefix(_STATE).rpartition(".")
        found.append(StateValue(("optim", "state", owner, key), (), LazyTensor.of(tensors[name])))
    for owner, values in dict(optim.get("state", {})).items():
        found += [StateValue(("optim", "state", owner, key), (), value) for key, value in values.items()]
    for number, group in enumerate(optim.get("param_groups", [])):
        found += [StateValue(("optim", "param_groups", number, key), (), value) for key, value in group.items()]
    version = metadata.get(_VERSION)
    return WholeState(path.name, int(version) if version else None, tuple(found), metadata.get(_KIND, ""))


def _tuples(value: dict[str, Any]) -> Any:
    return tuple(value[_TUPLE]) if value.keys() == {_TUPLE} else value


def looks_like(head: bytes) -> bool:
    """Return whether a file that begins with these nine bytes is a safetensors file."""
    return len(head) >= 9 and 2 <= int.from_bytes(head[:8], "little") <= HEADER_MAX and head[8:9] == b"{"
