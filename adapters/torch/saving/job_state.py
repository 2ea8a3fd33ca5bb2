"""The state that is equal on all ranks and saved once: version, learning-rate schedule, loss scale, bucket layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ttp.adapters.torch.saving.flatten_state import ToHost
from ttp.core.messages import Piece
from ttp.errors import CheckpointError, ToldAs, strerror_of
from ttp.store.encoding import EncodingError, decode, encode
from ttp.store.plain_file import read_plain

JOB_KIND = "job"
FROZEN = "frozen"
"""Key in ``JobState.extra`` of the names of the optimizer's parameters that had ``requires_grad=False``."""
TOGGLED = "toggled"
"""Key in ``JobState.extra`` of the names of those whose ``requires_grad`` the loop changes to and fro."""
ZEROED = "zeroed"
"""Key in ``JobState.extra`` of the names of those whose gradients the loop sets to zero; a loop that sets them to None
has none."""
SETTINGS = "settings"
"""Key in ``JobState.extra`` of the plain settings of all param groups, if these are the same on all ranks.

Shards have param groups too. But a second copy of a shard may be from before the schedule's step, and the schedule from
after it: the settings that belong to the schedule are those in the job state.
"""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The state of one LR scheduler.

    Args:
        state: its ``state_dict()``.
        pending: True if the scheduler had not been stepped after the last update: then the restore steps it.
    """

    state: dict[str, Any]
    pending: bool = False


@dataclass(frozen=True, slots=True)
class JobState:
    """The job-wide scalars of one version.

    Args:
        version: finished updates.
        scheduler: ``state_dict()`` of the LR scheduler; None if there is none, or more than one.
        scaler: ``state_dict()`` of the GradScaler; None without one.
        scheduler_pending: True if ``scheduler.step()`` had not been called after the last update: then the restore
            makes that step.
        scaler_pending: True if ``scaler.update()`` had not been called after the last update: then the restore makes
            that update.
        scaler_skipped: True if the pending ``scaler.update()`` follows a step that was skipped because of Inf or NaN,
            by an optimizer that handles the scale itself: then the restore lowers the scale.
        ddp_buckets: layout of the all-reduce buckets for the next step, as ``ddp_buckets.bucket_layout`` returns it;
            with several DistributedDataParallel modules the layout of each, by name.
        extra: other values that are equal on all ranks, by name.
        several: ``[state_dict(), pending]`` of each LR scheduler if there are several; else None.
    """

    version: int
    scheduler: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    scheduler_pending: bool = False
    scaler_pending: bool = False
    scaler_skipped: bool = False
    ddp_buckets: str | dict[str, str] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    several: list[Any] | None = None

    @classmethod
    def of(
        cls,
        version: int,
        schedules: Sequence[Schedule],
        scaler: dict[str, Any] | None = None,
        scaler_pending: bool = False,
    ) -> JobState:
        """Make the job state of ``version``, with any number of LR schedulers."""
        one = schedules[0] if len(schedules) == 1 else None
        return cls(
            version=version,
            scheduler=None if one is None else one.state,
            scaler=scaler,
            scheduler_pending=one is not None and one.pending,
            scaler_pending=scaler_pending,
            several=[[each.state, each.pending] for each in schedules] if len(schedules) > 1 else None,
        )

    @property
    def schedules(self) -> list[Schedule]:
        """The states of all LR schedulers, in the order in which the schedulers were given."""
        if self.several is not None:
            return [Schedule(state, pending) for state, pending in self.several]
        return [] if self.scheduler is None else [Schedule(self.scheduler, self.scheduler_pending)]

    def with_settings(self, groups: Any) -> Any:
        """Return saved param groups with the settings that belong to the schedule; see ``SETTINGS``.

        Args:
            groups: a list of param groups; anything else is returned unchanged.
        """
        kept = self.extra.get(SETTINGS)
        if not (isinstance(groups, list) and isinstance(kept, list) and len(kept) == len(groups)):
            return groups
        pairs = zip(groups, kept, strict=True)
        return [group | {key: value for key, value in own.items() if key in group} for group, own in pairs]

    def encode(self, to_host: ToHost = Tensor.cpu) -> bytes:
        """Return the bytes of the file ``job_{generation}.msgpack``.

        Args:
            to_host: brings a tensor from a device.

        Raises:
            EncodingError: a value has no form on disk; the text says which one.
        """
        brought = partial(tree_map_only, Tensor, lambda t: t if t.device.type == "cpu" else to_host(t))
        values = {f.name: brought(getattr(self, f.name)) for f in fields(self)}
        if self.several is None:
            del values["several"]  # the format with one schedule is older than this field
        return encode(values, "job")

    @classmethod
    def decode(cls, data: bytes) -> JobState:
        """Decode a job state: inverse of ``encode``. Unknown names are ignored, absent ones get their defaults.

        Raises:
            CheckpointError: the bytes are damaged or are something else.
        """
        with ToldAs(CheckpointError, "the job state cannot be read", EncodingError):
            found = decode(data)
        if not isinstance(found, dict) or type(found.get("version")) is not int:
            raise CheckpointError("the job state has no version: this is not a job state of ttp")
        known = {f.name: found[f.name] for f in fields(cls) if f.name in found}
        wrong = [name for name, value in known.items() if not isinstance(value, _KINDS[name])]
        if wrong:
            raise CheckpointError(f"the job state is garbled: {wrong[0]} is {known[wrong[0]]!r:.60}")
        if not all(map(_is_schedule, known.get("several") or ())):
            raise CheckpointError("the job state is garbled: an entry of `several` is not the state of an LR scheduler")
        return cls(**known)


def _is_schedule(entry: Any) -> bool:
    return isinstance(entry, list) and [type(part) for part in entry] == [dict, bool]


_KINDS: dict[str, Any] = {
    "version": int,
    "scheduler": dict | None,
    "scaler": dict | None,
    "scheduler_pending": bool,
    "scaler_pending": bool,
    "scaler_skipped": bool,
    "ddp_buckets": str | dict | None,
    "extra": dict,
    "several": list | None,
}


def read_job_state(path: Path, pieces: Sequence[Piece]) -> JobState:
    """Read the job state of the checkpoint at ``path``.

    Args:
        path: the directory of the checkpoint.
        pieces: the pieces of the checkpoint.

    Raises:
        CheckpointError: the checkpoint has no job state, or it cannot be read.
    """
    files = [piece.file for piece in pieces if piece.kind == JOB_KIND]
    if len(files) != 1:
        raise CheckpointError(f"{path} has {len(files)} job states instead of 1")
    with ToldAs(CheckpointError, f"{path / files[0]} cannot be read", OSError, reason=strerror_of):
        data = read_plain(path / files[0])
    return JobState.decode(data)
