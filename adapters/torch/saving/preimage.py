"""Copies the state before an update and keeps the copy until the next one (``undo="preimage"``).

Just before the first write of each update, ``PreImage`` copies parameters, the optimizer's tensors, registered
averages, and parameters that follow the weights, or are so small that they may (``followers.py``). Every update uses
the same memory for its copies, so they take as much memory as the state once more. Numbers and lists in the optimizer's
state are copied too. ``PostStepState`` keeps the hyperparameters of a version; the pages keep buffers and random
streams.

To undo an update, the checkpoint is written from these copies. The live tensors are not changed: a frozen rank's state
must stand still, the controller may repeat the order or send one for the newer version, and after a false alarm the
job thaws and trains on.

On a device the copies are queued like other work, between two events: the event that the device has passed tells which
version the copies hold.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttp.adapters.torch.device.accelerator import AHEAD_MAX, Fence, Runtime, holder
from ttp.adapters.torch.loop.schedule_habit import copied
from ttp.adapters.torch.loop.unwrap_optimizer import members_of, unwrap_optimizer
from ttp.adapters.torch.sharding.dtensor_chunks import is_distributed, local
from ttp.adapters.torch.sharding.names import parameters_of
from ttp.adapters.torch.tensor_memory import by_kind, is_plain
from ttp.errors import CheckpointError

log = logging.getLogger("ttp.adapters.torch")

_Place = tuple[Any, ...]
_Copies = list[tuple[Tensor, Tensor]]  # pairs of target and source


@dataclass(slots=True)
class Image:
    """A copy of the state of one version.

    Args:
        version: finished updates.
        state: like ``Optimizer.state``, with copies of its tensors; without entries that were added later.
        copies: copies of parameters and averages, by the ``id`` of the live tensor.
        members: the ``id`` of each optimizer whose state has been copied.
        modules: True if averages have been copied.
        serial: number of the call of ``take`` that last copied into this image.
    """

    version: int
    state: dict[Any, Any] = field(default_factory=dict)
    copies: dict[int, Tensor] = field(default_factory=dict)
    members: set[int] = field(default_factory=set)
    modules: bool = False
    serial: int = 0

    def state_of(self, optimizer: Optimizer) -> dict[Any, Any]:
        """Return the state of ``optimizer`` in this version, in the form of ``optimizer.state``.

        An optimizer that was not copied has not stepped since, so its live state is returned.
        """
        others = (member for member in members_of(optimizer) if id(unwrap_optimizer(member)) not in self.members)
        return self.state | {owner: value for member in others for owner, value in list(member.state.items())}

    def of(self, live: Any) -> Any:
        """Return the copy of a live tensor, or ``live`` itself if it was not copied."""
        return self.copies.get(id(live), live)


class PreImage:
    """Keeps a copy of the state before the running update, or before the last update if none is running.

    Args:
        optimizer: the optimizer whose parameters and state are copied; may be a ``CombinedOptimizer``.
        modules: averages of the weights that belong to the version.
        runtimes: the devices of the state; empty: the state is on the host.
        followers: parameters that no optimizer trains and that may follow the weights; there may be more later.
        reserve: True to allocate the memory for all parameters now, so that a job with too little memory fails at once.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        modules: Iterable[nn.Module] = (),
        runtimes: Sequence[Runtime] = (),
        *,
        followers: Collection[Tensor] = (),
        reserve: bool = True,
    ) -> None:
        self._members = members_of(optimizer)
        self._modules, self._followers = tuple(modules), followers
        self._runtimes = runtimes
        self._begun, self._taken = Fence(runtimes, -1, newest=True), Fence(runtimes, -1)
        self._images: deque[Image] = deque(maxlen=AHEAD_MAX if runtimes else 1)
        self._memory: dict[_Place, Tensor] = {}
        self._used: set[_Place] = set()
        self.broken = False
        """True after a copy has failed; no more copies are made then."""
        self._serial = -1
        if reserve:
            for number, member in enumerate(self._members):
                self._copy_live(parameters_of(member), Image(-1), [], number, "live")
            self._copy_modules(Image(-1), [])

    # --------------------------------------------------------------------------------------------- training thread

    def take(self, version: int, only: Sequence[Optimizer] | None = None, *, modules: bool = True) -> None:
        """Copy the state of ``version``, before the next update writes to it. Never raises.

        Args:
            version: finished updates.
            only: the optimizers whose state to copy, because they are about to change it; None: all. Earlier copies
                of ``version`` are kept.
            modules: True to copy the averages too.
        """
        if self.broken:
            return
        try:
            self._take(version, only, modules)
        except Exception as problem:
            self.broken = True
            self.forget()
            self._memory.clear()
            log.warning("training goes on, but updates cannot be undone: the state could not be copied (%s)", problem)

    def before_update(self, version: int, fresh: bool) -> None:
        """Copy the whole state before an update; after a half-made one (not ``fresh``) a copy would be of no use."""
        if fresh:
            self.take(version)

    def forget(self) -> None:
        """Drop the copies. Call this when a restore has replaced the state."""
        self._images.clear()

    @torch.no_grad()
    def _take(self, version: int, only: Sequence[Optimizer] | None, modules: bool) -> None:
        newest = self._images[-1] if self._images else None
        image = newest if only is not None and newest is not None and newest.version == version else Image(version)
        self._serial += 1
        self._begun.record(self._serial)
        copies = _Copies()
        for number, member in enumerate(self._members):
            if (only is None or member in only) and id(member) not in image.members:
                self._copy_member(number, member, image, copies)
        if modules and not image.modules:
            self._copy_modules(image, copies)
        self._copy_live(self._followers, image, copies, "follower")
        for targets, sources in by_kind(copies):
            torch._foreach_copy_(targets, sources)
        image.serial = self._serial
        if image is not newest:
            self._images.append(image)
        self._taken.record(self._serial)

    def _copy_member(self, number: int, member: Optimizer, image: Image, copies: _Copies) -> None:
        self._used = set()
        self._copy_live(parameters_of(member), image, copies, number, "live")
        for position, (owner, value) in enumerate(member.state.items()):
            image.state[owner] = self._copy(value, (number, "state", position), copies)
        for place in [place for place in self._memory if place[0] == number and place not in self._used]:
            del self._memory[place]
        image.members.add(id(member))

    def _copy_modules(self, image: Image, copies: _Copies) -> None:
        live = [tensor for module in self._modules for tensor in (*module.parameters(), *module.buffers())]
        self._copy_live(live, image, copies, "module")
        image.modules = True

    def _copy_live(self, tensors: Iterable[Tensor], image: Image, copies: _Copies, *place: Any) -> None:
        for position, tensor in enumerate(tensors):
            if id(tensor) not in image.copies:  # else it was copied before: a follower may be an optimizer's, frozen
                image.copies[id(tensor)] = self._copy(tensor, (*place, position), copies)

    def _copy(self, value: Any, place: _Place, copies: _Copies) -> Any:
        if isinstance(value, Tensor):
            ahead = bool(self._runtimes) and holder(self._runtimes, value) is None  # the host may be ahead of devices
            return value.detach().clone() if ahead else self._copy_tensor(value.detach(), place, copies)
        if isinstance(value, dict):
            return {key: self._copy(item, (*place, key), copies) for key, item in value.items()}
        if type(value) in (list, tuple, deque):
            return type(value)(self._copy(item, (*place, index), copies) for index, item in enumerate(value))
        return copied(value)

    def _copy_tensor(self, live: Tensor, place: _Place, copies: _Copies) -> Tensor:
        if not (is_distributed(live) or is_plain(live)):
            return live.clone()
        self._used.add(place)
        memory = self._memory.get(place)
        if memory is None or not _alike(memory, live):
            self._memory.pop(place, None)  # free the old memory before the new one is allocated
            memory = self._memory[place] = torch.empty_like(live)
        copies.append((local(memory), local(live)))
        return memory

    # -------------------------------------------------------------------------------------------------- any thread

    @property
    def version(self) -> int | None:
        """The version of the copy; None if there is no copy, or it is being made."""
        image = self._kept()
        return None if image is None else image.version

    @property
    def whole(self) -> bool:
        """True if the whole state was copied. If not, only a running update can be undone, not a finished one."""
        image = self._kept()
        return image is not None and len(image.members) == len(self._members) and image.modules

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether all of these live tensors were copied."""
        image = self._kept()
        return image is not None and all(id(tensor) in image.copies for tensor in tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the copies take."""
        return sum(memory.nbytes for memory in list(self._memory.values()))

    def wait(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds until the device has made the last copies. Not for the training thread."""
        self._taken.wait(self._serial, timeout_s)

    def _kept(self) -> Image | None:
        taken = self._taken.finished_version()
        if self._begun.finished_version() != taken:
            return None
        return next((image for image in list(self._images) if image.serial == taken), None)

    def image(self, version: int) -> Image:
        """Return the copy of the state of ``version``.

        Raises:
            CheckpointError: there is no copy of that version.
        """
        kept = self._kept()
        if kept is None or kept.version != version:
            raise CheckpointError(
                f"version {version} cannot be written by undo: "
                + ("there is no pre-image" if kept is None else f"the pre-image is of version {kept.version}")
            )
        return kept


def _alike(memory: Tensor, live: Tensor) -> bool:
    """Return whether ``memory`` is what ``torch.empty_like(live)`` would make, with the same order in memory."""
    if (memory.shape, memory.dtype, memory.device) != (live.shape, live.dtype, live.device):
        return False
    strides = local(memory).stride()
    return strides == local(live).stride() or strides == torch.empty_like(local(live), device="meta").stride()
