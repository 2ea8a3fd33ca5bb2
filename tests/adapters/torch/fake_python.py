"""What Python code sees of tensors on a made-up device: they say that they are on a CUDA device, and leave it slowly.

torch knows them as tensors on the host, so it does not tell ``fake_device.Watching`` of these calls. Code of torch
itself sees them as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_T: Any = Tensor


def _refuse(owner: Any, _one: Tensor) -> None:
    raise TypeError(f"can't convert {owner.name} device type tensor to numpy. Use Tensor.cpu() first")


_SAYS: dict[Any, Callable[[Any, Tensor], Any]] = {
    _T.device.__get__: lambda owner, _one: owner.name,
    _T.is_cuda.__get__: lambda _owner, _one: True,
    _T.is_cpu.__get__: lambda _owner, _one: False,
    _T.numpy: _refuse,
    _T.__array__: _refuse,
    _T.tolist: lambda owner, one: owner.left(one, "tolist()").tolist(),
}
"""What these methods and attributes are for a tensor on a device."""


class Saying(TorchFunctionMode):
    """While it is active, this thread sees memory of the devices as Python sees that of a real one.

    Args:
        devices: ``FakeDevice`` objects.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of_torch = str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")
        with torch._C.DisableTorchFunction():
            one: Any = args[0] if args and isinstance(args[0], Tensor) and args[0].layout is torch.strided else None
            owner = next((d for d in self._devices if one is not None and not one.is_meta and d.has(one)), None)
            if owner is not None and func is _T.__deepcopy__:
                return owner.made(func(*args, **kwargs))
            if not of_torch and func in (_T.to, _T.cpu):
                return self._moved(func, one, owner, args[1:], kwargs)
            if not of_torch and (there := self._named(kwargs.get("device"))) is not None:
                return there.made(func(*args, **{**kwargs, "device": "cpu"}))
            if not of_torch and owner is not None and func in _SAYS:
                return _SAYS[func](owner, one)
            return func(*args, **kwargs)

    def _named(self, device: Any) -> Any:
        return next((d for d in self._devices if device is not None and torch.device(device) == d.name), None)

    def _moved(self, func: Any, one: Any, owner: Any, args: Any, kwargs: Any) -> Any:
        """Do what ``to()`` and ``cpu()`` do."""
        given = (*args, *kwargs.values(), "cpu" if func is _T.cpu else None)
        device = next((torch.device(each) for each in given if isinstance(each, (str, torch.device))), None)
        dtype = next((each for each in given if isinstance(each, torch.dtype)), one.dtype)
        there = self._named(device)
        if owner is not None and (device is None or there is owner):
            return one.to(dtype)
        if owner is None and there is None:
            return func(one, *args, **kwargs)
        copied = (one.detach().clone() if owner is None else owner.left(one, func)).to(dtype)
        return copied if there is None else there.made(copied)
