"""Gives access to parameters as plain memory of the host, for any thread, even while the training thread hangs.

In PyNative mode nearly every method of a Parameter first waits for the launched kernels, among them perhaps a
collective that will never end. But on CPU ``Parameter.asnumpy()`` is a view of the memory that the kernels write to. So
the views are taken while training runs, and read when it is frozen or hangs. MindSpore may move a parameter (it does so
when a network first runs), so the addresses are checked after updates.

On other devices ``asnumpy()`` is a copy. There a parameter is copied when it is saved, on a device stream of its own,
as in MindSpore's own ``TrainFaultTolerance``. That part was written for Ascend and has not been run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, context, hal
from mindspore.train.serialization import tensor_to_ms_type

from ttp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParameterMemory:
    """One parameter and its memory.

    Args:
        name: name of the parameter, as in MindSpore's checkpoints.
        dtype: MindSpore's name of the element type, such as ``Float32``.
        shape: shape of the parameter.
        array: the elements as a numpy array; empty on a device, where ``Memory.of`` copies them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    array: Any

    @property
    def memory(self) -> memoryview:
        """The bytes of the elements, without a copy."""
        return memoryview(self.array.reshape(-1).view(np.uint8))


class Memory:
    """Gives access to the memory of all parameters of a training network.

    ``look`` and ``again`` are for the training thread, the rest is for any thread.

    Args:
        parameters: all parameters of the network.

    Raises:
        ConfigError: a parameter has no plain memory, MindSpore could not load it again, or two have the same name.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self._parameters: dict[str, Parameter] = {}
        for parameter in parameters:
            if not isinstance(parameter, Parameter) or type(parameter).__name__ == "MapParameter":
                raise ConfigError(
                    f"parameter {getattr(parameter, 'name', parameter)!r} is a hash table, which ttp cannot save"
                )
            if str(parameter.dtype) not in tensor_to_ms_type or tuple(parameter.shape) == (0,):
                raise ConfigError(
                    f"parameter {parameter.name!r} is {parameter.dtype}{list(parameter.shape)}, which "
                    "mindspore.load_checkpoint cannot read from a file: keep complex numbers as two parameters, and "
                    "leave empty parameters out"
                )
            other = self._parameters.setdefault(parameter.name, parameter)
            if other is not parameter:
                raise ConfigError(f"two parameters are called {parameter.name!r}: give each parameter its own name")
        self.on_host = context.get_context("device_target") == "CPU"
        """Whether the parameters lie on the host, where the views show the memory that the kernels write to."""
        self._addresses: list[int] = []
        self.held: Mapping[str, ParameterMemory] = {}
        self.look()

    def look(self) -> None:
        """Take the view of every parameter."""
        self.held = {name: self._take(parameter) for name, parameter in self._parameters.items()}
        self._addresses = [int(held.array.__array_interface__["data"][0]) for held in self.held.values()]

    def again(self) -> None:
        """Take the views again if MindSpore or the program has moved a parameter. Call it at each update."""
        if self.on_host and [parameter.data_ptr() for parameter in self._parameters.values()] != self._addresses:
            self.look()

    def of(self, name: str) -> ParameterMemory:
        """Return the present elements of the parameter ``name``. For any thread."""
        held = self.held[name]
        if self.on_host:
            return held
        return ParameterMemory(name, held.dtype, held.shape, _from_device(self._parameters[name]))

    def parameter(self, name: str) -> Parameter:
        """Return the live parameter."""
        return self._parameters[name]

    def _take(self, parameter: Parameter) -> ParameterMemory:
        if parameter.has_init:
            parameter.init_data()
        array = parameter.asnumpy() if self.on_host else np.empty(0)
        return ParameterMemory(parameter.name, str(parameter.dtype), tuple(parameter.shape), array)


def _from_device(parameter: Parameter) -> Any:
    """Return a copy on the host, made on a device stream of its own: the training's stream may hang."""
    stream = hal.Stream()
    with hal.StreamCtx(stream):
        copied = Tensor(parameter.move_to("CPU", False))
    stream.synchronize()
    return copied.asnumpy()
