"""The state before an update, kept until the next one: what ``undo="preimage"`` costs memory for.

Just before the first write of each update, parameters, the optimizer's tensors and registered averages are copied into
memory that is used again for every update: one more copy of them, no more. Numbers and lists in the optimizer's state
are remembered beside; the hyperparameters of a version are kept by ``Tail``, buffers and random streams by the pages.

An update is undone by writing the checkpoint from these copies. The live tensors are left as they are: nobody may
write to the state of a frozen rank, the order may come twice or be followed by one for the newer version, and a false
alarm ends in a thaw.

On a device the copies are made in its own order of work, so what is in them is told by marks before and behind.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttp.adapters.torch.cuts import is_distributed, local
from ttp.adapters.torch.device import AHEAD_MAX, Runtime, holder, make_fence
from ttp.adapters.torch.habit import copied
from ttp.errors import CheckpointError

log = logging.getLogger("ttp.adapters.torch")

_Place = tuple[Any, ...]
_Copies = list[tuple[Tensor, Tensor]]  # where to, where from


@dataclass(slots=True)
class Image:
    """The state of one version.

    Args:
        version: finished updates.
        state: like ``Optimizer.state``, with copies of its tensors; what came later is not in it.
        copies: of parameters and averages, by the identity of the live tensor.
    """

    version: int
    state: dict[Any, Any] = field(default_factory=dict)
    copies: dict[int, Tensor] = field(default_factory=dict)

    def of(self, live: Any) -> Any:
        """The copy of a live tensor; anything else as it is."""
        return self.copies.get(id(live), live)


class PreImage:
    """Keeps the state that the running, or else the last, update started from.

    Args:
        optimizer: whose parameters and state.
        modules: averages of the weights that belong to the version.
        runtimes: the devices of the state; none: the host.
    """

    def __init__(
        self, optimizer: Optimizer, modules: Iterable[nn.Module] = (), runtimes: Sequence[Runtime] = ()
    ) -> None:
        self._optimizer = optimizer
        self._modules = tuple(modules)
        self._runtimes = runtimes
        self._begun, self._taken = make_fence(runtimes, -1, newest=True), make_fence(runtimes, -1)
        self._images: deque[Image] = deque(maxlen=AHEAD_MAX if runtimes else 1)
        self._memory: dict[_Place, Tensor] = {}
        self._used: set[_Place] = set()
        self._broken = False
        self._copy_parameters(Image(-1), [])  # sets the memory aside now: a job that has too little finds out at once

    # --------------------------------------------------------------------------------------------- training thread

    def take(self, version: int) -> None:
        """The gate is passed and nothing of the update after ``version`` is written yet. Never raises."""
        if self._broken:
            return
        try:
            self._take(version)
        except Exception as problem:
            self._broken = True
            self.forget()
            self._memory.clear()
            log.warning("updates cannot be undone from now on, training goes on: %s", problem)

    def forget(self) -> None:
        """The state was replaced: what is kept belongs to nothing."""
        self._images.clear()

    @torch.no_grad()
    def _take(self, version: int) -> None:
        self._begun.record(version)
        image, copies = Image(version), _Copies()
        self._used = set()
        self._copy_parameters(image, copies)
        for number, (owner, value) in enumerate(self._optimizer.state.items()):
            image.state[owner] = self._copy(value, ("state", number), copies)
        for place in self._memory.keys() - self._used:
            del self._memory[place]
        _carry_out(copies)
        self._images.append(image)
        self._taken.record(version)

    def _copy_parameters(self, image: Image, copies: _Copies) -> None:
        groups = self._optimizer.param_groups
        live = [parameter for group in groups for parameter in group["params"]]
        for module in self._modules:
            live += [*module.parameters(), *module.buffers()]
        for number, tensor in enumerate(live):
            image.copies[id(tensor)] = self._copy(tensor, ("live", number), copies)

    def _copy(self, value: Any, place: _Place, copies: _Copies) -> Any:
        if isinstance(value, Tensor):
            ahead = bool(self._runtimes) and holder(self._runtimes, value) is None  # of the devices, as the host is
            return value.detach().clone() if ahead else self._copy_tensor(value.detach(), place, copies)
        if isinstance(value, dict):
            return {key: self._copy(item, (*place, key), copies) for key, item in value.items()}
        if type(value) in (list, tuple, deque):
            return type(value)(self._copy(item, (*place, index), copies) for index, item in enumerate(value))
        return copied(value)

    def _copy_tensor(self, live: Tensor, place: _Place, copies: _Copies) -> Tensor:
        if not is_distributed(live) and (type(live) is not Tensor or live.layout is not torch.strided):
            return live.clone()
        self._used.add(place)
        memory = self._memory.get(place)
        if memory is None or (memory.shape, memory.dtype, memory.device) != (live.shape, live.dtype, live.device):
            self._memory.pop(place, None)  # before its successor is made
            memory = self._memory[place] = torch.empty_like(live)
        copies.append((local(memory), local(live)))
        return memory

    # -------------------------------------------------------------------------------------------------- any thread

    @property
    def version(self) -> int | None:
        """Of what is kept; None while nothing is, or while it is being replaced."""
        taken = self._taken.finished_version()
        if self._begun.finished_version() != taken:
            return None
        return taken if any(image.version == taken for image in list(self._images)) else None

    def image(self, version: int) -> Image:
        """The state of ``version``.

        Raises:
            CheckpointError: it is not kept.
        """
        kept = self.version
        if kept != version:
            raise CheckpointError(
                f"version {version} cannot be gone back to: what is kept is "
                + ("nothing" if kept is None else f"version {kept}")
            )
        return next(image for image in list(self._images) if image.version == version)


def _carry_out(copies: _Copies) -> None:
    """All copies in as few calls as there are kinds: mixed kinds would be copied one by one on a device."""
    kinds: defaultdict[tuple[Any, Any], _Copies] = defaultdict(list)
    for copy in copies:
        kinds[copy[0].device, copy[0].dtype].append(copy)
    for group in kinds.values():
        targets, sources = zip(*group, strict=True)
        torch._foreach_copy_(list(targets), list(sources))
