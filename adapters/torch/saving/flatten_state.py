"""Flattens a nested state into a list of values with paths, by the rules of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import ctypes
import io
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ttp.adapters.torch.saving.piece_index import StatePath

ToHost = Callable[[Tensor], Tensor]
"""Returns a tensor's content on the host: the tensor itself if it is on the host, else a copy, whose memory the caller
may free."""
PLAIN = (bool, int, float, str, type(None))
_TYPED = (Counter, OrderedDict)
"""Types of mappings, other than dict, that torch loads with ``weights_only=True``."""
_OF_CONTENT = {"model": 2, "extra": 3, "optim": 4}
"""Least number of steps in the path of a value that a module or an optimizer has, by the first step."""


class StateValue(NamedTuple):
    """One value of a nested state.

    Args:
        path: path of the value in the state.
        int_keys: positions in ``path`` at which the mapping's key is an ``int``.
        value: the value.
    """

    path: StatePath
    int_keys: tuple[int, ...]
    value: Any

    @property
    def key(self) -> str:
        """The flattened name of the value."""
        return ".".join(map(str, self.path))


def leaves(state: Mapping[Any, Any]) -> Iterator[StateValue]:
    """Yield every value of a nested state.

    Mappings are flattened, lists only if they hold a tensor or another flattened container, tuples never. Other than in
    stock torch, a mapping is a value if its keys cannot be told from their texts (a tuple; ``1`` beside ``"1"``), or if
    it belongs to a module or an optimizer and is empty, or a Counter or OrderedDict of numbers and texts: these have to
    get back what they had.
    """
    for key, value in list(state.items()):
        yield from _visit((str(key),), (0,) if type(key) is int else (), value)


def _visit(path: StatePath, int_keys: tuple[int, ...], value: Any) -> Iterator[StateValue]:
    if isinstance(value, Mapping):
        if not _has_lasting_keys(value) or (_is_of_content(path) and _is_small(value)):
            yield StateValue(path, int_keys, value if type(value) in _TYPED else dict(value))
            return
        for key, inner in list(value.items()):
            yield from _visit((*path, str(key)), (*int_keys, len(path)) if type(key) is int else int_keys, inner)
    elif _is_leaf(value):
        yield StateValue(path, int_keys, value)
    else:
        for index, inner in enumerate(value):
            yield from _visit((*path, index), int_keys, inner)


def _is_of_content(path: StatePath) -> bool:
    """Return whether a module or an optimizer has the value at ``path``."""
    return len(path) >= _OF_CONTENT.get(str(path[0]), len(path) + 1)


def _is_small(value: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is stored as one value: it is empty, or has a type to keep and only plain values."""
    return not value or (type(value) in _TYPED and all(type(inner) in PLAIN for inner in value.values()))


def _has_lasting_keys(value: Mapping[Any, Any]) -> bool:
    """Return whether the keys can be made again from their texts, as ``put`` does."""
    keys = list(value)
    return {str, int}.issuperset(map(type, keys)) and len(set(map(str, keys))) == len(keys)


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return True
    return not any(isinstance(entry, Tensor) or not _is_leaf(entry) for entry in value)


def put(root: MutableMapping[Any, Any], path: StatePath, value: Any, int_keys: Sequence[int] = ()) -> None:
    """Set ``value`` at ``path`` in a nested state; make missing mappings and lists. Inverse of :func:`leaves`."""
    node: Any = root
    for depth, step in enumerate(path):
        key: Any = int(step) if depth in int_keys else step
        if isinstance(node, list):
            node.extend([None] * (int(step) + 1 - len(node)))
        if depth == len(path) - 1:
            node[key] = value
            return
        if (node[key] is None) if isinstance(node, list) else (key not in node):
            node[key] = [] if isinstance(path[depth + 1], int) else {}
        node = node[key]


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the same elements and a storage of only their bytes: ``torch.save`` writes whole storages.

    ``tensor`` is strided and on the CPU. A contiguous view is not copied: the result uses the memory of ``tensor``,
    which must outlive the result.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.is_contiguous():
        return tensor.contiguous()
    if tensor.nbytes == 0:
        return torch.empty_like(tensor)
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def dump(value: Any, to_host: ToHost) -> bytes | None:
    """Encode ``value`` as bytes that ``torch.load(..., weights_only=True)`` reads; None if that is not possible.

    Returns None also if pickling the value raises: one unusual setting must not prevent the whole checkpoint. So it
    does for a mapping by tensors (parameters): they would come back as other tensors, under which nobody looks.
    Numpy scalars, also as keys, become Python numbers: schedules that compute with numpy leave them in
    ``param_groups``, and torch refuses to load them.
    """
    buffer = io.BytesIO()
    try:
        torch.save(_portable(value, to_host), buffer)
        if type(value) not in PLAIN:  # of a subclass, such as an Enum, torch would have to load the class
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception:
        return None
    return buffer.getvalue()


def _portable(value: Any, to_host: ToHost) -> Any:
    if isinstance(value, Tensor):
        return whole(to_host(value.detach()))
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    if type(value) in (list, tuple, set):
        return type(value)(_portable(entry, to_host) for entry in value)
    if type(value) in (dict, *_TYPED):
        if any(isinstance(key, Tensor) for key in value):
            raise TypeError("a tensor as a key comes back as another key")
        return type(value)({_portable(key, to_host): _portable(entry, to_host) for key, entry in value.items()})
    return value
