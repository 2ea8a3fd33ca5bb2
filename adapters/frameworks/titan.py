"""torchtitan: a checkpoint manager that protects the training, and also does what torchtitan's own manager does.

The Trainer gives its checkpoint manager all objects of the training state, and calls ``load()`` when ``train()``
begins: then ttp joins the job and restores. torchtitan's container of optimizers is itself an optimizer, whose step is
the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ttp import api
from ttp.adapters.versions import begins_once, names_of, require
from ttp.errors import ConfigError

TESTED = ("0.3", "0.3")
"""Oldest and newest version of torchtitan with which ttp was tested."""

require("torchtitan", "titan", TESTED, extra="torchtitan")
with names_of("torchtitan", TESTED):
    from torchtitan.components.checkpointer import CheckpointManager


class TtpCheckpointManager(CheckpointManager):
    """The checkpoint manager: give its ``Config`` as ``checkpoint`` in a Trainer's config.

    The settings of torchtitan's manager (``enable``, ...) work too. Call ``Trainer.train`` in a function that is
    decorated with ``ttp.ttp_to_persist``.

    Args:
        config: see ``Config``.
        model_parts: a list with the model; several parts (a pipeline) are not supported.
        optimizers: the container of the model's optimizers.
        lr_schedulers: the container of their schedulers.
        dataloader: the data loader, whose position is saved with each step, or None.
        states: further objects that are saved with each step, among them the Trainer itself.
        others: further arguments of torchtitan's own manager.

    Raises:
        ConfigError: the model has several parts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The settings of torchtitan's manager, and those of ``ttp.wrap_optimizer``."""

        save_dir: str = "ttp_checkpoints"
        """Directory of ttp's checkpoints. It must not be torchtitan's ``folder``, where torchtitan deletes old ones."""

        buddy: bool = False
        """Whether to keep second copies on other hosts. For plain FSDP, where each shard is on one rank only."""

        undo: str | None = None
        """``"preimage"``: keep a copy of the state from before each update, for undo. None: keep none."""

    def __init__(
        self,
        config: Config,
        *,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        dataloader: Any,
        states: dict[str, Any],
        **others: Any,
    ) -> None:
        if len(model_parts) != 1:
            raise ConfigError(f"the model has {len(model_parts)} parts: ttp.titan does not support pipelines")
        self._config, self._parts = config, (model_parts[0], optimizers, lr_schedulers)
        self._extra = {**states, "dataloader": dataloader} if dataloader is not None else dict(states)
        given = {"optimizers": optimizers, "lr_schedulers": lr_schedulers, "dataloader": dataloader, "states": states}
        super().__init__(config, model_parts=model_parts, **given, **others)

    def load(self, step: int = -1) -> bool:
        """Join the job and restore the newest checkpoint of ttp; if there is none, restore one of torchtitan.

        torchtitan's own method restores only if its checkpoints are enabled; ttp always restores.

        Args:
            step: the step of torchtitan's checkpoint to load; -1: the newest one.

        Returns:
            Whether anything was restored.
        """
        model, optimizers, schedulers = self._parts
        config = self._config
        begins_once("torchtitan")
        api.wrap_optimizer(
            optimizers,
            model=model,
            scheduler=schedulers,
            extra_state=self._extra,
            save_dir=config.save_dir,
            buddy=config.buddy,
            undo=config.undo,
        )
        version = api.restore()
        return bool(version) or bool(super().load(step))
