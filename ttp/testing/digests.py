"""Digests of states, to compare two runs bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any


def digest(state: Any) -> str:
    """Return the SHA-256 of nested mappings and lists of tensors and plain values, as 64 hexadecimal digits.

    Mappings are hashed in the order of their keys. A tensor is hashed with its dtype, shape and bytes, on whatever
    device it is; a distributed tensor with those of its local part; an array of numpy likewise.
    """
    hashed = hashlib.sha256()
    for name, found in leaves(state):
        hashed.update(name.encode())
        value = found.to_local() if hasattr(found, "to_local") else found
        if hasattr(value, "untyped_storage"):
            from ttp.adapters.torch.tensor_memory import copied_bytes

            hashed.update(f"{value.dtype}{tuple(value.shape)}".encode() + copied_bytes(value.cpu()))
        elif not getattr(getattr(value, "dtype", None), "hasobject", True):  # the repr of an array leaves bits out
            hashed.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        else:
            hashed.update(repr(value).encode())
    return hashed.hexdigest()


_PLAIN = {int, float, bool, str, bytes, type(None)}


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path of keys, value) for every value of a nested state that is not a dict, list or tuple.

    A list of plain values, such as the 625 numbers of a random stream, is one value: a tuple.
    """
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from leaves(state[key], f"{name}.{key}")
    elif isinstance(state, (list, tuple)) and state and _PLAIN.issuperset(map(type, state)):
        yield name, tuple(state)
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            yield from leaves(value, f"{name}.{index}")
    else:
        yield name, state
