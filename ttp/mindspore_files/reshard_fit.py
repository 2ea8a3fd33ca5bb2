"""Checks by the shapes alone, before anything is written, that the strategies fit the files; and makes a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ttp.core.layout import ranks_text
from ttp.errors import CheckpointError
from ttp.mindspore_files.ckpt_reader import FileTensor
from ttp.mindspore_files.reshard_source import DamagedError, Source
from ttp.mindspore_files.reshard_strategy import Strategy
from ttp.mindspore_files.tensor_layout import Cell, Shape, TensorLayout, uncut

OPTIMIZER_PREFIXES = frozenset({
    "accu_grads", "accum", "accum_update", "adam_m", "adam_v", "ax_", "exp_avg", "exp_avg_sq", "lamb_m", "lamb_v",
    "linear", "mean_grad", "mean_square", "moment", "moment1", "moment2", "moments", "prev", "stat", "step_size",
    "vhat",
})  # fmt: skip
"""What optimizers of ``mindspore.nn`` put before a parameter's name to name the state that they keep for it."""

OPTIMIZER_SCALARS = frozenset({
    "afactor_step", "batch_num", "beta1_power", "beta2_power", "cov_step", "cur_rank", "cur_step_num",
    "current_iterator_step", "epoch_num", "global_step", "last_overflow_iterator_step", "learning_rate", "loss_scale",
    "momentum", "scale_sense", "step_num", "weight_decay",
})  # fmt: skip
"""Entries that belong to the training and not to a parameter."""

_ACCUMULATED = "accu_grads."
"""Gradients of the micro batches of a pipeline; they hold nothing between two steps."""

_NAMED_MAX = 5

_Parts = tuple[int, TensorLayout, "dict[Cell, dict[int, FileTensor]]"]
"""The first rank of a stage, how the tensor is cut there, and cell -> rank -> the file that holds it."""


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """One tensor, how the source cuts it, and how the target cuts it.

    Args:
        name: of the parameter.
        full: shape of the whole tensor.
        source: how the files cut it.
        target: how it is to be cut.
        parts: cell of the source -> one file that holds it.
        copies: cell of the source -> every rank whose file holds it -> that file.
        first: the first rank of the stage that the parts come from.
    """

    name: str
    full: Shape
    source: TensorLayout
    target: TensorLayout
    parts: Mapping[Cell, FileTensor]
    copies: Mapping[Cell, Mapping[int, FileTensor]]
    first: int

    @property
    def sample(self) -> FileTensor:
        """One of the parts, to ask for type and shape: these are the same for all parts."""
        return next(iter(self.parts.values()))

    @property
    def piece(self) -> Shape:
        """Shape of what each target rank holds."""
        piece = self.target.piece_shape(self.full)
        assert piece is not None, self.name
        return piece

    @property
    def piece_bytes(self) -> int:
        """Size of what each target rank holds, in bytes."""
        return math.prod(self.piece) * self.sample.item_size


@dataclass(frozen=True, slots=True)
class Plan:
    """What each target rank gets.

    Args:
        stages: the tensors of each stage of the target, by name.
        devices: number of ranks in each stage of the target.
        passed: name -> rank -> an entry that no strategy cuts, and that is passed on as it is.
        source: the strategy of the files; None: every rank holds everything.
        target: the strategy wanted; None: one file that holds everything.
        notes: what is left out or could not be decided, in words.
    """

    stages: tuple[Mapping[str, TargetTensor], ...]
    devices: int
    passed: Mapping[str, Mapping[int, FileTensor]]
    source: Strategy | None
    target: Strategy | None
    notes: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks of the target."""
        return self.devices * len(self.stages)

    @property
    def entries(self) -> dict[str, TargetTensor]:
        """All tensors of all stages, by name."""
        return {name: entry for stage in self.stages for name, entry in stage.items()}

    def of_rank(self, rank: int) -> Mapping[str, TargetTensor]:
        """Return the tensors of a target rank, by name."""
        return self.stages[rank // self.devices]


def make_plan(source: Source, src: Strategy | None, dst: Strategy | None, *, inference: bool) -> Plan:
    """Decide which files each tensor of the target is made of.

    Args:
        source: the files.
        src: their strategy; None: every rank holds everything.
        dst: the strategy wanted; None: one file that holds everything.
        inference: True: leave out the optimizer's state.

    Raises:
        DamagedError: files and strategies do not fit, and some files are damaged.
        CheckpointError: files and strategies do not fit. The text lists what was found.
    """
    return _Fit(source, src, dst, inference).plan()


class _Fit:
    def __init__(self, source: Source, src: Strategy | None, dst: Strategy | None, inference: bool) -> None:
        self._source, self._src, self._dst, self._inference = source, src, dst, inference
        self._problems: list[str] = []
        self._notes: list[str] = []
        self._names = list(dict.fromkeys(name for entries in source.held.values() for name in entries))

    def plan(self) -> Plan:
        self._check_world()
        self._refuse()
        wanted = [name for name in self._names if self._wanted(name)]
        if self._src is not None:
            self._check_missing(self._src.names)
        if self._dst is not None:
            self._check_missing(self._dst.names)
        cut = {name: self._entry(name) for name in wanted if self._is_cut(name)}
        entries = {name: entry for name, entry in cut.items() if entry is not None}
        self._check_twins(entries)
        passed = {name: self._passed(name) for name in wanted if name not in cut}
        self._refuse()
        return Plan(
            self._stages(entries),
            1 if self._dst is None else self._dst.devices,
            passed,
            self._src,
            self._dst,
            tuple(self._notes),
        )

    def _stages(self, entries: Mapping[str, TargetTensor]) -> tuple[dict[str, TargetTensor], ...]:
        if self._dst is None:
            return (dict(entries),)
        return tuple(
            {name: replace(entry, target=stage[name]) for name, entry in entries.items() if name in stage}
            for stage in self._dst.stages
        )

    # ----------------------------------------------------------------------------------------------------- the names

    def _wanted(self, name: str) -> bool:
        if self._inference and is_optimizer_state(name, self._names):
            return False
        if self._dst is None or name in self._dst.names or not (self._is_cut(name) or self._twin_is_cut(name)):
            return True
        if self._inference or name.startswith(_ACCUMULATED):
            self._notes.append(f"{name} is not in the target's strategy: left out")
            return False
        self._problems.append(
            f"{name} is in the files but not in the target's strategy {self._dst.origin}: give the strategy of a "
            "network that is compiled for training, or drop the optimizer's state with --inference"
        )
        return False

    def _is_cut(self, name: str) -> bool:
        """Return whether a strategy describes this entry.

        Without any strategy, every tensor counts as one that may be cut.
        """
        if self._src is None and self._dst is None:
            return self._tensor(name).dtype != "str" and name not in OPTIMIZER_SCALARS
        return any(side is not None and name in side.names for side in (self._src, self._dst))

    def _twin_is_cut(self, name: str) -> bool:
        """Return whether this is optimizer state of a parameter that the target's strategy describes."""
        assert self._dst is not None, name
        prefix, _, owner = name.partition(".")
        return prefix in OPTIMIZER_PREFIXES and owner in self._dst.names

    def _check_world(self) -> None:
        manifest, src, ranks = self._source.manifest, self._src, self._source.files
        if src is None:
            return
        if manifest is not None and manifest.world_size != src.world_size:
            self._problems.append(
                f"the checkpoint is of {manifest.world_size} ranks, and {src.origin} is for {src.world_size}"
            )
        beyond = [rank for rank in ranks if rank >= src.world_size]
        if beyond:
            self._problems.append(
                f"{src.origin} is for {src.world_size} ranks, and there are files of {ranks_text(beyond)}: it is the "
                "strategy of another job, or of one stage of a pipeline (then give the directory of all)"
            )

    def _check_missing(self, names: Iterable[str]) -> None:
        lacking = [
            name
            for name in sorted(set(names) - set(self._names))
            if not name.startswith(_ACCUMULATED) and not (self._inference and is_optimizer_state(name, names))
        ]
        if lacking:
            more = f" and {len(lacking) - _NAMED_MAX} more" if len(lacking) > _NAMED_MAX else ""
            self._problems.append(
                f"no file holds {', '.join(lacking[:_NAMED_MAX])}{more}, of which a strategy speaks: missing parameters"
            )

    def _refuse(self) -> None:
        if self._problems:
            kept = list(dict.fromkeys(self._problems))
            shown = kept[:_NAMED_MAX]
            more = [f"and {len(kept) - len(shown)} more of the kind"] if len(kept) > len(shown) else []
            error = DamagedError if self._source.damaged else CheckpointError
            raise error("nothing was written: " + "; ".join([*shown, *more]))

    # --------------------------------------------------------------------------------------------------- the tensors

    def _tensor(self, name: str) -> FileTensor:
        return next(entries[name] for entries in self._source.held.values() if name in entries)

    def _entry(self, name: str) -> TargetTensor | None:
        sample = self._tensor(name)
        if sample.dtype == "str":
            self._problems.append(f"{name} is a text, and a strategy speaks of it as of a tensor")
            return None
        found = self._parts(name, sample)
        if isinstance(found, str):
            self._problems.append(found)
            return None
        first, layout, copies = found
        full = layout.full_shape(sample.dims)
        targets = self._targets(name, len(full))
        problem = next(self._misfits(name, full, targets), None)
        if problem is not None:
            self._problems.append(problem)
            return None
        parts = {cell: next(iter(held.values())) for cell, held in copies.items()}
        return TargetTensor(name, full, layout, targets[0], parts, copies, first)

    def _parts(self, name: str, sample: FileTensor) -> _Parts | str:
        """Return the parts in the first stage that holds the whole tensor; a text says why there is no such stage."""
        problem = f"{name} is cut by the target's strategy, and the source's says nothing of it"
        for first, layout in self._source_layouts(name, sample):
            if len(layout.axes) != len(sample.dims):
                cuts = len(layout.axes)
                problem = f"{name} has the shape {sample.dims} in the files, and the strategy cuts {cuts} axes"
                continue
            copies = self._copies(name, sample, first, layout)
            if not isinstance(copies, str):
                return first, layout, copies
            problem = copies
        return problem

    def _source_layouts(self, name: str, sample: FileTensor) -> Iterator[tuple[int, TensorLayout]]:
        """Yield for each stage that has the tensor: the stage's first rank, and how it is cut there."""
        if self._src is None:
            yield 0, uncut(len(sample.dims), max(self._source.files) + 1)
            return
        for number, stage in enumerate(self._src.stages):
            if name in stage:
                yield number * self._src.devices, stage[name]
        if name not in self._src.names and all(math.prod(one.grid) == 1 for one in self._targets(name, 0)):
            yield 0, uncut(len(sample.dims), self._src.world_size)

    def _copies(
        self, name: str, sample: FileTensor, first: int, layout: TensorLayout
    ) -> dict[Cell, dict[int, FileTensor]] | str:
        """Return the files that hold each cell; a text says why they cannot be used."""
        found: dict[Cell, dict[int, FileTensor]] = {}
        absent: list[list[int]] = []
        for cell, ranks in layout.holders().items():
            held = {first + rank: tensor for rank in ranks if (tensor := self._held(first + rank, name)) is not None}
            odd = [rank for rank, one in held.items() if (one.dtype, one.dims) != (sample.dtype, sample.dims)]
            if odd:
                return (
                    f"{name} is {held[odd[0]].dtype} {held[odd[0]].dims} on {ranks_text(odd)} and {sample.dtype} "
                    f"{sample.dims} elsewhere: the strategy says that all parts are alike"
                )
            if not held:
                absent.append([first + rank for rank in ranks])
            found[cell] = held
        if not absent:
            return found
        damaged = self._source.damaged
        why = next((damaged[rank] for ranks in absent for rank in ranks if rank in damaged), None)
        return (
            f"{name}: no whole file of {' or of '.join(ranks_text(ranks) for ranks in absent[:3])} is there, and "
            f"nobody else holds the same part{f' ({why})' if why else ''}"
        )

    def _held(self, rank: int, name: str) -> FileTensor | None:
        return self._source.held.get(rank, {}).get(name)

    def _targets(self, name: str, dimensions: int) -> list[TensorLayout]:
        """Return how each stage of the target cuts the tensor."""
        if self._dst is None:
            return [uncut(dimensions)]
        return [stage[name] for stage in self._dst.stages if name in stage]

    def _misfits(self, name: str, full: Shape, targets: list[TensorLayout]) -> Iterator[str]:
        for side in (self._src, self._dst):
            told = None if side is None else side.shapes.get(name)
            if side is not None and told is not None and told != full:
                yield (
                    f"{name}: the files' parts make a tensor of shape {full}, and {side.origin} says {told}: the "
                    "source's strategy is not that of these files"
                )
        for layout in targets:
            if len(layout.axes) != len(full):
                yield f"{name} has the shape {full}, and the target's strategy cuts {len(layout.axes)} axes"
            elif layout.piece_shape(full) is None:
                yield f"{name} has the shape {full}, which cannot be cut into the {layout.grid} parts of the target"

    def _check_twins(self, entries: Mapping[str, TargetTensor]) -> None:
        """Check that the optimizer state of a parameter has the shape of the parameter."""
        for name, entry in entries.items():
            prefix, _, owner = name.partition(".")
            twin = entries.get(owner) if prefix in OPTIMIZER_PREFIXES else None
            if twin is not None and len(twin.full) == len(entry.full) and twin.full != entry.full:
                self._problems.append(
                    f"{name} would have the shape {entry.full}, and {owner} {twin.full}: the source's strategy is not "
                    "that of these files (opt_weight_shard_size?)"
                )

    def _passed(self, name: str) -> dict[int, FileTensor]:
        held = {rank: entries[name] for rank, entries in self._source.held.items() if name in entries}
        shapes = {(tensor.dtype, tensor.dims) for tensor in held.values()}
        if len({shape for shape in shapes if shape[0] != "str"}) > 1:
            self._problems.append(f"{name} has different shapes on different ranks, and no strategy says how it is cut")
        return held


def is_optimizer_state(name: str, names: Iterable[str]) -> bool:
    """Return whether inference does not need it: the optimizer's state of another parameter, or a counter of steps."""
    prefix, _, owner = name.partition(".")
    return name in OPTIMIZER_SCALARS or (prefix in OPTIMIZER_PREFIXES and owner in _as_set(names))


def _as_set(names: Iterable[str]) -> frozenset[str] | set[str]:
    return names if isinstance(names, (set, frozenset)) else frozenset(names)


def undecided(plan: Plan) -> Iterator[str]:
    """Yield what only the strategy says, and the files can neither confirm nor refute."""
    if plan.source is None:
        return
    lone = [
        entry.name
        for entry in plan.entries.values()
        if len(entry.copies) > 1
        and entry.name not in plan.source.shapes
        and all(len(held) == 1 for held in entry.copies.values())
    ]
    if lone:
        yield (
            f"of {len(lone)} tensors ({', '.join(lone[:3])}{', ...' if len(lone) > 3 else ''}) each part is on disk "
            "once: that the parts go together as the source's strategy says could not be checked against a second copy"
        )
