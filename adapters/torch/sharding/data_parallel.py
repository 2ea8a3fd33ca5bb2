"""Finds the DistributedDataParallel modules that reduce the gradients of a model, and tracks their bucket layouts.

``model=`` may be a DistributedDataParallel, contain some (a GAN has two), or be the module inside of one. The module
inside has no reference to its wrapper. So if a model does not contain the wrappers that reduce its gradients, all
objects of the process are searched, at a few points of the start. Every wrapper that reduces a parameter of the model
counts, inside or outside of the model.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ttp.adapters.torch.sharding.ddp_buckets import BucketWatch, Ddp, apply_bucket_layout, missing_layout, reduced_by
from ttp.adapters.torch.sharding.names import ModelNames

_log = logging.getLogger("ttp.adapters.torch")

_PUTS_BUFFERS_BACK = "_pre_metadata_inference_backup"
"""A method of pipeline stages that restore the buffers after a trial pass, from torch 2.15 on."""

Layouts = str | dict[str, str]
"""The bucket layout of the only DistributedDataParallel, as ``bucket_layout`` returns it. If there are several: their
known layouts, by the name of each module's first parameter."""


T = TypeVar("T")


def instances_of(kind: type[T]) -> list[T]:
    """Return the live objects of a class and its subclasses. Takes about 0.1 s in a process with torch.

    ``isinstance`` is not used: it reads ``__class__`` of every object, and some objects warn, load lazy modules or
    raise then.
    """
    kinds = {kind}
    fresh = [kind]
    while fresh:
        fresh = [below for above in fresh for below in type.__subclasses__(above) if below not in kinds]
        kinds.update(fresh)
    things = gc.get_objects()
    return list(compress(things, map(kinds.__contains__, map(type, things))))


def pipeline_stages(model: nn.Module) -> list[Any]:
    """Return the ``torch.distributed.pipelining`` stages made of this model, of a part of it, or of a wrapper of it."""
    library = sys.modules.get("torch.distributed.pipelining.stage")
    if library is None:
        return []
    own = set(map(id, model.modules()))
    stages = instances_of(library._PipelineStageBase)
    return [stage for stage in stages if not own.isdisjoint(map(id, stage.submod.modules()))]


def ddps_of(model: nn.Module, known: Sequence[Ddp] = ()) -> list[Ddp]:
    """Find every DistributedDataParallel inside of ``model``, around it, or around a part of it.

    Too slow for every step: if some parameters are reduced neither by the modules inside nor by ``known``, all objects
    of the process are searched.

    Args:
        model: the registered model, wrapped or not.
        known: modules that were found before.

    Returns:
        The modules, in the order of their parameters in the model.
    """
    inside = [*known, *(module for module in model.modules() if isinstance(module, DistributedDataParallel))]
    inside = list({id(ddp): ddp for ddp in inside}.values())
    if not (dist.is_available() and dist.is_initialized()):
        return inside
    number = {id(parameter): position for position, parameter in enumerate(model.parameters())}
    covered = {id(parameter) for ddp in inside for parameter in ddp.parameters()}
    if all(identity in covered for identity in number):
        return inside
    found = {id(ddp): ddp for ddp in (*inside, *_around(number))}

    def place(ddp: Ddp) -> int:
        return min((number[id(p)] for p in ddp.parameters() if id(p) in number), default=len(number))

    return sorted(found.values(), key=place)


def ddps_around(model: nn.Module) -> list[Ddp]:
    """Return every DistributedDataParallel of the process that has a parameter of ``model``. Searches all objects."""
    return [*_around(set(map(id, model.parameters())))]


def not_replicated(ddps: Sequence[Ddp]) -> list[Tensor]:
    """Return the parameters that DistributedDataParallel was told to ignore, so that they may differ between ranks.

    Parameters that are reduced later than the others (``delay_all_reduce_named_params``), or by another of these
    modules, are not returned.
    """
    ignored: dict[int, Tensor] = {}
    reduced: set[int] = set()
    for ddp in ddps:
        own = set(map(id, reduced_by(ddp)))
        reduced |= own | set(map(id, getattr(ddp, "_delay_all_reduce_params", ())))
        ignored.update((id(p), p) for p in ddp.module.parameters() if id(p) not in own)
    return [parameter for identity, parameter in ignored.items() if identity not in reduced]


class LayoutWatch:
    """A ``BucketWatch`` for every DistributedDataParallel of a model.

    Args:
        ddps: the DistributedDataParallel modules of the model.
        names: names of the model.
    """

    def __init__(self, ddps: Sequence[Ddp], names: ModelNames) -> None:
        self.ddps, self._names = list(ddps), names
        self._watches = {name: BucketWatch(ddp) for name, ddp in _by_name(ddps, names).items()}
        self.unsettled = list(self._watches.values())
        """The watches whose layout may still change, and whose ``update_finished`` has to be called."""
        _say_hook_state(ddps)

    @property
    def reduced(self) -> set[int]:
        """The identities of the parameters whose gradients are reduced over ranks."""
        return {id(parameter) for ddp in self.ddps for parameter in ddp.parameters()}

    @property
    def layout(self) -> Layouts | None:
        """The layouts for the step after the last finished update; None: DDP's initial layouts. For any thread."""
        return _joined({name: watch.layout for name, watch in self._watches.items()})

    @property
    def previous(self) -> Layouts | None:
        """The value of ``layout`` before the last update."""
        return _joined({name: watch.previous for name, watch in self._watches.items()})

    def look_again(self, model: nn.Module, *, resumed: bool) -> list[str]:
        """Find DistributedDataParallel modules that were made after ``__init__``. Called once, before the first update.

        Args:
            model: the registered model.
            resumed: True if a checkpoint was restored before.

        Returns:
            Reasons why the modules make saves impossible, in sentences; empty if saves are possible.
        """
        late = [ddp for ddp in ddps_of(model, self.ddps) if not any(ddp is known for known in self.ddps)]
        self.ddps += late
        more = {name: BucketWatch(ddp) for name, ddp in _by_name(late, self._names).items()}
        self._watches |= more
        self.unsettled += more.values()
        _say_hook_state(late)
        _say_trial_passes(model)
        if resumed and any(missing_layout(ddp) is not None for ddp in late):
            _log.warning(
                "a DistributedDataParallel was made after ttp.restore(), so its buckets were not laid out as in the "
                "job that saved: the next steps may differ in the last bits from an unbroken run. Make it before "
                "ttp.restore()"
            )
        found = [hook_refusal(self.ddps), _join_refusal(self.ddps)]
        alone = {id(parameter) for parameter in not_replicated(self.ddps) if parameter.requires_grad} if late else ()
        if alone:
            names = [name for name, parameter in self._names.parameters.items() if id(parameter) in alone]
            found.append(
                f"a DistributedDataParallel that ignores {', '.join(names[:4])} was made after wrap_optimizer(), which "
                "took these parameters for equal on all ranks: make it before wrap_optimizer()"
            )
        return [problem for problem in found if problem]

    def update_finished(self) -> None:
        """Update the layouts after a finished update. For the training thread, while ``unsettled`` is not empty."""
        self.unsettled = [watch for watch in self.unsettled if watch.update_finished()]

    def close(self) -> None:
        """Remove the hooks."""
        for watch in self._watches.values():
            watch.close()


def apply_layouts(ddps: Sequence[Ddp], names: ModelNames, saved: Layouts | None) -> list[str]:
    """Give ``ddps`` the bucket layouts of the job that saved.

    All ranks call it with the same arguments, before the first forward pass.

    Returns:
        Reasons why the next steps may differ in their last bits from the unbroken run; empty if they will not.
    """
    found = _by_name(ddps, names)
    kept = dict.fromkeys(found, saved) if isinstance(saved, str) and len(found) == 1 else saved
    kept = kept if isinstance(kept, dict) else {}
    reasons = [
        missing_layout(ddp) if (layout := kept.get(name)) is None else apply_bucket_layout(ddp, layout)
        for name, ddp in found.items()
    ]
    return [reason for reason in reasons if reason is not None]


def hook_refusal(ddps: Sequence[Ddp]) -> str:
    """Return why a communication hook makes saves impossible, and what to do; an empty string if none does."""
    kinds = {kind for ddp in ddps for hook, state in ddp._comm_hooks for kind in (_name(hook), type(state).__name__)}
    if "PostLocalSGDState" in kinds:
        return (
            "post_localSGD_hook lets the weights of ranks differ between two averagings, so no rank has a copy of "
            "another rank's weights: register another communication hook, or none"
        )
    if "hook_then_optimizer_wrapper" in kinds:
        return (
            "a communication hook updates the weights in the backward pass (DistributedDataParallel's "
            "_register_fused_optim), and ttp sees no update: call optimizer.step() after backward() instead"
        )
    return ""


def _join_refusal(ddps: Sequence[Ddp]) -> str:
    """Return why training now, inside of a ``join()``, is refused, and what to do; an empty string if it is not."""
    configs = [ddp._join_config for ddp in ddps]
    if not any(config.enable and not config.throw_on_early_termination for config in configs):
        return ""
    return (
        "join() lets ranks make different numbers of updates, so their versions would not stand for the same moment. "
        "Give every rank the same number of batches (DistributedSampler, drop_last=True), or end the epoch of all "
        "ranks with the first one: join(throw_on_early_termination=True)"
    )


# -------------------------------------------------------------------------------------------------------------- private


def _around(number: Collection[int]) -> Iterator[Ddp]:
    """Yield every DistributedDataParallel of the process with a parameter whose ``id`` is in ``number``."""
    found = _alive()
    if len({id(ddp.module) for ddp in found}) < len(found):  # one of two wrappers of a module may be garbage
        del found
        gc.collect()
        found = _alive()
    yield from (ddp for ddp in found if any(id(parameter) in number for parameter in ddp.parameters()))


def _alive() -> list[Ddp]:
    found = instances_of(DistributedDataParallel)
    return [ddp for ddp in found if "module" in vars(ddp).get("_modules", ())]  # else its constructor has failed


def _by_name(ddps: Sequence[Ddp], names: ModelNames) -> dict[str, Ddp]:
    known = {id(parameter): name for name, parameter in reversed(names.parameters.items())}
    return {next(known[id(p)] for p in ddp.parameters() if id(p) in known): ddp for ddp in ddps}


def _joined(layouts: Mapping[str, str | None]) -> Layouts | None:
    known = {name: layout for name, layout in layouts.items() if layout is not None}
    return next(iter(known.values()), None) if len(layouts) < 2 else known or None


def _name(hook: Any) -> str:
    return str(getattr(hook, "__name__", hook))


def _say_hook_state(ddps: Sequence[Ddp]) -> None:
    """Warn of communication hooks with state, which may differ between ranks and is not saved."""
    for ddp in ddps:
        for hook, state in ddp._comm_hooks:
            if state is None or isinstance(state, dist.ProcessGroup) or "mixed_precision" in type(state).__module__:
                continue
            _log.warning(
                "the communication hook %s keeps state of its own (%s), for example the error feedback of PowerSGD, "
                "and it is not saved unless you give it as extra_state (docs/support.md): after a restart the state "
                "begins anew, and the results differ from those of an unbroken run. Without a hook, or with one that "
                "has no state (fp16_compress_hook, bf16_compress_hook), they are the same bit for bit",
                _name(hook),
                type(state).__name__,
            )


def _say_trial_passes(model: nn.Module) -> None:
    """Warn of pipeline stages that have made a trial pass in this launch, if such a pass changes the results."""
    for stage in pipeline_stages(model):
        if getattr(getattr(stage, "_inference_mode", None), "name", "") != "DYNAMIC":
            continue
        parts = list(stage.submod.modules())
        if any(isinstance(part, DistributedDataParallel) for part in parts):
            changed = "DistributedDataParallel then reduces gradients of the first microbatch on its own"
        elif hasattr(stage, _PUTS_BUFFERS_BACK):
            continue
        elif any(getattr(part, "running_mean", None) is not None for part in parts):
            changed = "it changes the running statistics of normalisation layers"
        else:
            continue
        _log.warning(
            "to learn the shapes, pipeline stage %d made a trial pass before its first step, as it does in each "
            "launch, and %s: after a restart the results differ from those of an unbroken run. Give PipelineStage "
            "input_args and output_args; it then needs no trial pass (docs/layouts.md)",
            stage.stage_index,
            changed,
        )
