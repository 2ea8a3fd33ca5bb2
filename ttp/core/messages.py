"""The messages between ranks and the controller, as plain values. Ranks *report*, the controller *orders*.

The wire form is ``proto/ttp/wire/v1/controller.proto``; only ``ttp.wire.convert`` knows both. Fields are named alike.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ttp.core.decide import How
from ttp.core.layout import Rank, Shard, Version

PROTOCOL_MAJOR, PROTOCOL_MINOR = 3, 0

SEVERAL = Rank(-1)
"""Stands for a rank in a message that is the same for, or from, several ranks, which are listed beside it."""


class Phase(enum.Enum):
    """The state of a rank's copy between two versions."""

    IDLE = "idle"
    UPDATING = "updating"
    TORN = "torn"
    DONE = "done"  # train() has returned


class FaultKind(enum.Enum):
    """The kind of evidence of a fault."""

    LOST = "lost"  # the stream ended without a goodbye
    EXCEPTION = "exception"  # raised in the training loop
    COLLECTIVE = "collective"  # a collective failed: secondary to whatever broke it
    PREEMPTED = "preempted"  # SIGTERM
    EXITED = "exited"  # the launcher saw the process end
    OUTSIDE = "outside"  # an operator, a node monitor
    SILENT = "silent"  # no heartbeat, no answer to a freeze
    HUNG = "hung"  # peers wait for it and it does not move
    AILING = "ailing"  # its loop has ended, and can be entered again once it is repaired
    SNAPSHOT = "snapshot"  # nothing is wrong: somebody asked for a checkpoint


class GoodbyeReason(enum.Enum):
    DONE = "done"  # training ended
    RELEASED = "released"  # obeyed a release
    LEFT = "left"  # the user left the loop on purpose (KeyboardInterrupt, sys.exit(0))


class RefusalCode(enum.Enum):
    PROTOCOL = "protocol"  # another major version
    RANK_TAKEN = "rank_taken"  # another process speaks for this rank
    OTHER_JOB = "other_job"  # the port belongs to another job
    MISMATCH = "mismatch"  # world size or layout differ between ranks
    FENCED = "fenced"  # declared lost, or of an older incarnation
    MALFORMED = "malformed"  # a message that makes no sense
    BUSY = "busy"  # an incident of the last incarnation is still being saved: try again
    TOKEN = "token"  # the shared secret is missing or wrong
    MOVED = "moved"  # another controller is in charge: look for it


# ---------------------------------------------------------------------------------------------- values inside messages


@dataclass(frozen=True, slots=True)
class ShardDigest:
    """The digest of a replica of a shard: equal on ranks whose copies are equal; empty if not known.

    ``size``: bytes of it that can be dealt out to several savers; 0 if not known.
    """

    shard: Shard
    digest: str
    size: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """One durable file of a checkpoint.

    Args:
        file: path relative to the checkpoint directory, ``/`` as separator.
        size: bytes.
        digest: ``xxh3_128:<hex>`` of the bytes.
        kind: ``shard``, ``rank_local`` or ``job``.
        shard: the shard, or the part of one (``ttp.core.stripes``); empty for pieces of no shard.
        writer: the rank that wrote it.
        table: the contents, as JSON; only the writer's adapter and the finaliser read it.
        cut: of a part: digest of how its writer has cut the shard; parts of one shard fit together if it is equal.
    """

    file: str
    size: int
    digest: str
    kind: str
    shard: str
    writer: Rank
    table: str = ""
    cut: str = ""


@dataclass(frozen=True, slots=True)
class KeptCopy:
    """A whole copy of what rank ``of`` keeps (see ``ttp.core.replication``), in memory that the sender can read."""

    of: Rank
    version: Version


@dataclass(frozen=True, slots=True)
class SaverOrder:
    """The order to one saver: shards or parts of them, and the rank-local pages of the named ranks of its host."""

    rank: Rank
    shards: tuple[Shard, ...]
    how: How
    pages: tuple[Rank, ...]
    job_state: bool  # writes the job-wide scalars too
    kept: tuple[Shard, ...] = ()  # shards that are not written anew: a kept copy of the version is brought instead


# ------------------------------------------------------------------------------------------------------------- reports


@dataclass(frozen=True, slots=True)
class Report:
    """Base of reports; ``rank`` is the sender."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Hello(Report):
    """A rank's first message on a stream. After a reconnect it repeats everything that a new controller must know."""

    protocol_major: int
    protocol_minor: int
    ttp_version: str
    run_id: str
    launch: int  # restart count as the launcher gives it; a hint, see Welcome.incarnation
    incarnation: int  # 0: not known yet
    nonce: str  # identifies the process
    world_size: int
    layout_digest: str  # the layout itself is requested if not known; see ``ttp.core.controller.layout_exchange``
    host: str
    pid: int
    local_rank: int
    save_dir: str
    framework: str
    version: Version
    phase: Phase
    base_version: Version  # that this incarnation started from
    term_seen: int
    incident: str  # frozen for this incident; empty: not frozen
    released: bool
    resume: bool  # a reconnect of a process that was registered before
    keep: int = 3  # checkpoints to keep
    broken: str = ""  # why it cannot train on, for a controller that did not hear it; empty: it can
    address: str = ""  # of its host, as other hosts reach it
    fallback_dir: str = ""  # where to save if save_dir refuses
    standbys: tuple[str, ...] = ()  # standby controllers (host:port) that it knows, in order
    takeover: bool = False  # its controller cannot be reached: the receiver shall take over
    copies_at: str = ""  # where it takes copies of other ranks' shards (host:port); empty: this rank keeps none
    pages_at: str = ""  # where it takes pages of other ranks (host:port); empty: pages are not mirrored
    stripes: int = 0  # parts into which its shards may be cut; 0: none, whole shards only; -1: as many as help
    can_continue: bool = False  # this process can go on when another process is replaced
    meanwhile: bool = False  # its controller is silent: the receiver shall save what the rank holds, and lead no rank


@dataclass(frozen=True, slots=True)
class Heartbeat(Report):
    """Sign of life. ``mark``: points of the step passed since the last update; equal steps pass equal points."""

    version: Version
    phase: Phase
    mark: int = 0
    activity: str = ""  # what it does on purpose instead of training: evaluation
    written: int = 0  # bytes written by the save or commit that runs


@dataclass(frozen=True, slots=True)
class Fault(Report):
    """Evidence against ``subject``; ``rank`` is the witness, -1 for one outside of the job.

    ``wrong``: the program or its configuration is at fault, which no restart mends: all leave with 64, saved or not.
    """

    subject: Rank
    kind: FaultKind
    text: str
    detail: str = ""
    nonce: str = ""  # of the accused process, if the witness knows it
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class Frozen(Report):
    """Answer to ``Freeze``: the gate is closed. ``final`` is false while an update is still running."""

    incident: str
    version: Version
    phase: Phase
    final: bool
    has_gradient: bool = False
    has_preimage: bool = False
    main_thread_blocked: bool = False
    post_step_done: bool = True
    digests: tuple[ShardDigest, ...] = ()
    bad: tuple[str, ...] = ()  # names of some tensors that hold NaN or Inf
    kept: tuple[KeptCopy, ...] = ()
    hold_dir: str = (
        ""  # the storage is slow: a checkpoint may be held there, in the memory of this host; empty: none may
    )
    held: Version = Version(0)  # noqa: RUF009 - a number. Held here, and not durable yet


@dataclass(frozen=True, slots=True)
class Saved(Report):
    incident: str
    generation: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class SaveFailed(Report):
    incident: str
    generation: int
    text: str
    may_pass: bool = False  # the storage refused, and may accept later


@dataclass(frozen=True, slots=True)
class Committed(Report):
    incident: str
    generation: int
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class CommitFailed(Report):
    incident: str
    generation: int
    text: str
    may_pass: bool = False  # the storage refused, and may accept later


@dataclass(frozen=True, slots=True)
class Goodbye(Report):
    reason: GoodbyeReason
    version: Version


@dataclass(frozen=True, slots=True)
class StackTaken(Report):
    """Answer to ``TakeStack``: the stacks of the threads of ``subject``."""

    incident: str
    subject: Rank
    text: str


@dataclass(frozen=True, slots=True)
class Probed(Report):
    """Answer to ``Probe``: whether the subject's host answers this one."""

    subject: Rank
    reachable: bool
    text: str


@dataclass(frozen=True, slots=True)
class StandbyUp(Report):
    """Answer to ``StandBy``: a controller is ready at ``address`` (``host:port``); empty: it could not be started."""

    address: str


@dataclass(frozen=True, slots=True)
class ProgramReport(Report):
    """Base of reports about a recovery that the program makes itself; opaque to all other parts of ttp."""


# -------------------------------------------------------------------------------------------------------------- orders


@dataclass(frozen=True, slots=True)
class Order:
    """Base of orders; ``rank`` is the receiver."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class LedOrder(Order):
    """Base of orders that only the leading controller may give: a rank ignores one of an older term."""

    term: int


@dataclass(frozen=True, slots=True)
class Welcome(LedOrder):
    incarnation: int
    ttp_version: str
    joins: bool = False  # it takes the seat of a dead rank, in a job that goes on
    guest: bool = False  # the rank whose seat it shall take is still alive: it waits, and is no member yet


@dataclass(frozen=True, slots=True)
class Refused(Order):
    code: RefusalCode
    text: str


@dataclass(frozen=True, slots=True)
class Freeze(LedOrder):
    incident: str
    cause: str
    snapshot: bool  # nothing is broken: the rank thaws by itself if no controller can be reached


@dataclass(frozen=True, slots=True)
class Thaw(LedOrder):
    incident: str
    reason: str


@dataclass(frozen=True, slots=True)
class Save(LedOrder):
    incident: str
    generation: int
    version: Version
    draft: str  # directory name inside save_dir
    order: SaverOrder
    directory: str = ""  # used instead of save_dir


@dataclass(frozen=True, slots=True)
class Commit(LedOrder):
    incident: str
    generation: int
    version: Version
    incarnation: int
    draft: str
    cause: str
    reason: str
    keep: int
    pieces: tuple[Piece, ...]
    missing_pages: tuple[Rank, ...]  # rank-local state that no rank could read: re-derived on resume
    directory: str = ""  # used instead of save_dir
    disputed: tuple[Shard, ...] = ()  # replicas differ and no majority tells which is right


@dataclass(frozen=True, slots=True)
class Release(LedOrder):
    """Order to leave with ``exit_code``; if ``again``, ranks with ``can_continue`` call train() again instead."""

    incident: str
    exit_code: int
    text: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class Finished(LedOrder):
    """Notice that every rank has left train(): the job is over."""


@dataclass(frozen=True, slots=True)
class TakeStack(LedOrder):
    """Order to report the stacks of the threads of ``subject``, process ``pid`` of the same host."""

    incident: str
    subject: Rank
    pid: int


@dataclass(frozen=True, slots=True)
class Probe(LedOrder):
    """Order to be a second witness: report whether the host of ``subject`` answers."""

    subject: Rank
    address: str


@dataclass(frozen=True, slots=True)
class StandBy(LedOrder):
    """Order to start a controller on this host that takes over when the present one is lost."""


@dataclass(frozen=True, slots=True)
class Standbys(LedOrder):
    """The standby controllers to go to, in order, when this controller cannot be reached."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProgramOrder(LedOrder):
    """Base of orders in a recovery that the program makes itself; opaque to all other parts of ttp."""
