"""torchtitan: a checkpoint manager that protects the training, beside what torchtitan's own does.

The Trainer gives its checkpoint manager all that belongs to the training state, and calls ``load()`` when ``train()``
begins: there ttp joins the job and restores. The container of optimizers is an optimizer, whose step is the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ttp import api
from ttp.adapters.versions import begins_once, names_of, require
from ttp.errors import ConfigError

TESTED = ("0.3", "0.3")

require("torchtitan", "titan", TESTED, extra="torchtitan")
with names_of("torchtitan", TESTED):
    from torchtitan.components.checkpointer import CheckpointManager


class TtpCheckpointManager(CheckpointManager):
    """The ``checkpoint`` of a Trainer's config. What it inherits (``enable``, ``interval``) stays what it is.

    ``Trainer.train`` is to be called in a function that is decorated by ``ttp.ttp_to_persist``.

    Args:
        config: see ``Config``.
        model_parts: one; several (a pipeline) have not been tried.
        optimizers: of the model.
        lr_schedulers: of these.
        dataloader: its place is saved with each step.
        states: likewise; the Trainer itself is among them.
        others: as torchtitan's own takes them.

    Raises:
        ConfigError: the model has several parts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Torchtitan's settings, and those of ``ttp.wrap_optimizer``."""

        save_dir: str = "ttp_checkpoints"
        """Where ttp saves; not in the ``folder`` of torchtitan's own checkpoints, which purges."""

        buddy: bool = False
        """Where no rank has a copy of another's shard: plain FSDP, without replicas."""

        undo: str | None = None
        """``"preimage"``: a rank can go back one update."""

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
            raise ConfigError(f"the model has {len(model_parts)} parts: pipelines have not been tried with ttp.titan")
        self._config, self._parts = config, (model_parts[0], optimizers, lr_schedulers)
        self._extra = {**states, "dataloader": dataloader} if dataloader is not None else dict(states)
        given = {"optimizers": optimizers, "lr_schedulers": lr_schedulers, "dataloader": dataloader, "states": states}
        super().__init__(config, model_parts=model_parts, **given, **others)

    def load(self, step: int = -1) -> bool:
        """Join the job. Restore what ttp has saved; if that is nothing, what torchtitan has.

        Torchtitan's own method asks only whether its checkpoints are enabled; ttp restores in any case.
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
