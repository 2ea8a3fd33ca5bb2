"""Exchanges small messages between all ranks through the default process group, as bytes without pickle."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ttp.core.layout import Rank, ranks_text
from ttp.errors import ConfigError, DirectoryInUseError, UsageError
from ttp.store.arrays import home

log = logging.getLogger("ttp.adapters.torch")

_LATE_S = 30.0
_LATE = (
    "rank %d has waited for the other ranks for %g s: every rank has to call wrap_optimizer() and restore(), at the "
    "same point of the program"
)
_HOSTS_SHOWN = 8
_FINE = b"+"
_KINDS: dict[bytes, type[ConfigError] | type[UsageError]] = {  # the first that fits: a subclass before its base
    b"d": DirectoryInUseError,
    b"c": ConfigError,
    b"u": UsageError,
}


def tells() -> bool:
    """Return whether this rank logs what all ranks find alike: rank 0, or a process that is alone so far."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0)


def connected(world_size: int) -> bool:
    """Return whether there is a default process group of this size."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size


def gather_bytes(data: bytes) -> list[bytes]:
    """Return the ``data`` of every rank, by rank. A collective call.

    Takes memory for world size times the longest ``data``.
    """
    size = torch.tensor([len(data)], device=_device())
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    with _late_told():
        dist.all_gather(sizes, size)
    padded = torch.zeros(max(int(s) for s in sizes), dtype=torch.uint8, device=_device())
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_device())
    everyone = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    return [_bytes(each[: int(length)]) for each, length in zip(everyone, sizes, strict=True)]


@contextlib.contextmanager
def _late_told() -> Iterator[None]:
    """Warn if the block takes long, as it does for ever if only some ranks call ``wrap_optimizer()``."""
    timer = threading.Timer(_LATE_S, log.warning, (_LATE, dist.get_rank(), _LATE_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def gather_or_refuse(make: Callable[[], bytes]) -> list[bytes]:
    """Call ``make`` on every rank and return the results of all ranks, by rank. A collective call.

    If ``make`` raises on one rank, all ranks raise the same error: otherwise they would wait in a collective for the
    rank that left.

    Raises:
        ConfigError: ``make`` raised it, on this rank or another one.
        UsageError: ``make`` raised it, on this rank or another one.
    """
    refusal: ConfigError | UsageError | None = None
    try:
        mine = _FINE + make()
    except (ConfigError, UsageError) as problem:
        refusal = problem
        host = os.environ.get("TTP_HOST") or socket.gethostname()
        mark = next(mark for mark, kind in _KINDS.items() if isinstance(problem, kind))
        mine = mark + f"{host}\0{problem}".encode(errors="backslashreplace")
    answers = gather_bytes(mine)
    told = {Rank(rank): one[1:].decode().partition("\0") for rank, one in enumerate(answers) if one[:1] != _FINE}
    if told:
        first = min(told)
        text = told[first][2]
        alike = [rank for rank, (_, _, said) in told.items() if said == text]
        if len(alike) < len(answers):
            hosts = [*dict.fromkeys(told[rank][0] for rank in alike)]
            text = f"{ranks_text(alike)} on {', '.join(hosts[:_HOSTS_SHOWN])}: {text}"
        raise _KINDS[answers[first][:1]](text) from refusal
    return [one[1:] for one in answers]


def refuse_everywhere(problem: ConfigError | UsageError, world_size: int) -> None:
    """Take part in the ``gather_or_refuse`` of the other ranks, so that all ranks raise ``problem``.

    For a rank that fails before it gets to that call. Without a process group of this size, the other ranks cannot be
    told, and nothing is raised.

    Raises:
        ConfigError: ``problem`` is one; the other ranks raise it too.
        UsageError: ``problem`` is one; the other ranks raise it too.
    """

    def make() -> bytes:
        raise problem

    if connected(world_size):
        gather_or_refuse(make)


def broadcast_bytes(data: bytes, source: int) -> bytes:
    """Return the ``data`` of rank ``source``; the ``data`` of other ranks is ignored. A collective call."""
    size = torch.tensor([len(data)], device=_device())
    dist.broadcast(size, source)
    content = torch.zeros(int(size), dtype=torch.uint8, device=_device())
    if dist.get_rank() == source:
        content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(content, source)
    return _bytes(content)


def _bytes(content: torch.Tensor) -> bytes:
    return content.cpu().numpy().tobytes()


def _device() -> torch.device:
    """Return the device for messages: the host, unless the default group cannot send from it (NCCL).

    Then it is the device of the group, or that of the model. The current device may be that of another rank: a program
    that names its devices need not choose one.
    """
    world: dist.ProcessGroup | None = dist.group.WORLD
    kinds = [device.type for device in getattr(world, "_device_types", ())]
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return getattr(world, "bound_device_id", None) or home(kinds[0]) or torch.device(kinds[0])
