"""Plan the recovery from redundancy: decide which file each rank loads, given the state of each rank's own file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ttp.core.layout import ranks_text
from ttp.mindspore_files.ckpt_reader import CkptContents
from ttp.mindspore_files.rank_folders import Stamp
from ttp.mindspore_files.redundancy import ReplicaGroups

OWN = frozenset({"cur_rank"})
"""Entries that may differ between replicas."""

DIFFERING_SHOWN = 5

BREAKPOINT = "_breakpoint.ckpt"
"""Suffix of the files that MindSpore writes after an exception.

Such a file may be of a step that was not finished, so it is tried last.
"""

_STEP = re.compile(r"-(\d{1,9})_(\d{1,12})(?:_breakpoint)?\.(?:ckpt|safetensors)$", re.ASCII)
_RANK = re.compile(r"rank_\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of one rank's own file.

    Args:
        file: path of the file below the directory; empty if there is none.
        contents: contents of the file; None if it cannot be used.
        problem: why it cannot be used, in words.
        stamp: the stamp of the file before it was read, see ``rank_folders``.
    """

    file: str = ""
    contents: CkptContents | None = None
    problem: str = ""
    stamp: Stamp = None


@dataclass(frozen=True, slots=True)
class Fate:
    """The decision about one rank: which file it loads.

    Args:
        rank: the rank.
        state: ``own``: it loads its own file; ``replica``: it loads another rank's file; ``lost``: there is no file.
        source: the rank whose file it loads; None if ``lost``.
        why: why it does not load its own file, in words; empty for ``own``.
    """

    rank: int
    state: str
    source: int | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The decisions for all ranks, and the differences between replicas that should be equal, in words."""

    fates: tuple[Fate, ...]
    disagreements: tuple[str, ...]

    @property
    def lost(self) -> tuple[Fate, ...]:
        """The ranks whose state cannot be rebuilt."""
        return tuple(fate for fate in self.fates if fate.state == "lost")


def step_of(name: str) -> tuple[int, int] | None:
    """Return epoch and step from the name of a file, ``prefix-EPOCH_STEP.ckpt``; None if the name has none."""
    found = _STEP.search(name)
    return (int(found[1]), int(found[2])) if found else None


def by_template(names: Mapping[int, Iterable[str]]) -> dict[str, dict[int, str]]:
    """Group the files of all ranks into checkpoints.

    The rank in a name is the number in ``rank_3``, or the number before epoch and step, as in ``pangu3-1_20.ckpt`` in
    the folder of rank 3. The latter does not count if another rank has a file of exactly that name.

    Args:
        names: rank -> names of its files.

    Returns:
        Template -> rank -> name. A template is a name with ``*`` in place of the rank.
    """
    plain: dict[str, set[int]] = {}
    for rank, found in names.items():
        for name in found:
            plain.setdefault(_RANK.sub("rank_*", name), set()).add(rank)
    together: dict[str, dict[int, str]] = {}
    for rank, found in names.items():
        for name in found:
            template = _RANK.sub("rank_*", name)
            if template == name and plain[name] == {rank}:
                template = re.sub(rf"(?<!\d){rank}(?=-\d+_\d+)", "*", name, count=1)
            together.setdefault(template, {})[rank] = name
    return together


def for_rank(template: str, rank: int) -> str:
    """Return the name of a rank's file, given its template."""
    return template.replace("*", str(rank))


def newest_first(
    together: Mapping[str, Mapping[int, str]], groups: ReplicaGroups, step: tuple[int, int] | None = None
) -> list[str]:
    """Sort checkpoints by the order in which to try them, and return their templates.

    First come those of which every group has a file, newest first and breakpoints last; then the others,
    those of more groups first.

    Args:
        together: the checkpoints, see ``by_template``.
        groups: groups of ranks whose files are interchangeable.
        step: epoch and step of the checkpoints to return; None for all.
    """

    def step_in(template: str) -> tuple[int, int] | None:
        return step_of(template.replace("*", "0"))

    def value(template: str) -> tuple[bool, int, bool, tuple[int, int], str]:
        covered = sum(1 for group in groups if set(together[template]) & set(group))
        everywhere = covered == len(groups)
        counted = 0 if everywhere else covered
        return everywhere, counted, not template.endswith(BREAKPOINT), step_in(template) or (-1, -1), template

    wanted = [template for template in together if step is None or step_in(template) == step]
    return sorted(wanted, key=value, reverse=True)


def recover(seen: Mapping[int, Seen], groups: ReplicaGroups, why_alone: str) -> Outcome:
    """Decide for each rank which file it loads.

    Args:
        seen: the state of every rank's own file.
        groups: groups of ranks whose files have to be equal. Each rank is in one group.
        why_alone: the reason to state for a lost rank without replicas.
    """
    seen = _of_one_step(seen, groups)
    fates: list[Fate] = []
    disagreements: list[str] = []
    for group in groups:
        good = [rank for rank in group if seen[rank].contents is not None]
        right, odd, words = _agreeing(good, seen)
        disagreements += words
        for rank in group:
            fates.append(_fate(rank, group, seen, right, odd, why_alone))
    return Outcome(tuple(sorted(fates, key=lambda fate: fate.rank)), tuple(disagreements))


def _fate(
    rank: int, group: Sequence[int], seen: Mapping[int, Seen], right: Sequence[int], odd: Mapping[int, str], alone: str
) -> Fate:
    if rank in right:
        return Fate(rank, "own", rank)
    own = seen[rank].problem or odd.get(rank, "") or "it has no file"
    if right:
        return Fate(rank, "replica", right[0], own)
    others = [other for other in group if other != rank]
    if not others:
        return Fate(rank, "lost", None, f"{own}; {alone}")
    if odd:
        return Fate(rank, "lost", None, f"{own}; it is unknown which of its replicas is right")
    return Fate(rank, "lost", None, f"{own}; {ranks_text(others)}, which should hold the same, cannot help either")


def _agreeing(good: Sequence[int], seen: Mapping[int, Seen]) -> tuple[list[int], dict[int, str], list[str]]:
    """Compare the files of a group. More than half of them have to be equal; otherwise none may be used.

    Returns:
        The ranks whose files may be used; rank -> problem for the others; the differences in words.
    """
    looks = {rank: _look(seen[rank]) for rank in good}
    votes = Counter(looks.values()).most_common()
    if len(votes) < 2:
        return list(good), {}, []
    winner, count = votes[0]
    right = [rank for rank in good if looks[rank] == winner] if 2 * count > len(good) else []
    reference = right[0] if right else good[0]
    wrong = [rank for rank in good if looks[rank] != looks[reference]]
    words = []
    for rank in wrong:
        names = ", ".join(_differing(seen[reference], seen[rank]))
        words.append(f"rank {rank} differs from rank {reference}, which should hold the same, in {names}")
    odd = {rank: f"it differs from {ranks_text(right)}, which agree" for rank in wrong}
    if not right:
        odd = dict.fromkeys(good, "it differs from its replicas")
    return right, odd, words


def _look(seen: Seen) -> tuple[tuple[str, object], ...]:
    assert seen.contents is not None
    return tuple(sorted((name, entry) for name, entry in seen.contents.entries.items() if name not in OWN))


def _differing(one: Seen, other: Seen) -> list[str]:
    assert one.contents is not None and other.contents is not None
    a, b = one.contents.entries, other.contents.entries
    names = sorted(name for name in {*a, *b} - OWN if a.get(name) != b.get(name))
    shown = [_difference(name, a, b) for name in names[:DIFFERING_SHOWN]]
    return [*shown, f"and {len(names) - len(shown)} more"] if len(names) > len(shown) else shown


def _difference(name: str, a: Mapping[str, object], b: Mapping[str, object]) -> str:
    if name not in a or name not in b:
        return f"{name} (missing in one)"
    first, second = a[name], b[name]
    shapes = [getattr(entry, "shape", ()) for entry in (first, second)]
    return f"{name} ({list(shapes[0])} and {list(shapes[1])})" if shapes[0] != shapes[1] else name


def _of_one_step(seen: Mapping[int, Seen], groups: ReplicaGroups) -> dict[int, Seen]:
    """Choose the step of which most groups have a file, and mark the files of other steps as unusable."""
    steps = {rank: tuple(sorted(s.contents.counters.items())) for rank, s in seen.items() if s.contents is not None}
    told = Counter(step for step in steps.values() if step)
    if len(told) < 2:
        return dict(seen)
    covered = Counter(step for group in groups for step in {steps[rank] for rank in group if rank in steps})
    usual = max(told, key=lambda step: (covered[step], told[step], step))
    checked = dict(seen)
    for rank, step in steps.items():
        if step and step != usual:
            checked[rank] = Seen(
                seen[rank].file, None, f"it is of {_step_text(step)}, the others of {_step_text(usual)}"
            )
    return checked


def _step_text(step: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in step)
