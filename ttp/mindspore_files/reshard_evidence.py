"""Check a source strategy against the bytes of the files: copies have to be equal, and parts should differ."""

from __future__ import annotations

from collections.abc import Mapping

from ttp.core.layout import ranks_text
from ttp.errors import CheckpointError
from ttp.mindspore_files.ckpt_reader import FileTensor
from ttp.mindspore_files.optimizer_state import OPTIMIZER_SCALARS
from ttp.mindspore_files.reshard_fit import Plan, TargetTensor, undecided
from ttp.mindspore_files.tensor_bytes import digest, read_bytes
from ttp.mindspore_files.tensor_layout import Cell
from ttp.store.digest import Progress

_ELEMENTS_MIN = 16
"""Parts with fewer elements may be equal by chance, and are not compared."""

_SMALL = 1 << 12
"""Size in bytes above which entries that are not cut are compared by their digests."""


def size(plan: Plan) -> int:
    """Return the number of bytes that ``examine`` reads."""
    return sum(
        tensor.nbytes for entry in plan.entries.values() for held in entry.copies.values() for tensor in held.values()
    )


def examine(plan: Plan, *, trust_parts: bool, told: Progress) -> list[str]:
    """Read every part once, and compare copies and parts.

    A wrong strategy, such as one with a wrong ``opt_weight_shard_size``, mistakes different parts for copies, or copies
    for parts. The first is detected if two files hold the same cell, the second unless all elements of the parts are
    equal.

    Args:
        plan: the conversion.
        trust_parts: whether equal parts are only a remark in the result instead of an error.
        told: is called with the number of bytes newly read.

    Returns:
        Remarks: what could not be decided, and entries in no strategy that differ between ranks.

    Raises:
        CheckpointError: the files contradict the strategy.
    """
    problems: list[str] = []
    doubts: list[str] = []
    for entry in plan.entries.values():
        digests = {c: {r: digest(one, told) for r, one in held.items()} for c, held in entry.copies.items()}
        problems += _copies_differ(entry, digests)
        doubts += _parts_equal(entry, digests)
    if not trust_parts:
        problems += [f"{doubt}. If that is right, give --trust-parts" for doubt in doubts]
    if problems:
        more = f"; and {len(problems) - 4} more problems" if len(problems) > 4 else ""
        raise CheckpointError(
            "the source's strategy is not that of these files, nothing was written: " + "; ".join(problems[:4]) + more
        )
    return [*doubts, *undecided(plan), *_passed_differ(plan)]


_Digests = Mapping[Cell, Mapping[int, tuple[str, bool]]]


def _copies_differ(entry: TargetTensor, digests: _Digests) -> list[str]:
    for held in digests.values():
        groups: dict[str, list[int]] = {}
        for rank, (hashed, _) in held.items():
            groups.setdefault(hashed, []).append(rank)
        if len(groups) > 1:
            sides = " and ".join(ranks_text(ranks) for ranks in list(groups.values())[:3])
            return [f"{entry.name} should be equal on {ranks_text(held)} but differs between {sides}"]
    return []


def _parts_equal(entry: TargetTensor, digests: _Digests) -> list[str]:
    count = entry.sample.nbytes // max(1, entry.sample.item_size)
    if len(digests) < 2 or count < _ELEMENTS_MIN:
        return []
    seen: dict[str, Cell] = {}
    for cell, held in digests.items():
        hashed, constant = next(iter(held.values()))
        if constant:
            continue
        if hashed in seen:
            ranks = [next(iter(entry.copies[seen[hashed]])), next(iter(entry.copies[cell]))]
            return [f"{entry.name} should be different parts of a tensor on {ranks_text(ranks)} but is equal"]
        seen[hashed] = cell
    return []


def _passed_differ(plan: Plan) -> list[str]:
    differing = [name for name, held in plan.passed.items() if name not in OPTIMIZER_SCALARS and _differ(held)]
    if not differing:
        return []
    more = ", ..." if len(differing) > 3 else ""
    return [
        f"{', '.join(differing[:3])}{more} differ between ranks and are in no strategy: each target rank gets those of "
        "the source rank with the same number, or else of the lowest rank"
    ]


def _differ(held: Mapping[int, FileTensor]) -> bool:
    tensors = list(held.values())
    if tensors[0].nbytes <= _SMALL:
        return any(read_bytes(tensor) != read_bytes(tensors[0]) for tensor in tensors[1:])
    return len({digest(tensor)[0] for tensor in tensors}) > 1
