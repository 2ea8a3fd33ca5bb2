"""Detects that the model holds other weights than those that training made: averages, put in for an evaluation.

ttp reads the weights in place. A program that evaluates an average of its weights often copies the average into the
model and takes it out again afterwards. A checkpoint that is made meanwhile would contain the average as the weights.
No hook reports such a swap. So a few bytes of the weights are noted twice in each step: when an update ends, and when
the next backward pass begins, or the gate is reached without one. The weights of training are the ones or the others;
any other value belongs to an evaluation.

The same is done with a frozen parameter: adapters such as LoRA are often merged into frozen weights for an evaluation.

Some programs change weights between updates on purpose (they clip them, or average them over ranks). If that is seen
during the first updates, those weights are not compared from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttp.adapters.torch.device.accelerator import Runtime, holder, poll
from ttp.adapters.torch.sharding.dtensor_chunks import is_distributed

_UPDATES_LEARNED = 5
_SAMPLES_MAX = 4
_BYTES = 64
_PATIENCE_S = 1.0
_AFTER, _BEFORE, _EVALUATED, _NOW = range(2 * _UPDATES_LEARNED, 2 * _UPDATES_LEARNED + 4)
"""Rows: after the last update, before the backward pass, in the last evaluation, and at a look. The rows before these
hold what was noted in the first updates: after each of them, and before the next one."""
_ROWS = _NOW + 1


class _Sample(NamedTuple):
    """Some bytes of a parameter, and what they were.

    Args:
        parameter: returns the memory of the parameter on this rank.
        address: the address of the parameter when the sample was made.
        live: the bytes; those of a device as a tensor.
        rows: what the bytes were: ``bytes``, or memory of the device, which may be behind its host.
        runtime: the device of the parameter; None: the host.
        pinned: page-locked memory for all rows of a device.
        frozen: whether the parameter is not trained.
    """

    parameter: Callable[[], Tensor]
    address: int
    live: Any
    rows: list[Any]
    runtime: Runtime | None
    pinned: list[Tensor]
    frozen: bool

    def moved(self) -> bool:
        """Return whether the parameter has other memory now."""
        return self.parameter().data_ptr() != self.address

    def note(self, row: int) -> None:
        """Keep the bytes in a row. For the training thread; on a device it is done in the order of its work."""
        if self.runtime is None:
            self.rows[row] = bytes(self.live)
        else:
            self.rows[row].copy_(self.live)

    def look(self) -> list[bytes]:
        """Return all rows, the present bytes among them, past the work that is queued on a device.

        Raises:
            TimeoutError: they did not leave the device in time.
        """
        if self.runtime is None:
            self.note(_NOW)
            return self.rows
        with self.runtime.on_side():
            for to, row in zip(self.pinned, [*self.rows[:_NOW], self.live], strict=True):
                to.copy_(row, non_blocking=True)
        if not poll(self.runtime.mark(side=True).query, _PATIENCE_S):
            raise TimeoutError(f"some bytes of the weights did not leave the device in {_PATIENCE_S:g} s")
        return [bytes(row.numpy().data) for row in self.pinned]


class Swapped:
    """Tells whether the model holds other weights than those of training.

    Args:
        optimizers: the optimizers that train the model.
        parameters: the model's parameters by name.
        runtimes: the devices of the model; empty: it is on the host. Memory is allocated here.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer], parameters: Mapping[str, Tensor], runtimes: Sequence[Runtime]
    ) -> None:
        chosen = [parameter for each in optimizers for parameter in _chosen(each)][:_SAMPLES_MAX]
        chosen += _beside(chosen, parameters)
        self._samples = [_sample(parameter, runtimes) for parameter in chosen]
        self._updates = -1  # the program may still load weights before the first one
        self._used = True  # training has used the weights since the last update
        self.evaluations = 0
        """Number of forward passes without gradients so far."""
        self.updated()
        self._note(_BEFORE)

    # --------------------------------------------------------------------------------------------- training thread

    def updated(self) -> None:
        """Note the weights that an update, or a restore, has made."""
        self._note(_AFTER)
        if self._learns:
            self._note(self._updates)
        self._used = False

    def used(self) -> None:
        """Note the weights that training uses: a backward pass begins, or the next update."""
        if not self._used:
            self._note(_BEFORE)
            if self._learns:
                self._note(_UPDATES_LEARNED + self._updates)
            self._updates += 1
            self._used = True

    def evaluates(self) -> None:
        """Note the weights that a forward pass without gradients uses."""
        for sample in self._samples:
            (_again(sample) if sample.moved() else sample).note(_EVALUATED)
        self.evaluations += 1

    @property
    def _learns(self) -> bool:
        return 0 <= self._updates < _UPDATES_LEARNED

    def _note(self, row: int) -> None:
        for number, sample in enumerate(self._samples):
            if sample.moved():
                self._samples[number] = _again(sample)
            self._samples[number].note(row)

    # -------------------------------------------------------------------------------------------------- any thread

    def now(self) -> bool:
        """Return whether the model holds other weights now.

        Raises:
            TimeoutError: a device did not answer in time.
        """
        return self._holds_others(_NOW)

    def since(self, evaluations: int) -> bool:
        """Return whether the model holds other weights, or did so in an evaluation after the first ``evaluations``."""
        return self.now() or (self.evaluations > evaluations and self._holds_others(_EVALUATED))

    def _holds_others(self, row: int) -> bool:
        for sample in self._samples:
            rows = sample.look()
            if self._is_compared(sample, rows) and (sample.moved() or rows[row] not in (rows[_AFTER], rows[_BEFORE])):
                return True
        return False

    def _is_compared(self, sample: _Sample, rows: Sequence[bytes]) -> bool:
        """Return whether the program was not seen to change these weights between updates.

        A frozen parameter, which may be a momentum encoder, is compared once it has stood still after an update.
        """
        seen = range(min(self._updates, _UPDATES_LEARNED))
        return bool(seen or not sample.frozen) and all(rows[n] == rows[_UPDATES_LEARNED + n] for n in seen)


def _chosen(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the last vector and the last matrix: unlike rows of an embedding, both change in almost every update."""
    seen = set[bool]()
    for parameter in reversed([p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]):
        if _is_plain(parameter) and (parameter.dim() > 1) not in seen:
            seen.add(parameter.dim() > 1)
            yield parameter


def _beside(chosen: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the frozen parameter that is nearest to a chosen matrix, as an adapted weight is to its adapter."""
    trained = [name for name, p in parameters.items() if p.dim() > 1 and any(p is each for each in chosen)]
    frozen = [name for name, p in parameters.items() if not p.requires_grad and p.dim() > 1 and _is_plain(p)]
    pairs = [(_shared(one, other), other) for one in trained for other in frozen]
    return [parameters[max(pairs)[1]]] if pairs else []


def _shared(one: str, other: str) -> int:
    """Return the number of modules that contain both parameters."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split("."), strict=False))
    )


def _is_plain(parameter: Tensor) -> bool:
    memory = _memory_of(parameter)()
    plain = type(memory) in (Tensor, nn.Parameter) and memory.layout is torch.strided and memory.device.type != "meta"
    return plain and memory.numel() > 0 and memory.is_contiguous()


def _memory_of(parameter: Tensor) -> Callable[[], Tensor]:
    if is_distributed(parameter):
        return lambda: parameter._local_tensor  # type: ignore[attr-defined]  # of a DTensor
    return lambda: parameter


def _sample(parameter: Tensor, runtimes: Sequence[Runtime]) -> _Sample:
    memory = (here := _memory_of(parameter))()
    runtime, count = holder(runtimes, memory), _bytes_of(memory).numel()
    rows: list[Any] = [b""] * _ROWS
    pinned: list[Tensor] = []
    if runtime is not None:
        rows = list(torch.split(runtime.on_device(_ROWS * count).zero_(), count))
        pinned = list(torch.split(runtime.pinned(_ROWS * count), count))
    return _again(_Sample(here, 0, None, rows, runtime, pinned, not parameter.requires_grad))


def _again(sample: _Sample) -> _Sample:
    """Return the sample with the memory that the parameter has now."""
    memory = sample.parameter()
    live = _bytes_of(memory)
    return sample._replace(address=memory.data_ptr(), live=live if sample.runtime is not None else live.numpy().data)


def _bytes_of(memory: Tensor) -> Tensor:
    """Return bytes from the middle of a tensor, without a copy."""
    flat = memory.detach().view(-1)
    count = min(flat.numel(), max(1, _BYTES // flat.element_size()))
    begin = (flat.numel() - count) // 2
    return flat[begin : begin + count].view(torch.uint8)
