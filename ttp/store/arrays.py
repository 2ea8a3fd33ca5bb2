"""Conversion of numpy arrays and torch tensors to plain lists of (dtype, shape, bytes) and back, for ``encoding``.

numpy and torch are imported only when one of their values is packed or made.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any

_NUMPY_KINDS = "biufcSUmM"
"""Kinds of dtype that can be stored: booleans, numbers, fixed-length strings, times; not objects, not records."""

_DIMENSIONS_MAX = 64
"""numpy's own limit. Without it the product of a forged shape with a million extents would take hours."""

_TORCH_DTYPE = re.compile(r"[a-z][a-z0-9_]{2,30}", re.ASCII)


class NotPlainError(Exception):
    """An array that cannot be described by a dtype, a shape and bytes alone."""


def may_be_apart(value: Any, least: int) -> bool:
    """Return whether ``value`` is an array whose bytes can be read directly from its memory.

    Args:
        value: any object.
        least: the smallest size in bytes for which that is worth it.

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
    """Return whether an array is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def memory_order(array: Any) -> list[int]:
    """Return the dimensions of an array as they lie in memory, the outermost first.

    The last bits of matrix products depend on it, so what is restored has to lie as it did.

    Args:
        array: a numpy array or a strided tensor.

    Returns:
        A permutation of the dimensions, those with one element first, as they lie nowhere; [] if the elements lie row
        by row, share memory, or lie backwards.
    """
    strides = array.stride() if is_tensor(array) else array.strides
    wide = [dimension for dimension, extent in enumerate(array.shape) if extent > 1]
    order = sorted(wide, key=lambda dimension: -strides[dimension])
    if order == wide or strides[order[-1]] <= 0 or 0 in array.shape:
        return []
    return [*(dimension for dimension in range(len(strides)) if dimension not in wide), *order]


def lay_out(array: Any, order: list[int]) -> Any:
    """Return an array, which lies row by row, with the dimensions in the order in memory that ``memory_order`` gave."""
    back = sorted(range(len(order)), key=order.__getitem__)
    if not is_tensor(array):
        return array.transpose(order).copy().transpose(back)
    array.data = array.data.permute(order).contiguous().permute(back)  # it stays a parameter
    return array


def pack_array(array: Any, index: int | None = None) -> list[Any]:
    """Describe a numpy array by values that msgpack can pack.

    Args:
        array: a ``numpy.ndarray``.
        index: if given, it takes the place of the bytes, which the caller stores elsewhere.

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
    """Make an array from the fields that ``pack_array`` returned.

    Args:
        fields: ``[dtype, shape, bytes]``.

    Returns:
        A writable ``numpy.ndarray`` in C order.

    Raises:
        ValueError: the bytes do not fit the shape, or the dtype is not a plain one.
    """
    import numpy

    name, shape, data = fields
    dtype = numpy.dtype(name)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"dtype {name!r} is not a plain one")
    _check_shape(shape, dtype.itemsize, data)
    return numpy.ndarray(tuple(shape), dtype, buffer=bytearray(data))


def pack_tensor(tensor: Any, index: int | None = None) -> list[Any]:
    """Describe a tensor by values that msgpack can pack.

    Args:
        tensor: a ``torch.Tensor`` or ``torch.nn.Parameter`` on any device.
        index: if given, it takes the place of the bytes, which the caller stores elsewhere. Only for tensors for which
            ``may_be_apart`` is true.

    Returns:
        ``[dtype, shape, bytes or index, requires_grad, is_parameter]``, and the device if that is not the CPU.

    Raises:
        NotPlainError: the tensor is of another subclass, is not strided, or has no data.
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
    flat = plain.as_strided((plain.numel(),), (1,))  # a tensor of one element may have any stride
    data = flat.view(torch.uint8).numpy().tobytes()
    return [dtype, shape, data, tensor.requires_grad, is_parameter, *_elsewhere(tensor.device)]


def unpack_tensor(fields: list[Any]) -> Any:
    """Make a tensor from the fields that ``pack_tensor`` returned.

    It is made on the CPU, except in a process that uses such a device as it was on: there it is put on that device, as
    ``torch.load`` does.

    Args:
        fields: ``[dtype, shape, bytes, requires_grad, is_parameter]``, and perhaps the device.

    Raises:
        ValueError: the bytes do not fit the shape, or torch has no such dtype or device.
    """
    import torch

    name, shape, data, requires_grad, is_parameter, *device = fields
    dtype = _dtype(name)
    _check_shape(shape, dtype.itemsize, data)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    tensor = flat.reshape(shape)
    if device and (here := _here(device[0])) is not None:
        tensor = tensor.to(here)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def pack_torch_word(value: Any) -> list[Any] | None:
    """Describe a ``torch.Size``, ``torch.dtype`` or ``torch.device`` by values that msgpack can pack.

    Returns:
        ``[name of the type, description]``, for ``unpack_torch_word``; None: it is none of them.
    """
    import torch

    if type(value) is torch.Size:
        return ["Size", list(value)]
    if type(value) is torch.dtype:
        return ["dtype", str(value).removeprefix("torch.")]
    if type(value) is torch.device:
        return ["device", *(_elsewhere(value) or ["cpu"])]
    return None


def unpack_torch_word(kind: str, described: Any) -> Any:
    """Make what ``pack_torch_word`` has described.

    Raises:
        ValueError: torch has no such thing.
    """
    import torch

    if kind == "dtype":
        return _dtype(described)
    if kind == "device":
        return _here(described) or torch.device(described)
    if kind != "Size":
        raise ValueError(f"torch has no {kind!r} that is stored")
    return torch.Size(described)


def _dtype(name: str) -> Any:
    """Return torch's dtype with this name. Raises ValueError if there is none."""
    import torch

    dtype = getattr(torch, name, None) if _TORCH_DTYPE.fullmatch(name) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


_home: dict[str, Any] = {}
"""The device of this process of each type, by the type's name."""


def set_home(device: Any) -> None:
    """Make this device, a ``torch.device``, the one on which tensors come back that were on the home device."""
    _home[device.type] = device


def home(kind: str) -> Any:
    """Return the home device of this type; None: there is none."""
    return _home.get(kind)


def _elsewhere(device: Any) -> list[str]:
    """Return the name of a device in a list, without its number if it is the process's home; CPU: []."""
    if device.type == "cpu":
        return []
    return [device.type if device == home(device.type) else str(device)]


def _here(name: Any) -> Any:
    """Return the device that a name from ``_elsewhere`` means in this process; None: the process does not use it.

    Raises:
        ValueError: it is no device's name.
    """
    import torch

    try:
        device: Any = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f"torch has no device {name!r}") from None
    library: Any = getattr(torch, device.type, None)
    if not getattr(library, "is_initialized", lambda: False)():
        return None
    if device.index is None:
        return home(device.type) or device
    return device if device.index < library.device_count() else None


def _check_shape(shape: list[int], itemsize: int, data: bytes) -> None:
    """Raise ValueError if a shape does not fit the bytes, before memory is allocated for it."""
    if len(shape) > _DIMENSIONS_MAX:
        raise ValueError(f"{len(shape)} dimensions are more than an array can have")
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(f"{shape} is not a shape")
    if math.prod(shape) * itemsize != len(data):
        raise ValueError(f"shape {shape} of {itemsize} bytes each does not fit {len(data)} bytes")
