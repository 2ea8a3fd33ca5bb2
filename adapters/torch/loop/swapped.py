"""Detects that the model holds other weights than those that training made: averages, put in for an evaluation.

ttp reads the weights in place. A program that evaluates an average of its weights often copies the average into the
model and takes it out again afterwards. A checkpoint that is made meanwhile would contain the average as the weights.
No hook reports such a swap. So a few bytes of the weights are noted in each step: when an update ends, and when the
next forward pass in training begins, which may wait for other ranks. The backward pass, or the gate, notes them once
more, because layers may change their weights in the forward pass. The weights of training are the first or the last of
these; any other value belongs to an evaluation.

The same is done with a frozen parameter: adapters such as LoRA are often merged into frozen weights for an evaluation.

Schedule-free optimizers move the weights themselves, and their param groups tell when they have.

Some programs change weights between updates on purpose (they clip them, or average them over ranks). If that is seen
during the first updates, those weights are not compared from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ttp.adapters.torch.device.accelerator import Event, Runtime, holder, poll
from ttp.adapters.torch.loop.misuse import capturing
from ttp.adapters.torch.sharding.dtensor_chunks import is_distributed, local
from ttp.adapters.torch.sharding.exchange import tells
from ttp.adapters.torch.sharding.names import parameters_of
from ttp.adapters.torch.tensor_memory import flat_bytes, is_plain

log = logging.getLogger("ttp.adapters.torch")

_GIVEN_UP = (
    "the weights could not be noted; training goes on, but if a rank fails while averages are in the model, for an "
    "evaluation, these may be saved"
)
_EVALUATES_OTHERS = (
    "the model is evaluated while %s.eval() has put other weights into it: a rank that is among them when another one "
    "fails cannot be saved, and if all are, nothing can be. Evaluate a copy instead: "
    "model_copy, optimizer_copy = copy.deepcopy((model, optimizer)); optimizer_copy.eval()"
)
_UPDATES_LEARNED = 5
_SAMPLES_MAX = 4
_BYTES = 64
_PATIENCE_S = 1.0
_EARLY_S = 60.0
_AFTER, _BEFORE, _EVALUATED, _NOW = range(2 * _UPDATES_LEARNED, 2 * _UPDATES_LEARNED + 4)
"""Rows: after the last update, before the backward pass, in the last evaluation, and at a look. The rows before these
hold what was noted in the first updates: after each of them, and before the next one."""
_ROWS = _NOW + 1


class _Sample(NamedTuple):
    """Some bytes of a parameter.

    Args:
        parameter: the parameter, which has another memory on each rank if it is sharded.
        pointer: returns the address of its memory on this rank.
        frozen: whether the parameter is not trained.
        runtime: the device of the parameter; None: the host.
        zeros: what stands for the bytes while the memory has another form than at the start.
        pinned: page-locked memory for all rows of a device.
    """

    parameter: Tensor
    pointer: Callable[[], int]
    frozen: bool
    runtime: Runtime | None
    zeros: Tensor
    pinned: list[Tensor]

    def live(self) -> Tensor:
        """Return the bytes, without a copy."""
        memory = local(self.parameter)
        if not _is_plain(memory) or memory.device != self.zeros.device:
            return self.zeros
        bytes_now = _bytes_of(memory)
        return bytes_now if len(bytes_now) == len(self.zeros) else self.zeros


class _Noted:
    """Some bytes of a few parameters, noted at several moments: a row holds those of all samples at one moment.

    Args:
        parameters: the parameters.
        runtimes: the devices of the model; empty: it is on the host. Memory is allocated here.
    """

    def __init__(self, parameters: Iterable[Tensor] = (), runtimes: Sequence[Runtime] = ()) -> None:
        samples = [_sample(parameter, runtimes) for parameter in parameters]
        self._on_host = [sample for sample in samples if sample.runtime is None]
        self._on_device = [sample for sample in samples if sample.runtime is not None]
        self.samples = *self._on_host, *self._on_device
        self._pointers = [sample.pointer for sample in self.samples]
        self._host_rows: list[list[bytes]] = [[b""] * len(self._on_host)] * _ROWS
        self._device_rows = _device_rows(self._on_device)
        self._places = self._found() if self.samples else ([], [], [])

    def _found(self) -> tuple[list[int], list[memoryview], list[Tensor]]:
        """Return the addresses of the parameters, and the bytes of those on the host and on devices, without a copy."""
        host = [sample.live().numpy().data for sample in self._on_host]
        return [pointer() for pointer in self._pointers], host, [sample.live() for sample in self._on_device]

    def note(self, row: int, *, aside: bool = False) -> None:
        """Keep the bytes in a row, in the order of a device's work; ``aside``: this memory may be used now only."""
        before = self._places
        if [pointer() for pointer in self._pointers] != before[0]:
            self._places = self._found()
        _, host, device = self._places
        self._host_rows[row] = [*map(bytes, host)]
        if device:
            torch._foreach_copy_(self._device_rows[row], device)
        if aside:
            self._places = before

    def events(self) -> list[Event]:
        """Return an event of each device behind its work so far."""
        runtimes = {id(sample.runtime): sample.runtime for sample in self._on_device if sample.runtime is not None}
        return [runtime.event(side=False) for runtime in runtimes.values()]

    def looked_at(self) -> Iterator[tuple[_Sample, bool, Sequence[bytes]]]:
        """Yield each sample, whether it has moved, and all its rows, past the work that is queued on a device.

        The last row has the present bytes in the memory that was noted last, but for ``aside``.

        Raises:
            TimeoutError: they did not leave the device in time.
        """
        addresses, host, device = self._places
        moved = (sample.pointer() != address for sample, address in zip(self.samples, addresses, strict=True))
        rows_of_host = zip(*self._host_rows[:_NOW], [*map(bytes, host)], strict=True)
        yield from zip(self._on_host, moved, rows_of_host, strict=False)
        for number, sample in enumerate(self._on_device):
            assert sample.runtime is not None
            with sample.runtime.on_side():
                rows = [row[number] for row in self._device_rows[:_NOW]]
                for to, row in zip(sample.pinned, [*rows, device[number]], strict=True):
                    to.copy_(row, non_blocking=True)
            if not poll(sample.runtime.event(side=True).query, _PATIENCE_S):
                raise TimeoutError(f"some bytes of the weights did not leave the device in {_PATIENCE_S:g} s")
            yield sample, next(moved), [bytes(row.numpy().data) for row in sample.pinned]


class Swapped:
    """Tells whether the model holds other weights than those of training.

    Args:
        optimizers: the optimizers that train the model.
        parameters: the model's parameters by name.
        runtimes: the devices of the model; empty: it is on the host. Memory is allocated here.
        reduced: identities of the parameters that a DistributedDataParallel keeps equal on all ranks.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        parameters: Mapping[str, Tensor],
        runtimes: Sequence[Runtime],
        reduced: Collection[int] = (),
    ) -> None:
        self._optimizers = tuple(optimizers)
        self.parameters = (*parameters.values(),)
        """All parameters of the model."""
        given = [[*parameters_of(each)] for each in self._optimizers]
        chosen = [parameter for each in given for parameter in _chosen(each)][:_SAMPLES_MAX]
        others = _chosen([p for each in given for p in each if id(p) not in reduced])
        chosen += [other for other in others if not any(other is each for each in chosen)]
        self._noted = _Noted([*chosen, *_beside(chosen, parameters)], runtimes)
        self._updates = -1  # updates whose weights training has used; the weights before the first may be loaded late
        self._used = True  # training has used the weights since the last update
        self._learned: list[Event] = []  # events of the devices after the first updates
        self._others_evaluated = 0  # the value of ``evaluations`` at the last one while an optimizer had moved weights
        self.evaluations = 0
        """Number of forward passes without gradients so far."""
        self.updated()
        self._note(_BEFORE)

    # --------------------------------------------------------------------------------------------- training thread

    def updated(self) -> bool:
        """Note the weights that an update, or a restore, has made.

        Returns:
            Whether this was the last of the first updates, so that ``early`` may be called from now on.
        """
        self._note(_AFTER)
        if 0 <= self._updates < _UPDATES_LEARNED:
            self._note(self._updates)
        used, self._used = self._used, False
        if not used or self._updates != _UPDATES_LEARNED - 1:
            return False
        self._learned = self._noted.events()
        return True

    def entered(self) -> None:
        """Note the weights with which a forward pass in training begins."""
        if not self._used and not capturing():
            self._note(_BEFORE)

    def used(self) -> None:
        """Note the weights that training uses: a backward pass begins, or the next update."""
        if not self._used:
            self._note(_BEFORE)
            if 0 <= self._updates < _UPDATES_LEARNED:
                self._note(_UPDATES_LEARNED + self._updates)
            self._updates += 1
            self._used = True

    def evaluates(self) -> None:
        """Note the weights that a forward pass without gradients uses. They may be in the model for this pass only."""
        self._note(_EVALUATED, aside=True)
        self.evaluations += 1
        if (optimizer := self._in_evaluation()) and self._updates >= 0:
            first, self._others_evaluated = not self._others_evaluated, self.evaluations
            if first and tells():
                log.warning(_EVALUATES_OTHERS, optimizer)

    def _note(self, row: int, *, aside: bool = False) -> None:
        """See ``_Noted.note``. Never raises."""
        try:
            if self._noted.samples:
                self._noted.note(row, aside=aside)
        except Exception:
            log.warning(_GIVEN_UP, exc_info=True)
            self._noted = _Noted()

    # -------------------------------------------------------------------------------------------------- any thread

    def early(self) -> list[tuple[Tensor, bytes]]:
        """Return what was noted after the first updates of this process, for each parameter that is trained.

        Waits for the devices, which may be behind their host.

        Raises:
            TimeoutError: a device has not made the first updates in time.
        """
        if not all(poll(event.query, _EARLY_S) for event in self._learned):
            raise TimeoutError(f"a device has not made the first updates after {_EARLY_S:g} s")
        seen = self._noted.looked_at()
        return [(each.parameter, b"".join(rows[:_UPDATES_LEARNED])) for each, _, rows in seen if not each.frozen]

    def holds_others(self) -> bool:
        """Return whether the model holds other weights now.

        Raises:
            TimeoutError: a device did not answer in time.
        """
        return bool(self._in_evaluation()) or self._differs_in(_NOW)

    def held_others_since(self, evaluations: int) -> bool:
        """Return whether the model holds other weights now, or has held them in an evaluation.

        Args:
            evaluations: an earlier value of the attribute ``evaluations``; later evaluations count.
        """
        if self._others_evaluated > evaluations or self.holds_others():
            return True
        return self.evaluations > evaluations and self._differs_in(_EVALUATED)

    def _in_evaluation(self) -> str:
        """Return the class of an optimizer that holds other weights now, as its param groups say; empty: none does.

        Schedule-free optimizers do: their ``eval()`` moves the weights, and ``train()`` moves them back, but for the
        last bits. So the comparison may take the program for one that changes weights between updates.
        """
        moving = (optimizer for optimizer in self._optimizers if callable(getattr(optimizer, "eval", None)))
        moved = (o for o in moving if any(group.get("train_mode") is False for group in o.param_groups))
        return next((type(optimizer).__name__ for optimizer in moved), "")

    def _differs_in(self, row: int) -> bool:
        for sample, moved, rows in self._noted.looked_at():
            if self._is_compared(sample, rows) and (moved or rows[row] not in (rows[_AFTER], rows[_BEFORE])):
                return True
        return False

    def _is_compared(self, sample: _Sample, rows: Sequence[bytes]) -> bool:
        """Return whether the program was not seen to change these weights between updates.

        A frozen parameter, which may be a momentum encoder, is compared once it has stood still after an update.
        """
        seen = range(min(self._updates, _UPDATES_LEARNED))
        return bool(seen or not sample.frozen) and all(rows[n] == rows[_UPDATES_LEARNED + n] for n in seen)


def _chosen(parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the last vector and the last matrix: unlike rows of an embedding, both change in almost every update."""
    seen = set[bool]()
    for parameter in reversed([each for each in parameters if each.requires_grad]):
        if _is_plain(local(parameter)) and (parameter.dim() > 1) not in seen:
            seen.add(parameter.dim() > 1)
            yield parameter


def _beside(chosen: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the frozen parameter that is nearest to a chosen matrix, as an adapted weight is to its adapter."""
    trained = [name for name, p in parameters.items() if p.dim() > 1 and any(p is each for each in chosen)]
    still = {name: p for name, p in parameters.items() if p.dim() > 1 and not p.requires_grad}
    frozen = [name for name, p in still.items() if _is_plain(local(p))]
    pairs = [(_shared(one, other), other) for one in trained for other in frozen]
    return [parameters[max(pairs)[1]]] if pairs else []


def _shared(one: str, other: str) -> int:
    """Return the number of modules that contain both parameters."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split("."), strict=False))
    )


def _is_plain(memory: Tensor) -> bool:
    """Return whether bytes of the tensor can be read."""
    return is_plain(memory) and not memory.is_meta and memory.numel() > 0 and memory.is_contiguous()


def _sample(parameter: Tensor, runtimes: Sequence[Runtime]) -> _Sample:
    memory = local(parameter)
    runtime, count = holder(runtimes, memory), len(_bytes_of(memory))
    pointer = (lambda: local(parameter).data_ptr()) if is_distributed(parameter) else parameter.data_ptr
    zeros = torch.zeros(count, dtype=torch.uint8, device="cpu") if runtime is None else runtime.on_device(count).zero_()
    pinned = [] if runtime is None else list(torch.split(runtime.pinned(_ROWS * count), count))
    return _Sample(parameter, pointer, not parameter.requires_grad, runtime, zeros, pinned)


def _device_rows(samples: Sequence[_Sample]) -> list[list[Tensor]]:
    """Allocate memory for all rows, on the devices of the samples."""
    each = [
        torch.split(sample.runtime.on_device(_ROWS * len(sample.zeros)).zero_(), len(sample.zeros))
        for sample in samples
        if sample.runtime is not None
    ]
    return [[rows[number] for rows in each] for number in range(_ROWS)]


def _bytes_of(memory: Tensor) -> Tensor:
    """Return bytes from the middle of a tensor, without a copy."""
    flat = memory.detach().view(-1)
    count = min(flat.numel(), max(1, _BYTES // flat.element_size()))
    begin = (flat.numel() - count) // 2
    return flat_bytes(flat[begin : begin + count])
