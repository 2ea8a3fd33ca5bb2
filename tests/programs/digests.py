"""A state as a few characters: two are equal when all bits are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest(value: Any) -> str:
    found = hashlib.sha256()
    feed(found, value)
    return found.hexdigest()[:16]


def feed(found: Any, value: Any) -> None:
    """All bits of a state."""
    if isinstance(value, Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        plain = local.detach().contiguous()
        found.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        found.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, entry in sorted(value.items(), key=lambda item: str(item[0])):
            found.update(str(key).encode())
            feed(found, entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            feed(found, entry)
    else:
        found.update(repr(value).encode())
