"""Check by the shapes, before anything is written, that the strategies fit the files, and plan the conversion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ttp.core.layout import ranks_text
from ttp.errors import CheckpointError
from ttp.mindspore_files.ckpt_reader import FileTensor
from ttp.mindspore_files.optimizer_state import OPTIMIZER_SCALARS, is_optimizer_state, owner_of
from ttp.mindspore_files.reshard_source import DamagedError, Source
from ttp.mindspore_files.reshard_strategy import Strategy
from ttp.mindspore_files.tensor_layout import Cell, Shape, TensorLayout, uncut

_ACCUMULATED = "accu_grads."
"""Prefix of the gradients of a pipeline's micro batches, which are not needed between two steps."""

_NAMED_MAX = 5

_Copies = dict[Cell, dict[int, FileTensor]]
"""Cell -> rank -> the file that holds the cell."""


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A tensor with its layouts in the source and in the target.

    Args:
        name: name of the parameter.
        full: shape of the whole tensor.
        source: layout in the source.
        target: layout in the target.
        parts: cell of the source -> one file that holds the cell.
        copies: cell of the source -> rank -> its file, for all ranks whose files hold the cell.
    """

    name: str
    full: Shape
    source: TensorLayout
    target: TensorLayout
    parts: Mapping[Cell, FileTensor]
    copies: Mapping[Cell, Mapping[int, FileTensor]]

    @property
    def sample(self) -> FileTensor:
        """One of the parts; type and shape are the same for all parts."""
        return next(iter(self.parts.values()))

    @property
    def piece(self) -> Shape:
        """Shape of the cell that each target rank holds."""
        piece = self.target.piece_shape(self.full)
        assert piece is not None, self.name
        return piece

    @property
    def piece_bytes(self) -> int:
        """Size of the cell that each target rank holds, in bytes."""
        return math.prod(self.piece) * self.sample.item_size


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a conversion: the tensors of each target rank.

    Args:
        stages: the tensors of each stage of the target, by name.
        devices: number of ranks in each stage of the target.
        passed: name -> rank -> entry, for the entries that no strategy cuts and that are copied.
        source: the strategy of the source; None if every rank holds the whole model.
        notes: what is left out or could not be decided, in words.
    """

    stages: tuple[Mapping[str, TargetTensor], ...]
    devices: int
    passed: Mapping[str, Mapping[int, FileTensor]]
    source: Strategy | None
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
    """Plan from which files each tensor of the target is made.

    Args:
        source: the files.
        src: the strategy of the source; None if every rank holds the whole model.
        dst: the strategy of the target; None for one file with the whole model.
        inference: whether to leave out the optimizer's state.

    Raises:
        DamagedError: files and strategies do not fit, and some files are damaged.
        CheckpointError: files and strategies do not fit. The text lists the problems.
    """
    return _Fit(source, src, dst, inference).plan()


class _Fit:
    def __init__(self, source: Source, src: Strategy | None, dst: Strategy | None, inference: bool) -> None:
        self._source, self._src, self._dst, self._inference = source, src, dst, inference
        self._problems: list[str] = []
        self._notes: list[str] = []
        self._names = dict.fromkeys(name for entries in source.held.values() for name in entries)  # in their order
        self._src_names = set() if src is None else src.names
        self._dst_names = set() if dst is None else dst.names

    def plan(self) -> Plan:
        self._check_world()
        self._refuse()
        wanted = [name for name in self._names if self._wanted(name)]
        self._check_missing(self._src_names)
        self._check_missing(self._dst_names)
        cut = {name: self._entry(name) for name in wanted if self._is_cut(name)}
        entries = {name: entry for name, entry in cut.items() if entry is not None}
        self._check_twins(entries)
        passed = {name: self._passed(name) for name in wanted if name not in cut}
        self._note_whole(passed)
        self._refuse()
        return Plan(
            self._stages(entries),
            1 if self._dst is None else self._dst.devices,
            passed,
            self._src,
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
        if (
            self._dst is None
            or name in self._dst_names
            or not (self._is_cut(name) or owner_of(name) in self._dst_names)
        ):
            return True
        _, _, owner = name.partition(".")
        if name.startswith(_ACCUMULATED) or (self._inference and owner in self._dst_names):
            self._notes.append(f"{name} is not in the target's strategy: left out")
            return False
        way = (
            "all stages of a pipeline. To leave it out, convert to one full file first (without --dst-strategy)"
            if self._inference
            else "a network that is compiled for training, or drop the optimizer's state with --inference"
        )
        self._problems.append(
            f"{name} is in the files but not in the target's strategy {self._dst.origin}: give the strategy of {way}"
        )
        return False

    def _is_cut(self, name: str) -> bool:
        """Return whether a strategy describes this entry; without any strategy, whether it is a tensor."""
        if self._src is None and self._dst is None:
            return self._tensor(name).dtype != "str" and name not in OPTIMIZER_SCALARS
        return name in self._src_names or name in self._dst_names

    def _check_world(self) -> None:
        manifest, src, ranks = self._source.manifest, self._src, self._source.files
        if src is None:
            self._check_slices()
            return
        if manifest is not None and manifest.world_size != src.world_size:
            self._problems.append(
                f"the checkpoint has {manifest.world_size} ranks, but {src.origin} is for {src.world_size}"
            )
        beyond = [rank for rank in ranks if rank >= src.world_size]
        if beyond:
            self._problems.append(
                f"{src.origin} is for {src.world_size} ranks, but there are files of {ranks_text(beyond)}: it is the "
                "strategy of another job, or of one stage of a pipeline (then give the directory of all stages)"
            )

    def _check_slices(self) -> None:
        """Check that each slice of the manifest is there, else one of them could be taken for the whole model."""
        groups = {} if self._source.manifest is None else self._source.manifest.groups
        for shard, ranks in groups.items():
            if not any(rank in self._source.held for rank in ranks):
                self._problems.append(
                    f"there is no whole file of {shard} ({ranks_text(ranks)}), one of the {len(groups)} slices of the "
                    "checkpoint: give --src-strategy, which tells what the other files hold"
                )

    def _check_missing(self, names: set[str]) -> None:
        lacking = [
            name
            for name in sorted(names - self._names.keys())
            if not name.startswith(_ACCUMULATED) and not (self._inference and is_optimizer_state(name, names))
        ]
        if lacking:
            more = f" and {len(lacking) - _NAMED_MAX} more" if len(lacking) > _NAMED_MAX else ""
            self._problems.append(
                f"parameters are missing: no file holds {', '.join(lacking[:_NAMED_MAX])}{more}, which a strategy lists"
            )

    def _refuse(self) -> None:
        if self._problems:
            kept = list(dict.fromkeys(self._problems))
            shown = kept[:_NAMED_MAX]
            more = [f"and {len(kept) - len(shown)} more problems"] if len(kept) > len(shown) else []
            error = DamagedError if self._source.damaged else CheckpointError
            raise error("nothing was written: " + "; ".join([*shown, *more]))

    # --------------------------------------------------------------------------------------------------- the tensors

    def _tensor(self, name: str) -> FileTensor:
        return next(entries[name] for entries in self._source.held.values() if name in entries)

    def _entry(self, name: str) -> TargetTensor | None:
        sample = self._tensor(name)
        if sample.dtype == "str":
            self._problems.append(f"{name} is a text, but a strategy describes it as a tensor")
            return None
        found = self._parts(name, sample)
        if isinstance(found, str):
            self._problems.append(found)
            return None
        layout, copies = found
        full = layout.full_shape(sample.dims)
        targets = self._targets(name, len(full))
        problem = next(self._misfits(name, full, targets), None)
        if problem is not None:
            self._problems.append(problem)
            return None
        parts = {cell: next(iter(held.values())) for cell, held in copies.items()}
        return TargetTensor(name, full, layout, targets[0], parts, copies)

    def _parts(self, name: str, sample: FileTensor) -> tuple[TensorLayout, _Copies] | str:
        """Return the first layout of which the files hold all parts, with the parts, or a text why there is none."""
        problem = f"{name} is cut by the target's strategy, but is not in the source's strategy"
        layouts = self._source_layouts(name, sample)
        if len(layouts) > 1:
            self._notes.append(
                f"{name} is cut in {len(layouts)} ways by the stages of the source: taken from one stage, and not "
                "compared with the others"
            )
        for layout, firsts in layouts.items():
            if len(layout.axes) != len(sample.dims):
                cuts = len(layout.axes)
                problem = f"{name} has the shape {sample.dims} in the files, but the strategy describes {cuts} axes"
                continue
            copies = self._copies(name, sample, firsts, layout)
            if not isinstance(copies, str):
                return layout, copies
            problem = copies
        return problem

    def _source_layouts(self, name: str, sample: FileTensor) -> dict[TensorLayout, list[int]]:
        """Return the layouts of the tensor in the source, each with the first ranks of the stages that have it."""
        if self._src is None:
            return {uncut(len(sample.dims), max(self._source.files) + 1): [0]}
        found: dict[TensorLayout, list[int]] = {}
        for number, stage in enumerate(self._src.stages):
            if name in stage:
                found.setdefault(stage[name], []).append(number * self._src.devices)
        if not found and all(math.prod(one.grid) == 1 for one in self._targets(name, 0)):
            return {uncut(len(sample.dims), self._src.world_size): [0]}
        return found

    def _copies(self, name: str, sample: FileTensor, firsts: Sequence[int], layout: TensorLayout) -> _Copies | str:
        """Return the files that hold each cell, or a text why they cannot be used."""
        found: _Copies = {}
        absent: list[list[int]] = []
        for cell, within in layout.holders().items():
            ranks = [first + rank for first in firsts for rank in within]
            held = {rank: tensor for rank in ranks if (tensor := self._held(rank, name)) is not None}
            odd = [rank for rank, one in held.items() if (one.dtype, one.dims) != (sample.dtype, sample.dims)]
            if odd:
                return (
                    f"{name} is {held[odd[0]].dtype} {held[odd[0]].dims} on {ranks_text(odd)} and {sample.dtype} "
                    f"{sample.dims} on other ranks, but by the strategy all parts have one type and shape"
                )
            if not held:
                absent.append(ranks)
            found[cell] = held
        if not absent:
            return found
        damaged = self._source.damaged
        why = next((damaged[rank] for ranks in absent for rank in ranks if rank in damaged), None)
        return (
            f"{name}: there is no whole file of {' or of '.join(ranks_text(ranks) for ranks in absent[:3])}, and "
            f"no other rank holds the same part{f' ({why})' if why else ''}"
        )

    def _held(self, rank: int, name: str) -> FileTensor | None:
        return self._source.held.get(rank, {}).get(name)

    def _targets(self, name: str, dimensions: int) -> list[TensorLayout]:
        """Return the layouts of the tensor in the stages of the target that have it."""
        if self._dst is None:
            return [uncut(dimensions)]
        return [stage[name] for stage in self._dst.stages if name in stage]

    def _misfits(self, name: str, full: Shape, targets: list[TensorLayout]) -> Iterator[str]:
        for side in (self._src, self._dst):
            told = None if side is None else side.shapes.get(name)
            if side is not None and told is not None and told != full:
                yield (
                    f"{name}: the parts in the files make a tensor of shape {full}, but {side.origin} states {told}: "
                    "the source's strategy is not that of these files"
                )
        for layout in targets:
            if len(layout.axes) != len(full):
                yield f"{name} has the shape {full}, but the target's strategy describes {len(layout.axes)} axes"
            elif layout.piece_shape(full) is None:
                yield f"{name} has the shape {full}, which cannot be cut into the {layout.grid} parts of the target"

    def _check_twins(self, entries: Mapping[str, TargetTensor]) -> None:
        """Check that the optimizer state of a parameter has the shape of the parameter."""
        for name, entry in entries.items():
            owner = owner_of(name)
            twin = None if owner is None else entries.get(owner)
            if twin is not None and len(twin.full) == len(entry.full) and twin.full != entry.full:
                self._problems.append(
                    f"{name} would have the shape {entry.full}, but {owner} {twin.full}: the source's strategy is not "
                    "that of these files (perhaps its opt_weight_shard_size is wrong)"
                )

    def _passed(self, name: str) -> dict[int, FileTensor]:
        held = {rank: entries[name] for rank, entries in self._source.held.items() if name in entries}
        shapes = {(tensor.dtype, tensor.dims) for tensor in held.values()}
        if len({shape for shape in shapes if shape[0] != "str"}) > 1:
            self._problems.append(f"{name} has different shapes on different ranks, but is in no strategy")
        return held

    def _note_whole(self, passed: Mapping[str, Mapping[int, FileTensor]]) -> None:
        """Note what is copied whole from a full file: the target's strategy may be that of another network."""
        if self._src is not None or self._dst is None:
            return
        whole = [name for name in passed if name not in OPTIMIZER_SCALARS and math.prod(self._tensor(name).dims) > 1]
        if whole:
            self._notes.append(
                f"no strategy describes {len(whole)} tensors ({', '.join(whole[:3])}{', ...' if whole[3:] else ''}): "
                "every rank gets them whole"
            )


def undecided(plan: Plan) -> Iterator[str]:
    """Yield notes about tensors for which the files can neither confirm nor refute the source's strategy."""
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
            "once: the order of the parts in the source's strategy could not be checked against a second copy"
        )
