"""Accelerate: ``protect`` gives the objects that ``Accelerator.prepare()`` has returned to ``ttp.wrap_optimizer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from ttp import api
from ttp.adapters.torch.local_state.extra_state import by_name
from ttp.adapters.versions import TORCHDATA, begins_once, numbers, require
from ttp.errors import ConfigError

TESTED = ("1.13", "1.15")
"""Oldest and newest version of accelerate with which ttp was tested."""

_accelerate = require("accelerate", "accelerate", TESTED)

_REFUSED = {
    "DEEPSPEED": "DeepSpeed keeps the optimizer's state in partitions of its own",
    "MEGATRON_LM": "use ttp.adapters.megatron for Megatron",
}


def protect(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    *loaders: Any,
    save_dir: Any = "checkpoints",
    extra_state: Any = None,
    **settings: Any,
) -> None:
    """Protect the objects that ``accelerator.prepare()`` has returned. Call ``ttp.restore()`` afterwards.

    Objects given to ``register_for_checkpointing`` are saved as ``extra_state``. So are stateful data loaders
    (``DataLoaderConfiguration(use_stateful_dataloader=True)``). With other loaders, the program's loop has to skip the
    batches that were used before a restart; see docs/frameworks.md.

    Args:
        accelerator: the ``Accelerator``.
        model: the prepared model.
        optimizer: the prepared optimizer, or a list of them.
        scheduler: the prepared scheduler, or a list of them, or None.
        loaders: the prepared data loaders.
        save_dir: see ``ttp.wrap_optimizer``.
        extra_state: further objects; see ``ttp.wrap_optimizer``.
        settings: ``undo``, ``buddy`` (if a shard is on one rank only: FSDP without replicas), ``layout``; see
            ``ttp.wrap_optimizer``.

    Raises:
        ConfigError: the accelerator or a loader is used in a way that ttp does not support; also as in
            ``ttp.wrap_optimizer``.
    """
    kind = getattr(accelerator.distributed_type, "name", "")
    if kind in _REFUSED:
        raise ConfigError(f"ttp.accelerate.protect() cannot protect {kind}: {_REFUSED[kind]}")
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if accelerator.num_processes != ranks:
        raise ConfigError(
            f"the job has {ranks} ranks, and Accelerate trains on {accelerator.num_processes}: the ranks would not "
            "exchange their gradients. For training on the CPU, use Accelerator(cpu=True)"
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 1 and not plugin.use_orig_params:
        raise ConfigError(
            "FSDP1 with use_orig_params=False gives the optimizer flat tensors, which have no names: use "
            "FullyShardedDataParallelPlugin(use_orig_params=True) or fsdp_version=2"
        )
    if any(map(_keeps_its_place, loaders)) and ranks > 1 and numbers(_accelerate.__version__) < (1, 13):
        raise ConfigError(
            f"stateful loaders of accelerate {_accelerate.__version__} save a wrong position if there are several "
            "processes (fixed in 1.13): install accelerate 1.13 or later, or set use_stateful_dataloader=False"
        )
    begins_once("Accelerate")
    # What the program gave register_for_checkpointing() is in a private attribute (seen in 1.13 to 1.15).
    extra = {f"registered {number}": each for number, each in enumerate(getattr(accelerator, "_custom_objects", ()))}
    extra |= {f"loader {number}": _Place(each) for number, each in enumerate(loaders) if _keeps_its_place(each)}
    if accelerator.project_configuration.automatic_checkpoint_naming:
        extra["save_state"] = _Names(accelerator.project_configuration)
    extra |= by_name(extra_state)
    api.wrap_optimizer(
        _each(optimizer, lambda each: getattr(each, "optimizer", each)),
        model=model,
        scheduler=_each(scheduler, lambda each: _Schedule(each) if hasattr(each, "scheduler") else each),
        scaler=accelerator.scaler,
        save_dir=save_dir,
        extra_state=extra or None,
        **settings,
    )


def _each(one_or_several: Any, of: Any) -> Any:
    return [of(each) for each in one_or_several] if isinstance(one_or_several, (list, tuple)) else of(one_or_several)


class _Names:
    """An extra state with the number in the automatic names of ``save_state()``: a resumed job uses the next number."""

    def __init__(self, project: Any) -> None:
        self._project = project

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self._project.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        place = Path(self._project.project_dir or ".") / "checkpoints"
        there = [int(number) for path in place.glob("checkpoint_*") if (number := path.name[11:]).isdigit()]
        self._project.iteration = max([state["iteration"], *(number + 1 for number in there)])


class _Schedule:
    """A view of an ``AcceleratedScheduler`` that shows the attributes of the wrapped scheduler.

    While gradients are accumulated, an ``AcceleratedScheduler`` increments ``_step_count`` without a step. So
    ``_step_count`` is hidden, and ttp reads ``last_epoch``, which counts real steps: one per update and process, or one
    per update if batches are split.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._inner = scheduler, scheduler.scheduler

    def __getattr__(self, name: str) -> Any:
        if name == "_step_count":
            raise AttributeError(name)
        return getattr(self._inner, name)


def _keeps_its_place(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


class _Place:
    """An extra state with a loader's position and its number of the epoch, which seeds the sampler's shuffling."""

    def __init__(self, loader: Any) -> None:
        require("torchdata", "accelerate", TORCHDATA, extra="torchdata")
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        loader = self._loader
        ended = bool(getattr(loader, "end_of_dataloader", False))
        return {"place": loader.state_dict(), "epoch": getattr(loader, "iteration", 0) + ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        loader = self._loader
        loader.set_epoch(state["epoch"])
        loader.load_state_dict(state["place"])
        loader.dl_state_dict = state["place"]  # the state that the loader returns until it yields the next batch
        # Makes the loader's iterator, which draws random numbers, before the random streams are restored.
        loader.base_dataloader.state_dict()
