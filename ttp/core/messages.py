"""The messages between ranks and the controller, as plain values. Ranks *report*, the controller *orders*.

Their wire form is ``proto/ttp/wire/v1/controller.proto``, with the same field names; ``ttp.wire.convert`` converts.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ttp.core.decide import How
from ttp.core.layout import Rank, Shard, Version

PROTOCOL_MAJOR, PROTOCOL_MINOR = 3, 0

SEVERAL = Rank(-1)
"""The rank in a message that is the same for, or from, several ranks, which are listed beside the message."""


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
    COLLECTIVE = "collective"  # a collective failed, which is the effect of another fault
    PREEMPTED = "preempted"  # SIGTERM
    EXITED = "exited"  # the launcher saw the process end
    OUTSIDE = "outside"  # an operator, a node monitor
    SILENT = "silent"  # no heartbeat, no answer to a freeze
    HUNG = "hung"  # no progress, while peers wait for the rank
    AILING = "ailing"  # the rank's loop has ended, but can be entered again after a repair
    SNAPSHOT = "snapshot"  # no fault: a checkpoint was requested


class GoodbyeReason(enum.Enum):
    DONE = "done"  # training ended
    RELEASED = "released"  # the rank obeys a release
    LEFT = "left"  # the program left the loop on purpose (sys.exit(0))
    INTERRUPTED = "interrupted"  # the user pressed Ctrl-C: nothing is saved, and the job has not trained to its end


class RefusalCode(enum.Enum):
    PROTOCOL = "protocol"  # another major version
    RANK_TAKEN = "rank_taken"  # another process holds this rank
    OTHER_JOB = "other_job"  # the port belongs to another job
    MISMATCH = "mismatch"  # world size or layout differ between ranks
    FENCED = "fenced"  # declared lost, or of an older incarnation
    MALFORMED = "malformed"  # an invalid message
    BUSY = "busy"  # an incident of the last incarnation is still being saved: try again
    TOKEN = "token"  # the shared secret is missing or wrong
    MOVED = "moved"  # another controller leads the job: look for it


# ---------------------------------------------------------------------------------------------- values inside messages


@dataclass(frozen=True, slots=True)
class ShardDigest:
    """The digest of a replica of a shard: equal on ranks whose copies are equal; empty if unknown.

    ``size``: bytes of the shard that can be cut into parts for several savers; 0 if unknown.
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
        shard: the shard, or the part of one (``ttp.core.stripes``); empty for other kinds of pieces.
        writer: the rank that wrote it.
        table: the table of contents, as JSON; only the writer's adapter and the finaliser read it.
        cut: for a part: a digest of how its writer cut the shard; parts fit together if their digests are equal.
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
    """A complete copy of the shards that rank ``of`` copies (``ttp.core.replication``), readable by the sender."""

    of: Rank
    version: Version


@dataclass(frozen=True, slots=True)
class SaverOrder:
    """The order to one saver: the shards or parts that it writes, and the ranks whose rank-local pages it adds."""

    rank: Rank
    shards: tuple[Shard, ...]
    how: How
    pages: tuple[Rank, ...]
    job_state: bool  # whether it writes the job-wide scalars too
    kept: tuple[Shard, ...] = ()  # shards to write from a kept copy of the version, not from the live state


# ------------------------------------------------------------------------------------------------------------- reports


@dataclass(frozen=True, slots=True)
class Report:
    """Base of reports; ``rank`` is the sender."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Hello(Report):
    """A rank's first message on a stream. On every stream it contains all that a new controller must know."""

    protocol_major: int
    protocol_minor: int
    ttp_version: str
    run_id: str
    launch: int  # restart count from the launcher; a lower bound, see Welcome.incarnation
    incarnation: int  # 0: unknown yet
    nonce: str  # identifies the process
    world_size: int
    layout_digest: str  # the layout itself is sent on request; see ``ttp.core.controller.layout_exchange``
    host: str
    pid: int
    local_rank: int
    save_dir: str
    framework: str
    version: Version = Version(0)  # noqa: RUF009 - a number
    phase: Phase = Phase.IDLE
    base_version: Version = Version(0)  # noqa: RUF009 - a number: the version that this incarnation started from
    term_seen: int = 0  # the newest term that the rank has seen
    incident: str = ""  # the incident that the rank is frozen for; empty: it is not frozen
    released: bool = False
    resume: bool = False  # a reconnect of a process that a controller has welcomed before
    keep: int = 3  # checkpoints to keep
    broken: str = ""  # why the rank cannot train on, for a new controller; empty: it can
    address: str = ""  # of the rank's host, as other hosts reach it
    fallback_dir: str = ""  # the directory to save to if saving to save_dir fails
    standbys: tuple[str, ...] = ()  # standby controllers (host:port) that the rank knows, in order
    takeover: bool = False  # the rank's controller cannot be reached, so the receiver shall take over
    copies_at: str = ""  # address (host:port) for copies of other ranks' shards; empty: this rank keeps none
    pages_at: str = ""  # address (host:port) for pages of other ranks; empty: pages are not mirrored
    stripes: int = 0  # parts into which its shards may be cut; 0: whole shards only; -1: as many as help
    can_continue: bool = False  # this process can go on when another process is replaced
    meanwhile: bool = False  # the rank's controller is silent: the receiver shall save its state, and not lead it


@dataclass(frozen=True, slots=True)
class Heartbeat(Report):
    """Sign of life. ``mark``: the number of points of the step passed since the last update, equal in equal steps."""

    version: Version
    phase: Phase
    mark: int = 0
    activity: str = ""  # what the rank does on purpose instead of training, such as evaluation; empty: it trains
    written: int = 0  # bytes written by the running save or commit


@dataclass(frozen=True, slots=True)
class Fault(Report):
    """Evidence against ``subject``; ``rank`` is the witness, -1 for one outside of the job.

    ``wrong``: the program or its configuration is wrong, which no restart mends: all ranks exit with 64, saved or not.
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
    hold_dir: str = ""  # the storage is slow: a checkpoint may be held there, in this host's memory; empty: none may
    held: Version = Version(0)  # noqa: RUF009 - a number. The version held here that is not durable yet; 0: none
    cannot_continue: str = ""  # why this process cannot continue although its Hello says that it can; empty: it can


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
    """Answer to ``Probe``: whether the sender's host reaches the subject's host."""

    subject: Rank
    reachable: bool
    text: str


@dataclass(frozen=True, slots=True)
class StandbyUp(Report):
    """Answer to ``StandBy``: the address (``host:port``) of the standby controller; empty: it could not be started."""

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
    joins: bool = False  # the process replaces a dead rank in a job that goes on
    guest: bool = False  # the process will replace a rank that still lives: it waits, and is no member yet


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
    """Order to exit with ``exit_code``; if ``again``, ranks with ``can_continue`` call train() again instead."""

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
    """Order to report whether the host of ``subject`` answers, as a second witness beside the controller."""

    subject: Rank
    address: str


@dataclass(frozen=True, slots=True)
class StandBy(LedOrder):
    """Order to start a standby controller on this host."""


@dataclass(frozen=True, slots=True)
class Standbys(LedOrder):
    """Notice of the standby controllers to connect to, in order, when this controller cannot be reached."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProgramOrder(LedOrder):
    """Base of orders in a recovery that the program makes itself; opaque to all other parts of ttp."""
