"""Keeps the all-gather of parameters out of an update with several optimizers.

If a model has experts, its optimizers step one after the other, and Megatron gathers the parameters of the first before
it steps the second. A rank whose peer dies in that gather would hang in the middle of its update for ever.

Each gather collects all parameters of a chunk, so all gathers but the last are superfluous: the last optimizer, whose
inner step ends the update, gathers again. So ``overlap_param_gather`` is set to True while the update runs: Megatron
then postpones the gathers of the other optimizers. The values are the same, and no method of Megatron is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer


class ParamSyncs:
    """Postpones the all-gathers of the model chunks of one rank while its update runs.

    Args:
        chunks: the model chunks; those that are not Megatron's ``DistributedDataParallel`` are left alone.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        syncing: Iterator[Any] = (chunk for chunk in chunks if hasattr(chunk, "start_param_sync"))
        settings = {id(chunk.ddp_config): chunk.ddp_config for chunk in syncing}
        self._settings: list[Any] = [one for one in settings.values() if not one.overlap_param_gather]
        self._handles: list[Any] = []

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Register hooks on the plain optimizers. With a single optimizer no hook is needed.

        Call it after the hooks that end the update have been registered.

        Args:
            optimizers: the plain optimizers, in the order of their steps.
        """
        if len(optimizers) < 2:
            return
        self._handles.append(optimizers[0].register_step_pre_hook(self._begins))
        self._handles.append(optimizers[-1].register_step_post_hook(self._ended))

    def detach(self) -> None:
        """Remove the hooks and restore the settings."""
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
