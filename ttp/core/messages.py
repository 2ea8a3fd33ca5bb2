"""What ranks and the controller say to each other, as plain values.

The wire form is ``proto/ttp/wire/v1/controller.proto``; ``ttp.wire.convert`` is the only place that knows both. Field
names are the same on both sides. Ranks *report*, the controller *orders*.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ttp.core.decide import How
from ttp.core.layout import Rank, Shard, Version

PROTOCOL_MAJOR = 3
PROTOCOL_MINOR = 0

SEVERAL = Rank(-1)
"""In place of a rank: the same for, or from, several, and it is said beside the message who they are."""


class Phase(enum.Enum):
    """Where a rank's copy is between two versions."""

    IDLE = "idle"
    UPDATING = "updating"
    TORN = "torn"
    DONE = "done"  # train() has returned


class FaultKind(enum.Enum):
    """What kind of evidence says that something is wrong."""

    LOST = "lost"  # the stream ended without a goodbye
    EXCEPTION = "exception"  # raised in the training loop
    COLLECTIVE = "collective"  # a collective failed: secondary to whatever broke it
    PREEMPTED = "preempted"  # SIGTERM
    EXITED = "exited"  # the launcher saw the process end
    OUTSIDE = "outside"  # an operator, a node monitor
    SILENT = "silent"  # says nothing: no heartbeat, no answer to a freeze
    HUNG = "hung"  # its peers wait for it and it does not move
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
    """What a replica of a shard looks like: equal on ranks whose copies are equal; empty: not known.

    ``size`` is what of it can be dealt out to several savers, in bytes; 0: not known.
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
        shard: which shard it is of, or which part of one (``ttp.core.stripes``); empty for pieces of no shard.
        writer: the rank that wrote it.
        table: what is inside, as JSON; only the writer's adapter and the finaliser read it.
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
    """What rank ``of`` has to keep (see ``ttp.core.replication``), whole, in memory that whoever says so can read."""

    of: Rank
    version: Version


@dataclass(frozen=True, slots=True)
class SaverOrder:
    """What one rank writes: shards or parts of them, and the rank-local pages of these ranks of its host."""

    rank: Rank
    shards: tuple[Shard, ...]
    how: How
    pages: tuple[Rank, ...]
    job_state: bool  # writes the job-wide scalars too
    kept: tuple[Shard, ...] = ()  # shards that are not written anew: a kept copy of the version is brought


# ------------------------------------------------------------------------------------------------------------- reports


@dataclass(frozen=True, slots=True)
class Report:
    """Base of what ranks say; ``rank`` is the one that says it."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Hello(Report):
    """First word of a rank on a stream. After a reconnect it repeats everything a new controller must know."""

    protocol_major: int
    protocol_minor: int
    ttp_version: str
    run_id: str
    launch: int  # restart count as the launcher tells it; a hint, see Welcome.incarnation
    incarnation: int  # 0: not yet told
    nonce: str  # identifies the process
    world_size: int
    layout_digest: str  # the layout itself is asked for where it is not known; see ``layout_exchange``
    host: str
    pid: int
    local_rank: int
    save_dir: str
    framework: str
    version: Version
    phase: Phase
    base_version: Version  # what this incarnation started from
    term_seen: int
    incident: str  # frozen for this incident; empty: not frozen
    released: bool
    resume: bool  # a reconnect of a process that was registered before
    keep: int = 3  # checkpoints to keep
    broken: str = ""  # it cannot train on, and why; for a controller that did not hear it
    address: str = ""  # of its host, as others reach it
    fallback_dir: str = ""  # where to save when save_dir refuses
    standbys: tuple[str, ...] = ()  # controllers (host:port) it knows to stand by, in order
    takeover: bool = False  # its controller cannot be reached: the one it speaks to now shall take over
    copies_at: str = ""  # takes copies of other ranks' shards there (host:port); empty: this rank keeps none
    pages_at: str = ""  # takes pages of other ranks there (host:port); empty: pages are not mirrored
    stripes: int = 0  # into how many parts its shards may be cut; 0: it writes whole ones only; -1: as many as help
    can_continue: bool = False  # this process can go on when another one is replaced
    meanwhile: bool = False  # its controller is silent: save what it holds, and lead nobody


@dataclass(frozen=True, slots=True)
class Heartbeat(Report):
    """``mark`` counts the points of a step passed since the last update; equal steps pass equal points."""

    version: Version
    phase: Phase
    mark: int = 0
    activity: str = ""  # something else than training, on purpose: evaluation
    written: int = 0  # bytes written by the save or commit that runs


@dataclass(frozen=True, slots=True)
class Fault(Report):
    """Evidence against ``subject``; ``rank`` is the witness, -1 for one outside of the job.

    ``wrong``: it is the program or its configuration, which no restart mends: whatever is saved, all leave with 64.
    """

    subject: Rank
    kind: FaultKind
    text: str
    detail: str = ""
    nonce: str = ""  # of the accused process, where the witness knows it
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
    bad: tuple[str, ...] = ()  # tensors that hold NaN or Inf; a few of them
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
    may_pass: bool = False  # the storage refused, which it may not do later


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
    may_pass: bool = False  # the storage refused, which it may not do later


@dataclass(frozen=True, slots=True)
class Goodbye(Report):
    reason: GoodbyeReason
    version: Version


@dataclass(frozen=True, slots=True)
class StackTaken(Report):
    """Answer to ``TakeStack``: where the threads of ``subject`` are."""

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
    """Answer to ``StandBy``: a controller is ready there (``host:port``); empty: it could not be started."""

    address: str


@dataclass(frozen=True, slots=True)
class ProgramReport(Report):
    """Base of what ranks say of a recovery that the program makes itself; opaque to everybody else."""


# -------------------------------------------------------------------------------------------------------------- orders


@dataclass(frozen=True, slots=True)
class Order:
    """Base of what the controller says; ``rank`` is the one that it says it to."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class LedOrder(Order):
    """Base of what only the controller that leads may say: a rank does not obey one of an older term."""

    term: int


@dataclass(frozen=True, slots=True)
class Welcome(LedOrder):
    incarnation: int
    ttp_version: str
    joins: bool = False  # it takes the seat of a rank that has died, in a job that goes on
    guest: bool = False  # the rank whose seat it is to take still lives: it waits, and is no member yet


@dataclass(frozen=True, slots=True)
class Refused(Order):
    code: RefusalCode
    text: str


@dataclass(frozen=True, slots=True)
class Freeze(LedOrder):
    incident: str
    cause: str
    snapshot: bool  # nothing is broken: thaw by yourself if no controller can be reached


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
    directory: str = ""  # instead of save_dir


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
    missing_pages: tuple[Rank, ...]  # rank-local state that nobody could read: re-derived on resume
    directory: str = ""  # instead of save_dir
    disputed: tuple[Shard, ...] = ()  # replicas differed and no majority could tell which is right


@dataclass(frozen=True, slots=True)
class Release(LedOrder):
    """Leave with ``exit_code``; with ``again`` a rank that said ``can_continue`` begins train() again instead."""

    incident: str
    exit_code: int
    text: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class Finished(LedOrder):
    """Every rank has left train(): the job is over."""


@dataclass(frozen=True, slots=True)
class TakeStack(LedOrder):
    """Say where the threads of ``subject`` are, process ``pid`` of the same host."""

    incident: str
    subject: Rank
    pid: int


@dataclass(frozen=True, slots=True)
class Probe(LedOrder):
    """Be a second witness: does the host of ``subject`` answer?"""

    subject: Rank
    address: str


@dataclass(frozen=True, slots=True)
class StandBy(LedOrder):
    """Start a controller on this host that takes over when this one is lost."""


@dataclass(frozen=True, slots=True)
class Standbys(LedOrder):
    """Where to go when this controller cannot be reached, in order."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProgramOrder(LedOrder):
    """Base of what ranks are told in a recovery that the program makes itself; opaque to everybody else."""
