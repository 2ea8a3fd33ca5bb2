"""Keeps the all-gather of parameters out of an update.

Where a model has experts, its optimizers step one after the other, and Megatron gathers the parameters of the first
before it steps the second. A rank whose peer dies in that gather would stand half-way through its update for ever.

Every gather is of all parameters of a chunk, so all but the last are made in vain: the last optimizer, whose inner step
ends the update, gathers again. For the others ``overlap_param_gather`` is true while the update runs: then Megatron
leaves the gather to what comes later. The values are the same, and no method of Megatron is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer


class ParamSyncs:
    """Of the chunks of one rank.

    Args:
        chunks: Megatron's ``DistributedDataParallel``; others are left alone.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        syncing: Iterator[Any] = (chunk for chunk in chunks if hasattr(chunk, "start_param_sync"))
        settings = {id(chunk.ddp_config): chunk.ddp_config for chunk in syncing}
        self._settings: list[Any] = [one for one in settings.values() if not one.overlap_param_gather]
        self._handles: list[Any] = []

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Watch these, which are stepped in this order. After the hooks that end the update; one needs nothing."""
        if len(optimizers) < 2:
            return
        self._handles.append(optimizers[0].register_step_pre_hook(self._begins))
        self._handles.append(optimizers[-1].register_step_post_hook(self._ended))

    def detach(self) -> None:
        """Leave everything as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._ended()

    def _begins(self, *_args: Any) -> None:
        for settings in self._settings:
            settings.overlap_param_gather = True

    def _ended(self, *_args: Any) -> None:
        for settings in self._settings:
            settings.overlap_param_gather = False
