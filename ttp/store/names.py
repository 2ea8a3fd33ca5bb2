"""The names of directories inside ``save_dir``. The name alone tells a reader that a checkpoint is complete."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from ttp.core.layout import Rank, Version

INCIDENTS = "incidents"
"""Directory of the incidents' files; not a checkpoint."""

PROBE_PREFIX = ".ttp-probe-"
"""Prefix of the directory that ``check_writable`` makes and removes."""

_PREFIX = "tft_saved_checkpoints-step_"
_VERSION = r"(0|[1-9][0-9]{0,17})"
_CHECKPOINT = re.compile(rf"{_PREFIX}{_VERSION}", re.ASCII)
_DRAFT = re.compile(rf"\.draft-step_{_VERSION}-([^@/]+)(?:@(.+))?", re.ASCII | re.DOTALL)
_SUPERSEDED = re.compile(rf"\.superseded-step_{_VERSION}-([0-9]+)", re.ASCII)


def checkpoint_name(version: Version) -> str:
    """Return the name that makes a directory a checkpoint: ``tft_saved_checkpoints-step_12``."""
    assert version >= 0, version
    return f"{_PREFIX}{version}"


def parse_checkpoint_name(name: str) -> Version | None:
    """Return the version in a name of ``checkpoint_name``; None for any other name, ``step_012`` included."""
    match = _CHECKPOINT.fullmatch(name)
    return Version(int(match[1])) if match else None


def draft_name(version: Version, incident: str) -> str:
    """Return the name of the directory that the savers of one incident write to.

    It is ``.draft-step_12-<incident>``, with the incident quoted as in a URL.
    """
    assert version >= 0 and incident, (version, incident)
    return f".draft-step_{version}-{quote(incident, safe='')}"


def claim_name(draft: str, generation: int, rank: Rank) -> str:
    """Return the name of the directory in which one committer, and no other process, assembles a checkpoint."""
    return f"{draft}@g{generation}-r{rank}"


def removed_name(version: Version, count: int) -> str:
    """Return the name that a checkpoint gets before it is deleted: that of a draft, so that no reader uses it."""
    return f".draft-step_{version}-removed@{count}"


def is_draft(name: str) -> bool:
    """Return whether ``name`` is that of a draft, of a committer's claim, or of a checkpoint being deleted."""
    return _DRAFT.fullmatch(name) is not None


def parse_draft_name(name: str) -> tuple[Version, str] | None:
    """Return version and incident in the name of a draft or of a claim on one; None for any other name."""
    match = _DRAFT.fullmatch(name)
    return (Version(int(match[1])), unquote(match[2])) if match else None


def superseded_name(version: Version, count: int) -> str:
    """Return the name that a checkpoint gets when another one takes its name."""
    return f".superseded-step_{version}-{count}"


def parse_superseded_name(name: str) -> Version | None:
    """Return the version in a name of ``superseded_name``; None for any other name."""
    match = _SUPERSEDED.fullmatch(name)
    return Version(int(match[1])) if match else None
