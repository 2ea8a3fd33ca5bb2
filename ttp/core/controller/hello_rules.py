"""Decides what a rank's hello means for the job: the next incarnation, a guest, or a rank to admit or refuse. Pure."""

from __future__ import annotations

from ttp._version import __version__
from ttp.core import messages as m
from ttp.core.controller.membership import Member, Membership, has_trained, is_new
from ttp.core.layout import Rank, describe, difference

Refusal = tuple[m.RefusalCode, str]
"""Why a rank is not admitted: the code, and words for the operator."""


def starts_incarnation(job: Membership, hello: m.Hello) -> bool:
    """Return whether a process begins the next incarnation: the last one is over, or the launcher has restarted.

    A job that is not formed yet stays the same incarnation: a process that died early is just replaced.

    Restart counts of different nodes are not comparable (torchelastic does not count membership restarts), so only
    counts of the same rank are compared.
    """
    if job.layout is None:
        return True
    if job.takes_seat(hello):
        return False
    if hello.incarnation:  # another controller has led the process
        begun_here = bool(job.live) and job.new_at is not None and not job.ended
        # If new processes have begun an incarnation here, a higher number is that of another start, not of a later one.
        newer = hello.incarnation > job.incarnation and not (begun_here or _outlives(job, hello))
        return newer and (not job.live or hello.run_id == job.run_id)
    taken = job.members.get(hello.rank)
    if taken is not None and taken.hello.nonce == hello.nonce:
        return False
    if not (job.formed or job.ended):
        another = (hello.run_id, hello.layout_digest) != (job.run_id, job.layout.digest)
        gone = job.gone.get(hello.rank)
        return not job.live and (another or (gone is not None and hello.launch > gone.hello.launch))
    relaunched = taken is not None and hello.run_id == job.run_id and hello.launch > taken.hello.launch
    return job.ended or not job.live or relaunched


def is_guest(job: Membership, hello: m.Hello) -> bool:
    """Return whether ``hello`` is from a new process on another host that is to replace a living rank."""
    known = job.members.get(hello.rank) if hello.rank in job.moving - job.seats else None
    if known is None or known.hello.nonce == hello.nonce or known.hello.host == hello.host or hello.incarnation:
        return False
    return not (malformed(job, hello) or _stranger(job, hello) or mismatch(job, hello))


def may_have_moved(job: Membership, hello: m.Hello) -> bool:
    """Return whether ``hello``, from a rank that another controller led, may show that this job is led elsewhere.

    A stray rank of another job or incarnation does not show that for a job with live ranks here. A rank that comes
    to a job that is still forming just joins it. So does one that was cut off from this controller, and went round
    the others, while most ranks stayed here.
    """
    if job.layout is None or malformed(job, hello) is not None:
        return False
    if not job.formed:
        return False  # no state here can be out of date
    if _outlives(job, hello) or 2 * len(job.live - {hello.rank}) > job.layout.world_size:
        return False
    return not job.live or (hello.run_id, hello.incarnation) == (job.run_id, job.incarnation)


def _outlives(job: Membership, hello: m.Hello) -> bool:
    """Return whether every rank is connected, and ``hello`` is from none of their processes.

    Then it is from a process that was left of another launch, whatever the number of its incarnation: if a job is
    started anew, a new controller counts from 1 again.
    """
    if job.layout is None or len(job.live) < job.layout.world_size:
        return False
    known = job.members.get(hello.rank)
    return known is None or known.hello.nonce != hello.nonce


def refusal(job: Membership, hello: m.Hello) -> Refusal | None:
    """Return why a valid ``hello`` cannot be admitted; ``None`` if it can. An unknown layout is no reason."""
    if starts_incarnation(job, hello):
        return None
    return _stranger(job, hello) or _rank_taken(job, hello) or mismatch(job, hello)


def of_another_start(job: Membership, hello: m.Hello, now: float, patience_s: float) -> Refusal | None:
    """Refuse for now a process that is of another start of the job than the ranks that are here.

    An update needs all ranks: a process that has made one and a new process are of different starts. Which start is
    over is not known before both processes of one rank are here: the old ones may be survivors of a fault, whose state
    must be saved. So new processes wait while an incomplete job of old ones is gathered and saved. An old process waits
    as long as new ones keep coming, but at most ``patience_s`` seconds after the last: then it counts as a survivor.
    """
    if not job.live or job.ended or job.complete or job.met(hello) is not None:
        return None
    if hello.resume and has_trained(hello) and not job.formed and job.new_at is not None:
        text = f"rank {hello.rank} is of an earlier start of this job: a new one is forming; try again in a moment"
        return (m.RefusalCode.BUSY, text) if now < job.new_at + patience_s else None
    if not is_new(hello) or job.new_at is not None or job.takes_seat(hello):
        return None
    trained = (job.members[rank] for rank in job.live if has_trained(job.members[rank].hello))
    here = job.members.get(hello.rank) or next(trained, None)
    if here is None:
        return None
    return m.RefusalCode.BUSY, (
        f"{here.name} of an earlier start of this job is here, with version {here.version}, which is saved first; try "
        "again in a moment"
    )


def malformed(job: Membership, hello: m.Hello) -> Refusal | None:
    """Return why ``hello`` is invalid for any job; ``None`` if it is valid."""
    if hello.protocol_major != m.PROTOCOL_MAJOR:
        return m.RefusalCode.PROTOCOL, (
            f"this controller speaks protocol {m.PROTOCOL_MAJOR}.{m.PROTOCOL_MINOR} (ttp {__version__}), rank "
            f"{hello.rank} speaks {hello.protocol_major}.{hello.protocol_minor} (ttp {hello.ttp_version}): install the "
            "same ttp on every host"
            + ("" if job.live else ". If the controller is of an earlier launch, it ends by itself (TTP_ABANDONED_S)")
        )
    if not 0 <= hello.rank < hello.world_size:
        return m.RefusalCode.MALFORMED, f"rank {hello.rank} is not in a world of {hello.world_size}"
    known = job.layouts.get(hello.layout_digest)
    if known is not None and known.world_size != hello.world_size:
        return m.RefusalCode.MALFORMED, f"rank {hello.rank}: layout and digest do not match"
    return None


def _stranger(job: Membership, hello: m.Hello) -> Refusal | None:
    if hello.incarnation and hello.incarnation < job.incarnation:
        return m.RefusalCode.FENCED, (
            f"rank {hello.rank} belongs to incarnation {hello.incarnation} of the job, which was given up; "
            f"incarnation {job.incarnation} is running"
        )
    if hello.run_id != job.run_id:
        return m.RefusalCode.OTHER_JOB, (
            f"this controller serves job {job.run_id!r}, not {hello.run_id!r}: two jobs share TTP_PORT; "
            "give each job a port of its own"
        )
    return None


def _rank_taken(job: Membership, hello: m.Hello) -> Refusal | None:
    taken = job.members.get(hello.rank)
    if taken is None or job.takes_seat(hello) or _started_anew(job, taken, hello):
        return None
    if taken.hello.nonce != hello.nonce:
        if not job.formed and hello.launch > taken.hello.launch:
            return None
        if hello.rank in job.live or taken.done:
            return m.RefusalCode.RANK_TAKEN, (
                f"rank {hello.rank} is already held by pid {taken.hello.pid} on {taken.hello.host}: either two "
                "jobs share TTP_PORT, or two processes were given the same RANK"
            )
        text = f"rank {hello.rank} was lost; a new process joins with the restarted job, not this one"
        return m.RefusalCode.FENCED, text
    if taken.fenced:
        text = f"rank {hello.rank} was given up ({taken.broken}); its state is not used any more"
        return m.RefusalCode.FENCED, text
    return None


def _started_anew(job: Membership, taken: Member, hello: m.Hello) -> bool:
    """Return whether a rank was started anew like others here, which have not trained: ``taken`` is then left over."""
    if not (taken.adopted and is_new(hello)) or job.new_at is None:
        return False
    members = job.members.values()
    return any(not (mb.adopted or mb.seated) and mb.version <= mb.hello.base_version for mb in members)


def mismatch(job: Membership, hello: m.Hello) -> Refusal | None:
    """Return in what ``hello`` differs from the job's layout; ``None`` if it does not, as far as that is known."""
    assert job.layout is not None
    if hello.world_size != job.layout.world_size:
        first = next((f", and {member.name}, which came first," for member in job.members.values()), ", the job")
        return m.RefusalCode.MISMATCH, (
            f"rank {hello.rank} on {hello.host} has WORLD_SIZE={hello.world_size}{first} has {job.layout.world_size}: "
            "start all hosts with the same number of hosts and of ranks"
        )
    theirs = job.layouts.get(hello.layout_digest)
    if theirs is not None and theirs.digest != job.layout.digest:
        return m.RefusalCode.MISMATCH, (
            f"rank {hello.rank} announces another layout than the others: {describe(theirs)} against "
            f"{describe(job.layout)}: {difference(theirs, job.layout)}. "
            "Every rank must wrap the same model in the same way"
        )
    return None


def apart(job: Membership, hello: m.Hello) -> Refusal | None:
    """Refuse a new rank that saves elsewhere than its neighbours on its host; other hosts may name it differently.

    Launchers number the ranks of a host one after the other; to look at all members would cost too much.
    """
    if hello.resume or starts_incarnation(job, hello):
        return None
    for rank in (hello.rank - 1, hello.rank + 1):
        member = job.members.get(Rank(rank))
        if member is None or (member.hello.host, member.hello.launch) != (hello.host, hello.launch):
            continue
        if member.hello.save_dir != hello.save_dir:
            return m.RefusalCode.MISMATCH, (
                f"rank {hello.rank} saves to {hello.save_dir}, but rank {rank} of the same host to "
                f"{member.hello.save_dir}: give all ranks the same save_dir. Its name may contain neither the rank "
                "nor the time"
            )
    return None


def namesakes(one: m.Hello, other: m.Hello) -> bool:
    """Return whether the first ranks of two launchers, which name their hosts alike, seem to run on two machines.

    A machine may have several addresses, but one in each family leads to the controller.
    """
    family, both = _family(one.address), _family(other.address)
    return bool(family) and family == both and one.address != other.address


def _family(address: str) -> str:
    """Return the family of an address; empty for a name, for loopback, and if it is not known."""
    if ":" in address:
        return "" if address == "::1" else "IPv6"
    return "IPv4" if address.replace(".", "").isdigit() and not address.startswith("127.") else ""


def elsewhere(job: Membership, hello: m.Hello) -> Refusal | None:
    """Send a rank of a running job to a standby, if this controller has no job and the rank knows standbys."""
    if job.layout is None and hello.resume and hello.standbys and not hello.takeover:
        text = f"this controller has just been started; {hello.standbys[0]} stands by for this job"
        return m.RefusalCode.MOVED, text
    return None
