"""Parameters as plain memory of the host, so that any thread can read them whatever the training thread hangs in.

In PyNative mode nearly everything that is asked of a Parameter first waits for the launched kernels, a collective that
will never end among them. But on CPU ``Parameter.asnumpy()`` is a view of the very memory that the kernels write to. So
the views are taken while training goes on, and read when it does not. MindSpore may move a parameter (it does so when a
network is first run): addresses are looked at again after updates.

On other devices ``asnumpy()`` is a copy; there parameters are copied when they are saved, on a stream of their own, as
MindSpore's own ``TrainFaultTolerance`` does. That was written for Ascend and not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, context, hal

from ttp.errors import ConfigError

_LOOKS = 3
"""Updates after which every address is looked at; later a few per update."""
_SHARE = 16


@dataclass(frozen=True, slots=True)
class Held:
    """One parameter as it lies in memory.

    Args:
        name: of it, as in MindSpore's checkpoints.
        dtype: MindSpore's name of its type, such as ``Float32``.
        shape: of it.
        array: its elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    array: Any

    @property
    def memory(self) -> memoryview:
        """Its bytes, without a copy."""
        return memoryview(self.array.reshape(-1).view(np.uint8))


class Memory:
    """The parameters of a training network. ``look`` and ``again`` belong to the training thread.

    Args:
        parameters: all of them.

    Raises:
        ConfigError: one has no plain memory.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self._parameters: dict[str, Parameter] = {}
        for parameter in parameters:
            if not isinstance(parameter, Parameter) or type(parameter).__name__ == "MapParameter":
                raise ConfigError(f"parameter {getattr(parameter, 'name', parameter)!r} is a hash table: not supported")
            other = self._parameters.setdefault(parameter.name, parameter)
            if other is not parameter:
                raise ConfigError(f"two parameters are called {parameter.name!r}: give one another name")
        self._on_host = context.get_context("device_target") == "CPU"
        self._looks = 0
        self._next = 0
        self._names = list(self._parameters)
        self.held: Mapping[str, Held] = {}
        self.look()

    @property
    def on_host(self) -> bool:
        """Whether views show what the kernels write."""
        return self._on_host

    def look(self) -> None:
        """Take the view of every parameter."""
        self.held = {name: self._take(parameter) for name, parameter in self._parameters.items()}

    def again(self) -> None:
        """After an update: take the views again if parameters have moved."""
        if not self._on_host:
            return
        self._looks += 1
        names = self._names
        if self._looks > _LOOKS:
            names = [self._names[(self._next + i) % len(self._names)] for i in range(min(_SHARE, len(self._names)))]
            self._next = (self._next + len(names)) % len(self._names)
        if any(self._parameters[name].data_ptr() != _address(self.held[name].array) for name in names):
            self.look()

    def of(self, name: str) -> Held:
        """The parameter now, from any thread."""
        held = self.held[name]
        if self._on_host:
            return held
        return Held(name, held.dtype, held.shape, _from_device(self._parameters[name]))

    def parameter(self, name: str) -> Parameter:
        """The live one."""
        return self._parameters[name]

    def _take(self, parameter: Parameter) -> Held:
        if parameter.has_init:
            parameter.init_data()
        array = parameter.asnumpy() if self._on_host else np.empty(0)
        return Held(parameter.name, str(parameter.dtype), tuple(parameter.shape), array)


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _from_device(parameter: Parameter) -> Any:
    """A copy, past the stream on which training may hang."""
    stream = hal.Stream()
    with hal.StreamCtx(stream):
        copied = Tensor(parameter.move_to("CPU", False))
    stream.synchronize()
    return copied.asnumpy()
