"""Keeps the all-gather of parameters out of an update.

Where a model has experts, its optimizers step one after the other, and Megatron gathers the parameters of the first
before it steps the second. A rank whose peer dies in that gather would stand half-way through its update for ever.
So gathers that are asked for during an update are made as soon as it is finished; the values are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer


class ParamSyncs:
    """Of the chunks of one rank.

    Args:
        chunks: Megatron's ``DistributedDataParallel``; others are left alone.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._chunks: list[Any] = [chunk for chunk in chunks if hasattr(chunk, "start_param_sync")]
        self._updating = False
        self._put_off: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self._handles: list[Any] = []

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Watch these, which are stepped in this order. After the hooks that end the update; one needs nothing."""
        if len(optimizers) < 2:
            return
        self._handles.append(optimizers[0].register_step_pre_hook(self._begins))
        self._handles.append(optimizers[-1].register_step_post_hook(self._ended))
        for chunk in self._chunks:
            chunk.start_param_sync = self._putting_off(chunk.start_param_sync)

    def detach(self) -> None:
        """Leave everything as it was."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for chunk in self._chunks:
            del chunk.start_param_sync

    def _putting_off(self, original: Any) -> Any:
        def start_param_sync(*args: Any, **kwargs: Any) -> None:
            if self._updating:
                self._put_off.append((original, args, kwargs))
            else:
                original(*args, **kwargs)

        return start_param_sync

    def _begins(self, *_args: Any) -> None:
        self._updating = True

    def _ended(self, *_args: Any) -> None:
        self._updating = False
        put_off, self._put_off = self._put_off, []
        for original, args, kwargs in put_off:
            original(*args, **kwargs)
