"""Lightning's own state in a checkpoint: the positions of its loops, and the states of its callbacks.

The positions of the loops are the same on all ranks. A rank that died before the end of its batch takes two things from
a rank that reached the end: the positions of the loops, and the changes of callback states between the gate and the end
of the batch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from ttp.adapters.frameworks.lightning_loops import EpochStart, Loops
from ttp.adapters.torch.sharding.exchange import gather_bytes
from ttp.errors import RestoreError
from ttp.store.encoding import decode, encode

log = logging.getLogger("ttp.adapters.frameworks")


class LightningState:
    """Lightning's own state (loops, callbacks, modules' extras), saved as an extra state of one rank.

    Args:
        trainer: a trainer in ``fit``.
    """

    ttp_completes_itself = True  # see ``agree``

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._loops = trainer, Loops(trainer)
        self._epoch = EpochStart.now(())
        self._held: dict[str, Any] | None = {"fresh": True, "whole": True}
        self._restored: dict[str, Any] | None = None
        self._at_gate = b""  # encoded states of callbacks when the rank was at the gate
        self.whole = False
        """Whether all callbacks have seen the end of the batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that Lightning will have at the end of the batch, as far as it is known already."""
        if self._held is not None:
            return self._held
        trainer = self._trainer
        module = trainer.lightning_module
        kept: dict[str, Any] = {}
        if is_overridden("on_save_checkpoint", module, LightningModule):
            module.on_save_checkpoint(kept)
        callbacks = {each.state_key: state for each in trainer.callbacks if (state := each.state_dict())}
        if not self.whole:
            self._at_gate = encode(callbacks)
        return {
            "fresh": False,
            "whole": self.whole,
            "loops": self._loops.at_end_of_batch(),
            "callbacks": callbacks,
            "at_gate": self._at_gate,
            "module": kept,
            "data": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "should_stop": trainer.should_stop,
            "epoch": self._epoch.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until all ranks have agreed; see ``agree`` and ``apply``."""
        self._held = state

    # ----------------------------------------------------------------------------------------------------- restore

    def agree(self, version: int) -> None:
        """Complete the states of ranks that were not at the end of their batch with those of others. A collective call.

        Args:
            version: the restored version; 0: nothing was restored.

        Raises:
            RestoreError: a version was restored, but no rank has a state of Lightning.
        """
        mine = self._held
        assert mine is not None
        if not version and mine["fresh"]:
            mine = None
        every = [mine]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            every = [decode(data) for data in gather_bytes(encode(mine))]
        there = [each for each in every if each is not None and not each["fresh"]]
        if not there:
            if version:
                raise RestoreError(
                    f"step {version} was restored, but it has no positions of Lightning's loops: it was saved without "
                    "ttp.lightning.TtpCallback, or the rank-local state of all ranks was lost"
                )
            return
        whole = next((each for each in there if each["whole"]), None)
        if whole is None:
            log.warning("no rank had reached the end of its batch: the callbacks' states lack the end of that batch")
        if mine is None or mine["fresh"]:
            mine = whole or there[0]
        elif whole is not None and not mine["whole"]:
            mine = _completed(mine, whole)
        self._held = self._restored = mine

    def apply(self) -> None:
        """Load the agreed state into callbacks, module, data module and loops. Later call ``reenter``."""
        state, trainer = self._restored, self._trainer
        if state is None:
            return
        for callback in trainer.callbacks:
            if (kept := state["callbacks"].get(callback.state_key)) is not None:
                callback.load_state_dict(kept)
        if is_overridden("on_load_checkpoint", trainer.lightning_module, LightningModule):
            trainer.lightning_module.on_load_checkpoint(state["module"])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["data"])
        self._epoch = EpochStart(**state["epoch"])
        self._loops.load(state["loops"])

    # ----------------------------------------------------------------------------------------------------- training

    def reenter(self) -> None:
        """Make the loops continue after the batch at which the state was saved."""
        if self._restored is not None:
            state, self._restored = self._restored, None
            self._loops.reenter(state["should_stop"], self._epoch)

    def epoch_begins(self) -> None:
        """Note the random streams before the epoch draws from them."""
        self._epoch = EpochStart.now(self._loops.generators())

    def begun(self) -> None:
        """Note that a batch has begun: from now on ``state_dict`` describes the version that this batch makes."""
        self._held = None


def _completed(mine: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Return ``mine``, a state captured before the end of the batch, completed with the later changes in ``whole``."""
    before, callbacks = decode(whole["at_gate"]), dict(mine["callbacks"])
    for key, state in whole["callbacks"].items():
        known = before.get(key, {})
        late = {name: value for name, value in state.items() if encode(value) != encode(known.get(name))}
        callbacks[key] = callbacks.get(key, {}) | late
    loops = whole["loops"] | {"state_dict": mine["loops"]["state_dict"]}  # each rank keeps its own loaders' positions
    return whole | {"loops": loops, "epoch": mine["epoch"], "callbacks": callbacks}
