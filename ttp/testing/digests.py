"""Digests of states, to compare two runs bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any


def digest(state: Any) -> str:
    """Return the SHA-256 of nested mappings and lists of tensors and plain values, as 64 hexadecimal digits.

    Mappings are taken in the order of their keys. Of a tensor, dtype, shape and every bit count; of a distributed
    tensor, those of the local part. Tensors on a device have to be brought to the host first.
    """
    hashed = hashlib.sha256()
    for name, found in leaves(state):
        hashed.update(name.encode())
        value = found.to_local() if hasattr(found, "to_local") else found
        if hasattr(value, "untyped_storage"):
            hashed.update(f"{value.dtype}{tuple(value.shape)}".encode() + _bytes(value))
        else:
            hashed.update(repr(value).encode())
    return hashed.hexdigest()


def leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a nested state that is no container, with its path of keys."""
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from leaves(state[key], f"{name}.{key}")
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            yield from leaves(value, f"{name}.{index}")
    else:
        yield name, state


def _bytes(tensor: Any) -> bytes:
    import torch

    data: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data
