"""Chooses the checkpoint that all ranks restore, from the checkpoints that each rank found.

A rank's reasons for skipping checkpoints (``RestoreView.skipped``) are texts for people. Some of them are read here, by
the words with which the functions below, or ``ttp.store``, have made them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ttp.core.layout import Version
from ttp.core.restore_messages import Candidate, Reading, RestoreView

LOOK_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds that a restart waits, time after time, for storage that is away on a host."""
_IN_FALLBACK = "in the fallback directory "
DAMAGED = " is damaged"
"""What the reason of a skipped checkpoint contains, before a colon, if bytes of it have changed."""
MISSING = " is missing"
"""The end of the reason of a skipped checkpoint that lacks a piece."""
NOT_TRIED = "older checkpoints: they are not tried after so many that are not whole"
"""The last reason for which a rank skips checkpoints, if it has stopped before the last one."""
UPGRADE = ": upgrade ttp"
"""The end of the reason of a checkpoint that is not damaged, in a format that the ttp of this rank does not know."""
_NONE_WHOLE = "every checkpoint that was tried: none is whole, and the newest is of step "


def fallback_note(directory: str, candidates: Iterable[Candidate]) -> str:
    """Return the note for ``RestoreView.skipped`` of a rank that found candidates in the fallback directory."""
    versions = ", ".join(str(c.version) for c in candidates)
    return f"{_IN_FALLBACK}{directory}: step {versions}"


def none_whole_note(newest: Version) -> str:
    """Return the note for ``RestoreView.skipped`` of a rank that found only damaged checkpoints."""
    return f"{_NONE_WHOLE}{newest}"


def too_new(views: Iterable[RestoreView]) -> tuple[Version, str]:
    """Return the newest version in a format that the ttp of some rank does not know, and an error in words.

    Returns version 0 and no error if there is none.
    """
    reasons = [text for view in views for text in view.skipped if text.endswith(UPGRADE)]
    names = [text.partition(": ")[0].partition("-step_")[2].partition("-")[0] for text in reasons]
    found = {int(step): text for step, text in zip(names, reasons, strict=True) if step.isdecimal()}
    if not found:
        return Version(0), ""
    newest = max(found)
    return Version(newest), (
        f"a newer ttp has saved step {newest}, and to go on from an older step would throw finished steps away "
        f"({found[newest]}, on every host). To do without these steps, move that directory away, or use another "
        "save_dir"
    )


def none_whole(views: Iterable[RestoreView]) -> tuple[Version, str]:
    """Return the newest damaged version, and an error in words, if no checkpoint is whole for all ranks together.

    One that is ``too_new`` comes before damaged ones.

    Ranks share the reading, so one rank may have found the damage of a checkpoint that the others offer. A rank that
    lacks files, or cannot read them, has found no damage: its storage may be away for a moment.

    Returns version 0 and no error if there is no checkpoint, or if one was offered in which no rank found damage.
    """
    listed = sorted(views, key=lambda view: view.rank)
    newer = too_new(listed)
    if newer[0]:
        return newer
    offered = {c.name: c.version for view in listed for c in view.candidates}
    skipped = [text for view in listed for text in view.skipped]
    bad = {text.partition(": ")[0] for text in skipped if f"{DAMAGED}: " in text}
    notes = [text.removeprefix(_NONE_WHOLE) for text in skipped if text.startswith(_NONE_WHOLE)]
    newest = max([*offered.values(), *(int(note) for note in notes if note.isdecimal())], default=0)
    if not newest or not bad.issuperset(offered):
        return Version(0), ""
    reasons = dict.fromkeys(text for text in skipped if not (text.startswith(_NONE_WHOLE) or is_fallback_note(text)))
    then = "go on from an older one, which was not tried" if NOT_TRIED in skipped else "begin at step 0"
    return Version(newest), (
        f"no checkpoint is whole, and the newest is of step {newest}: training would begin again at step 0 "
        f"({'; '.join([*reasons][:5])}). Repair a checkpoint or copy a whole one to save_dir. To {then}, move "
        "the damaged ones away, or use another save_dir"
    )


def agree(views: Iterable[RestoreView]) -> Candidate | str:
    """Return the checkpoint for all ranks, or an error in words.

    It is the newest checkpoint that every rank found whole, or ``Candidate(0, "", "")`` if no rank found any. It is an
    error if to go on would throw finished steps away: ranks found checkpoints but none in common, so they do not see
    the same storage, or a newer checkpoint is ``too_new``.
    """
    listed = sorted(views, key=lambda view: view.rank)
    common = set.intersection(*(set(view.candidates) for view in listed)) if listed else set()
    chosen = max(common, key=lambda c: (c.version, c.manifest_digest), default=Candidate(Version(0), "", ""))
    newer, error = too_new(listed)
    if newer > chosen.version:
        return error
    if common or not any(view.candidates for view in listed):
        return chosen
    telling = sorted(listed, key=lambda view: not view.skipped)  # first, as the error shows only the first views
    seen = "; ".join(_seen(view) for view in telling[:16])
    return f"the ranks do not see one common checkpoint: {seen}. {_advice(listed)}"


def beside(chosen: Candidate, views: Iterable[RestoreView]) -> dict[Version, str]:
    """Return version and name of newer checkpoints that ranks found in the directory in which all found ``chosen``.

    On a host the listing of a shared directory may be seconds old, so another look there may show them. Left out are
    those in the fallback directory, which need not be shared; there are none if ranks read different copies of
    ``chosen``, as with a disk in each host.
    """
    listed = list(views)
    found = [(c, view) for view in listed for c in view.candidates if c.version > chosen.version]
    copies = {_reading(view, chosen).copy for view in listed} if found else set()
    if len(copies) != 1 or "" in copies:
        return {}
    return {c.version: c.name for c, view in found if str(c.version) not in _in_fallback(view)}


def is_skipped(path: str, views: Iterable[RestoreView]) -> bool:
    """Return whether a rank has told why it skipped the checkpoint with this path or name."""
    reason = f"{path.rpartition('/')[2]}: "
    return any(reason in text for view in views for text in view.skipped)


def is_unread(chosen: Candidate, views: Iterable[RestoreView]) -> bool:
    """Return whether a part of ``chosen`` was read by no rank, although some rank relies on others to have read it.

    That can happen: launchers may be wrong about which ranks share a host, and ranks may not see the same files.
    """
    readings = {_reading(view, chosen) for view in views}
    parts = Counter((reading.copy, reading.count) for reading in readings if reading.index < reading.count)
    read = {copy for (copy, count), found in parts.items() if found == count}
    return any(reading.count != 1 and (reading.copy not in read or not reading.copy) for reading in readings)


def _reading(view: RestoreView, chosen: Candidate) -> Reading:
    """Return the share of ``chosen`` that the rank has read. A view without readings counts as all was read."""
    readings = dict(zip(view.candidates, view.readings, strict=False))
    return readings.get(chosen, Reading("", 0, 1))


def is_fallback_note(text: str) -> bool:
    """Return whether ``text`` was made by ``fallback_note``, and so tells of a found checkpoint, not a skipped one."""
    return text.startswith(_IN_FALLBACK)


def _in_fallback(view: RestoreView) -> set[str]:
    """Return the versions, as text, that the view's note says are in the fallback directory."""
    notes = (text.rpartition(": step ")[2] for text in view.skipped if is_fallback_note(text))
    return {version for note in notes for version in note.split(", ")}


def _seen(view: RestoreView) -> str:
    found = ", ".join(f"step {c.version} ({c.manifest_digest[-8:]})" for c in view.candidates) or "nothing whole"
    notes = [text for text in view.skipped if is_fallback_note(text)]
    skipped = [text for text in view.skipped if not is_fallback_note(text)]
    where = f", {'; '.join(notes)}" if notes else ""
    return f"rank {view.rank} found {found}{where}" + (f" (skipped: {'; '.join(skipped)})" if skipped else "")


def _advice(views: list[RestoreView]) -> str:
    offered = sorted({c.name for view in views for c in view.candidates})
    damaged = [name for name in offered if any(text.startswith(f"{name}: ") for v in views for text in v.skipped)]
    if damaged:
        lacking = any(text.endswith(MISSING) for view in views for text in view.skipped)
        shared = ". Is save_dir shared by all hosts?" if lacking else ""
        return (
            f"Repair {', '.join(damaged)}, which some ranks found damaged, or move it away: the ranks have no other "
            f"checkpoint in common{shared}"
        )
    if any(is_fallback_note(text) for view in views for text in view.skipped):
        return (
            "Not all ranks see the fallback directory (TTP_FALLBACK_DIR): copy the checkpoint from there to the "
            "save_dir, or to the same path on every host"
        )
    return "Is save_dir shared by all hosts?"
