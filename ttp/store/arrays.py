"""Arrays of numpy and torch as plain lists of (dtype, shape, bytes), for ``encoding``.

The libraries are imported when one of their values is there to be packed or made, never before.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any

_NUMPY_KINDS = "biufcSUmM"
"""Booleans, numbers, fixed-length strings, times. Not objects (pickle) and not records."""

_DIMENSIONS_MAX = 64
"""numpy's own limit. The product of a million extents would take hours."""

_TORCH_DTYPE = re.compile(r"[a-z][a-z0-9_]{2,30}", re.ASCII)


class NotPlainError(Exception):
    """This array cannot be described by a dtype, a shape and bytes alone."""


def may_be_apart(value: Any, least: int) -> bool:
    """Whether the bytes of an array can be taken from its memory as they lie there.

    Args:
        value: any object.
        least: bytes; smaller arrays are not worth it.

    Returns:
        True for a numpy array or a CPU tensor of at least that size whose elements lie in order and without gaps.
    """
    if (torch := sys.modules.get("torch")) is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
        return (
            value.device.type == "cpu"
            and value.layout is torch.strided
            and value.numel() * value.element_size() >= least
            and value.is_contiguous()
            and not (value.is_quantized or value.is_conj() or value.is_neg())
        )
    if (numpy := sys.modules.get("numpy")) is not None and type(value) is numpy.ndarray:
        return bool(value.nbytes >= least and value.dtype.kind in _NUMPY_KINDS and value.flags.c_contiguous)
    return False


def is_tensor(value: Any) -> bool:
    """Whether an array is one of torch's."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def pack_array(array: Any, index: int | None = None) -> list[Any]:
    """Describe a numpy array by values that msgpack knows.

    Args:
        array: a ``numpy.ndarray``.
        index: if given, it stands in the place of the bytes, which the caller stores elsewhere.

    Returns:
        ``[dtype, shape, bytes]``, or ``[dtype, shape, index]``.

    Raises:
        NotPlainError: its dtype holds objects or records.
    """
    if array.dtype.kind not in _NUMPY_KINDS:
        raise NotPlainError(
            f"numpy array of dtype {array.dtype}; only numbers, booleans, strings and times can be stored"
        )
    return [array.dtype.str, list(array.shape), array.tobytes() if index is None else index]


def unpack_array(fields: list[Any]) -> Any:
    """Make the array of what ``pack_array`` returned.

    Args:
        fields: ``[dtype, shape, bytes]``.

    Returns:
        A writable ``numpy.ndarray`` in C order.

    Raises:
        ValueError: bytes and shape do not fit.
    """
    import numpy

    name, shape, data = fields
    dtype = numpy.dtype(name)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"dtype {name!r} is not a plain one")
    _check_shape(shape, dtype.itemsize, data)
    return numpy.ndarray(tuple(shape), dtype, buffer=bytearray(data))


def pack_tensor(tensor: Any, index: int | None = None) -> list[Any]:
    """Describe a tensor by values that msgpack knows.

    Args:
        tensor: a ``torch.Tensor`` or ``torch.nn.Parameter`` on any device.
        index: if given, it stands in the place of the bytes, which the caller stores elsewhere. Only for tensors for
            which ``may_be_apart`` is true.

    Returns:
        ``[dtype, shape, bytes, requires_grad, is_parameter]``.

    Raises:
        NotPlainError: it is of another subclass, or not strided, or has no data.
    """
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise NotPlainError(
            f"{type(tensor).__module__}.{type(tensor).__qualname__}; give the local torch.Tensor instead"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise NotPlainError(
            f"tensor with layout {tensor.layout} on {tensor.device}; only strided ones with data can be stored"
        )
    is_parameter = type(tensor) is torch.nn.Parameter
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    if index is not None:
        return [dtype, shape, index, tensor.requires_grad, is_parameter]
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return [dtype, shape, data, tensor.requires_grad, is_parameter]


def unpack_tensor(fields: list[Any]) -> Any:
    """Make the tensor of what ``pack_tensor`` returned, on the CPU.

    Args:
        fields: ``[dtype, shape, bytes, requires_grad, is_parameter]``.

    Raises:
        ValueError: bytes and shape do not fit, or there is no such dtype.
    """
    import torch

    name, shape, data, requires_grad, is_parameter = fields
    dtype = getattr(torch, name, None) if _TORCH_DTYPE.fullmatch(name) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    _check_shape(shape, dtype.itemsize, data)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _check_shape(shape: list[int], itemsize: int, data: bytes) -> None:
    """Refuse a shape that does not fit the bytes, before memory is allocated for it."""
    if len(shape) > _DIMENSIONS_MAX:
        raise ValueError(f"{len(shape)} dimensions are more than an array can have")
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(f"{shape} is not a shape")
    if math.prod(shape) * itemsize != len(data):
        raise ValueError(f"shape {shape} of {itemsize} bytes each does not fit {len(data)} bytes")
