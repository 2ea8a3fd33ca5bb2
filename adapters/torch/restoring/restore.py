"""Loads a checkpoint into a live model, optimizer, scheduler and scaler, bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttp.adapters.torch.local_state.buffers import overlaps
from ttp.adapters.torch.loop.unwrap_optimizer import unwrap_optimizer
from ttp.adapters.torch.restoring.compare import hand_to, is_left_out, model_differences, optimizer_differences
from ttp.adapters.torch.restoring.kept import Kept, UnlikeError, hand_over
from ttp.adapters.torch.restoring.param_groups import added_since, groups_for, load_groups
from ttp.adapters.torch.restoring.reader import by_path, load_chunks, read_value, read_values
from ttp.adapters.torch.restoring.schedules import load_scaler, load_scheduler
from ttp.adapters.torch.saving.flatten_state import put
from ttp.adapters.torch.saving.job_state import FROZEN, TOGGLED, ZEROED, JobState, read_job_state
from ttp.adapters.torch.saving.metadata import fitting
from ttp.adapters.torch.saving.piece_index import IndexEntry, items_of, left_out_of
from ttp.adapters.torch.saving.state import frozen
from ttp.adapters.torch.sharding.data_parallel import apply_layouts, ddps_of
from ttp.adapters.torch.sharding.dtensor_chunks import Cutter, empty_beside, is_distributed
from ttp.adapters.torch.sharding.names import ModelNames, parameters_of
from ttp.errors import CheckpointError, OtherModelError
from ttp.store.manifest import Manifest

_log = logging.getLogger("ttp.adapters.torch")

_LISTED_MAX = 4
_STATE = ("optim", "state")
_GROUPS = ("optim", "param_groups")
_Owners = Mapping[str, tuple[Tensor, Mapping[str, Any]]]


def restore_into(
    path: Path,
    manifest: Manifest,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any = None,
    scaler: Any = None,
    elsewhere: Collection[str] = (),
    kept: Kept | None = None,
) -> tuple[JobState, list[str]]:
    """Load the checkpoint at ``path`` into these objects, in place.

    Every rank calls it with the same checkpoint, before the first forward pass. The ranks do not communicate.

    Args:
        path: the directory of the checkpoint, whose digests have been verified.
        manifest: its manifest.
        model: the module, wrapped or not.
        optimizer: has the class and the param groups of the saved one; in a pipeline stage a part of the groups.
        scheduler: one or a list of LR schedulers; None: none. A pending ``step()`` is made (see ``JobState``).
        scaler: a GradScaler; None: none. A pending ``update()`` is made (see ``JobState``).
        elsewhere: names that only other ranks of this job have, such as other pipeline stages.
        kept: the state of model and optimizer that is in memory already; None: none. With it, no tensors are read, and
            buffers are restored with the rank-local state.

    Returns:
        The job-wide scalars, of which the caller has to restore ``extra``, and differences from the saved state, in
        words.

    Raises:
        UnlikeError: ``kept`` does not fit (nothing has been modified).
        CheckpointError: the checkpoint belongs to another model or optimizer (nothing has been modified), or a piece
            of it cannot be read.
    """
    names = ModelNames(model, optimizer)
    cutter = Cutter(model, names)
    try:
        saved = _read(path, manifest, names, optimizer, frozenset(elsewhere))
        added = [] if elsewhere or saved.weights_only else added_since(saved.groups, names, optimizer)
        _refuse_foreign(saved, names, optimizer, cutter, len(added))
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as problem:
        raise CheckpointError(f"{path} cannot be understood ({problem!r}). Nothing was loaded") from problem
    if kept is not None:
        if added or saved.weights_only or saved.left_out:
            raise UnlikeError("the checkpoint has param groups that the program adds later, or lacks some of the state")
        hand_over(kept, names, optimizer, saved.optimizer)
        load_groups(saved.groups, optimizer)
    else:
        fitting(saved.items)  # called for its check
        _load_model(saved, names, cutter)
        for group in added:
            optimizer.add_param_group(group)
        if not saved.weights_only:
            _load_optimizer(saved, names, optimizer, cutter)
    job = saved.job
    notes = ["it holds weights only: the optimizer keeps its initial state"] if saved.weights_only else []
    if added:
        notes.append(f"param groups that this program adds later ({len(added)}) were added to its optimizer now")
    notes += [f"{key} could not be saved: it keeps the value that this program gave it" for key in saved.left_out]
    notes += load_scheduler(scheduler, job) + load_scaler(scaler, job) + _load_buckets(model, names, job)
    notes += [] if elsewhere else _frozen_differently(names, optimizer, job)
    _make_gradients(names, job)
    for note in notes:
        _log.warning("restored version %d from %s, but %s", job.version, path, note)
    return job, notes


@dataclass(frozen=True, slots=True)
class _Saved:
    """What is read of a checkpoint before anything is modified: the tables of contents and the small values."""

    path: Path
    manifest: Manifest
    job: JobState
    items: Sequence[IndexEntry]
    model: Sequence[IndexEntry]
    optimizer: Sequence[IndexEntry]
    groups: Sequence[Mapping[str, Any]]
    optimizer_kind: str
    extra_states: Mapping[str, Any]
    left_out: Sequence[str]
    weights_only: bool


def _read(
    path: Path, manifest: Manifest, names: ModelNames, optimizer: Optimizer, elsewhere: Collection[str]
) -> _Saved:
    every = items_of(manifest.pieces)
    # One item per value is enough: any chunk of a tensor has its dtype and whole shape.
    items = [chunks[0] for chunks in by_path(every) if _owner(chunks[0]) not in elsewhere]
    short = next((item for item in items if len(item.path) < _parts_min(item)), None)
    if short is not None:
        raise ValueError(f"{short.key} is the path of a container, not of a value")
    small = read_values(path, [item for item in items if _is_small(item, names)])
    job, groups = read_job_state(path, manifest.pieces), small.get("optim", {}).get("param_groups", [])
    return _Saved(
        path=path,
        manifest=manifest,
        job=job,
        items=every,
        model=[item for item in items if item.path[0] == "model"],
        optimizer=[item for item in items if item.path[:2] == _STATE],
        groups=groups_for(job.with_settings(groups), names, optimizer, elsewhere),
        optimizer_kind=str(small.get("ttp", {}).get("optimizer", "")),
        extra_states=small.get("model", {}),
        left_out=left_out_of(manifest.pieces),
        weights_only=small.get("ttp", {}).get("weights_only") is True,  # `ttp convert` made it from a file of weights
    )


def _owner(item: IndexEntry) -> str:
    """Return the name of the parameter or buffer to which a saved value belongs; empty if it belongs to none."""
    at = 2 if item.path[:2] in (_STATE, _GROUPS) else 1 if item.path[0] == "model" else len(item.path)
    return str(item.path[at]) if at < len(item.path) else ""


def _parts_min(item: IndexEntry) -> int:
    """Return the least number of steps that the path of such a value has."""
    return 3 if item.path[:2] == _STATE else 2 if item.path[0] == "model" else 1


def _is_small(item: IndexEntry, names: ModelNames) -> bool:
    if item.path[0] == "model":
        return item.path[1] in names.extra_states
    return item.path[0] == "ttp" or item.path[:2] == _GROUPS


def _refuse_foreign(saved: _Saved, names: ModelNames, optimizer: Optimizer, cutter: Cutter, added: int) -> None:
    version = saved.manifest.version
    if saved.job.version != version:
        raise CheckpointError(f"{saved.path} is of version {version}, but its job state of version {saved.job.version}")
    problems = model_differences(names, saved.model, saved.left_out, cutter)
    if not saved.weights_only:
        known = saved.groups[: len(saved.groups) - added]
        problems += optimizer_differences(names, optimizer, known, saved.optimizer_kind)
    if problems:
        raise OtherModelError(
            f"{saved.path} belongs to another model: {'; '.join(problems)}. Nothing was loaded. Use the code that "
            "wrote it, or another save_dir to start at step 0"
        )


# -------------------------------------------------------------------------------------------------------------- tensors


def _load_model(saved: _Saved, names: ModelNames, cutter: Cutter) -> None:
    _make_buffers(saved, names)
    tensors = names.parameters | names.buffers
    targets = {name: _writable(tensors[name]) for item in saved.model if (name := str(item.path[1])) in tensors}
    load_chunks(saved.path, saved.items, [(("model", n), cutter.chunks(n, tensor)) for n, tensor in targets.items()])
    for name, loaded in targets.items():
        if loaded is not tensors[name] and not torch.equal(loaded, tensors[name]):
            if name in names.parameters:
                tensors[name].data = loaded  # frozen, as no optimizer can update such a parameter
            else:
                names.replace_buffer(name, loaded)
    for name, owner in names.extra_states.items():
        if name in saved.extra_states and not is_left_out(name, saved.left_out):
            hand_to(f"set_extra_state() of {name}", owner.set_extra_state, saved.extra_states[name])


def _make_buffers(saved: _Saved, names: ModelNames) -> None:
    """Give buffers of any shape (see ``takes_any_shape``) the shapes and dtypes that they have in the checkpoint."""
    changing, live = names.of_any_shape, names.buffers
    for item in saved.model:
        name, form = str(item.path[1]), (item.shape, item.torch_dtype) if item.is_tensor else None
        if form is None or name not in changing:
            continue
        tensor = live.get(name)
        if tensor is None or (tuple(tensor.shape), tensor.dtype) != form:
            device = names.device if tensor is None else tensor.device
            names.replace_buffer(name, torch.empty(item.shape, dtype=item.torch_dtype, device=device))


def _writable(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a new tensor if its elements share memory: torch refuses to write to such a tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if overlaps(tensor) else tensor


def _load_optimizer(saved: _Saved, names: ModelNames, optimizer: Optimizer, cutter: Cutter) -> None:
    pairs = list(zip(optimizer.param_groups, saved.groups, strict=True))
    owners = {names.of(parameter): (parameter, other) for group, other in pairs for parameter in group["params"]}
    parameters = {str(item.path[1]): item for item in saved.model}
    kept = unwrap_optimizer(optimizer)
    here = {names.of(parameter) for parameter in parameters_of(kept)}
    items = [item for item in saved.optimizer if item.path[2] in here or item.path[2] not in owners]
    items = [item for item in items if not (item.path[2] in owners and cutter.absent(str(item.path[2])))]
    tensors = {item.path: _empty(item, owners, parameters, cutter) for item in items if item.is_tensor}
    wanted = [(steps, cutter.chunks(str(steps[2]), tensor)) for steps, tensor in tensors.items()]
    load_chunks(saved.path, saved.items, wanted)
    loaded: dict[str, Any] = {}
    for item in items:
        int_keys = [position - len(_STATE) for position in item.int_keys]
        value = tensors[item.path] if item.is_tensor else read_value(saved.path, item)
        put(loaded, item.path[len(_STATE) :], value, int_keys)
    state: dict[Any, Any] = kept.state  # torch allows keys that are not tensors
    state.clear()
    order = {name: number for number, name in enumerate(owners)}  # in which the optimizer would make its state
    for name in sorted(loaded, key=lambda name: order.get(name, len(order))):
        state[owners[name][0] if name in owners else name] = loaded[name]
    load_groups(saved.groups, optimizer)


def _empty(item: IndexEntry, owners: _Owners, parameters: Mapping[str, IndexEntry], cutter: Cutter) -> Tensor:
    """Make a tensor for one value of the optimizer's state, on the device on which the optimizer would put it."""
    owner, device = str(item.path[2]), torch.device("cpu")
    if owner in owners:
        parameter, group = owners[owner]
        saved = parameters.get(owner)
        if _belongs_to_device(item, saved.device if saved else "cpu", parameter, group):
            device = parameter.device
            alike = is_distributed(parameter) or saved is None or item.order == saved.order
            if alike and item.shape == cutter.shape(owner, parameter):
                return torch.empty_like(parameter.detach(), dtype=item.torch_dtype)  # sharded as the parameter is
            if (made := empty_beside(parameter, item.shape, item.torch_dtype, item.placed)) is not None:
                return made
    order = item.order or tuple(range(len(item.shape)))
    return torch.empty_permuted(item.shape, order, dtype=item.torch_dtype, device=device)


def _belongs_to_device(item: IndexEntry, saved_parameter: str, parameter: Tensor, group: Mapping[str, Any]) -> bool:
    """Return whether a tensor of the optimizer's state goes to its parameter's device; if not, it goes to the CPU.

    It goes where it was in the saved job. If that does not decide it (everything was on the CPU, and now there is an
    accelerator), the rule of torch's optimizers applies.
    """
    if item.device != saved_parameter:
        return item.device != "cpu"
    if saved_parameter == parameter.device.type or item.path[-1] != "step":
        return True
    return bool(group.get("capturable") or group.get("fused"))


# ------------------------------------------------------------------------------- frozen parameters and bucket layouts


def _frozen_differently(names: ModelNames, optimizer: Optimizer, job: JobState) -> list[str]:
    """Return notes on parameters whose ``requires_grad`` differs from the saved one; the program has to set it."""
    if not isinstance(saved := job.extra.get(FROZEN), list):
        return []  # `ttp convert` made the checkpoint, from a file without such a list
    here, toggled = {*frozen(names, optimizer)}, job.extra.get(TOGGLED, ())
    both = ("trained", "frozen", here.difference(saved)), ("frozen", "trained", {*saved} - here)
    return [
        f"{len(found)} parameters ({', '.join(found[:_LISTED_MAX])}) were {then} when it was saved and are {now} here "
        "(requires_grad): a program that freezes layers in mid-run has to do it by the step at which it begins"
        for then, now, differ in both
        if (found := sorted(differ.difference(toggled)))
    ]


def _make_gradients(names: ModelNames, job: JobState) -> None:
    """Make gradients of zeros where the loop of the saved program had some: an optimizer skips what has none."""
    for name in job.extra.get(ZEROED, ()):
        parameter = names.parameters.get(name)
        if parameter is not None and parameter.grad is None and not is_distributed(parameter):
            parameter.grad = torch.zeros_like(parameter)


def _load_buckets(model: nn.Module, names: ModelNames, job: JobState) -> list[str]:
    reasons = apply_layouts(ddps_of(model), names, job.ddp_buckets)
    return [f"the next steps may differ in the last bits from an unbroken run: {reason}" for reason in reasons]
