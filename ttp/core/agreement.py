"""Which checkpoint all ranks restore."""

from __future__ import annotations

from collections.abc import Iterable

from ttp.core.layout import Version
from ttp.core.messages import Candidate, RestoreView


def agree(views: Iterable[RestoreView]) -> Candidate | str:
    """One checkpoint for all ranks, or an error in words.

    The newest checkpoint that every rank found whole. ``Candidate(0, "", "")`` when nobody found anything. When ranks
    found something but nothing in common, they do not see the same storage: going on would throw finished steps away.
    """
    listed = sorted(views, key=lambda view: view.rank)
    if not any(view.candidates for view in listed):
        return Candidate(Version(0), "", "")
    common = set.intersection(*(set(view.candidates) for view in listed))
    if common:
        return max(common, key=lambda c: (c.version, c.manifest_digest))
    seen = "; ".join(_seen(view) for view in listed[:16])
    return f"the ranks do not see one common checkpoint: {seen}. Is save_dir shared by all hosts?"


def _seen(view: RestoreView) -> str:
    found = ", ".join(f"step {c.version} ({c.manifest_digest[-8:]})" for c in view.candidates) or "nothing whole"
    skipped = f" (skipped: {'; '.join(view.skipped)})" if view.skipped else ""
    return f"rank {view.rank} found {found}{skipped}"
