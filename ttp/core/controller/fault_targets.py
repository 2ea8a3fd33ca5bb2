"""Finds the ranks that a report from an operator, monitor or scheduler is about: it names ranks or a host."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ttp.core.controller.membership import Membership
from ttp.core.layout import Rank, compact_ranks

HOSTS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class FaultTargets:
    """The ranks that a report is about, and the parts of the report that cannot be used.

    Args:
        ranks: the ranks of this job that can be accused, in ascending order.
        problem: why the other ranks cannot be accused, for the operator; empty if there is no problem.
    """

    ranks: tuple[Rank, ...]
    problem: str


def fault_targets(
    job: Membership, ranks: Iterable[Rank], host: str, *, exited: bool = False, between: bool = False
) -> FaultTargets:
    """Find the ranks of a report.

    A report may name a host as its ranks do, by its address, or by its short name if that is unique: the scheduler
    says ``n17`` where the machine calls itself ``n17.cluster.example``.

    Args:
        job: the ranks.
        ranks: the accused ranks.
        host: the accused host, with all its ranks; empty: none.
        exited: whether the processes of the ranks have ended: then ranks that a new controller misses count, too, and
            those of a job that is over, as a launcher may know late how a large process has died.
        between: whether a job without ranks is between two launches, and not over.
    """
    if not job.formed or job.layout is None or (job.ended and not exited):
        again = "" if job.ended and not between else ". Report it again once `ttp status` shows its ranks as live"
        why = _not_training(job, between)
        return FaultTargets((), f"{why}: no such rank can be accused, and nothing was done{again}")
    wanted, problems = set(ranks), []
    missing = range(job.layout.world_size) if exited and job.gather_until is not None else ()
    strangers = sorted(rank for rank in wanted if rank not in job.members and rank not in missing)
    if strangers:
        problems.append(
            f"no such rank: {compact_ranks(strangers)} (this job has {job.layout.world_size} ranks, from 0)"
        )
    if host:
        found, problem = _of_host(job, host)
        wanted |= found
        problems += [problem] if problem else []
    gone = sorted(rank for rank in wanted if rank in job.members and job.members[rank].left)
    if gone:
        problems.append(f"already gone: {compact_ranks(gone)}")
    meant = tuple(sorted(wanted.difference(strangers, gone)))
    return FaultTargets(meant, "; ".join(problems) + ("" if meant or not problems else "; nothing was done"))


def _not_training(job: Membership, between: bool) -> str:
    if job.layout is None:
        return "no job has joined this controller yet"
    if job.ended:
        return "the job is between two launches and has no ranks now" if between else "the job is over"
    return f"the job is still forming ({len(job.members)} of {job.layout.world_size} ranks) and has nothing to lose yet"


def _of_host(job: Membership, host: str) -> tuple[set[Rank], str]:
    addresses = {member.hello.host: member.hello.address for member in job.members.values()}
    found = meant_hosts(addresses, host)
    if len(found) == 1:
        return {rank for rank, member in job.members.items() if member.hello.host == found[0]}, ""
    if found:
        return set(), f"host {host!r:.200} may be {shown_hosts(found)}: give the full name"
    listed = shown_hosts(addresses)
    return set(), f"no such rank: none runs on host {host!r:.200}; the hosts of this job are {listed}"


def meant_hosts(addresses: Mapping[str, str], host: str) -> list[str]:
    """Return the names of the hosts that an operator may mean with ``host``.

    Args:
        addresses: the address of each host by its name; empty if it is not known.
        host: a name, a short name, or an address.
    """
    if host in addresses:
        return [host]
    return [name for name, address in addresses.items() if address == host != "" or _alike(name, host)]


def shown_hosts(names: Collection[str]) -> str:
    """Return a list of hosts for people, without those beyond ``HOSTS_SHOWN``."""
    return ", ".join(sorted(names)[:HOSTS_SHOWN]) + (", ..." if len(names) > HOSTS_SHOWN else "")


def _alike(name: str, given: str) -> bool:
    """Return whether two host names are equal or one is the short form of the other. An address has no short form."""
    if given.replace(".", "").isdigit() or ("." in name) == ("." in given):
        return name.lower() == given.lower()
    return name.partition(".")[0].lower() == given.partition(".")[0].lower()
