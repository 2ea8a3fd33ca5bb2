"""Finds the ranks that a report from an operator, monitor or scheduler is about: it names ranks or a host."""

from __future__ import annotations

from collections.abc import Iterable
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


def fault_targets(job: Membership, ranks: Iterable[Rank], host: str) -> FaultTargets:
    """Find the ranks of a report.

    A report may name a host as its ranks do, by its address, or by its short name if that is unique: the scheduler
    says ``n17`` where the machine calls itself ``n17.cluster.example``.

    Args:
        job: the ranks.
        ranks: the accused ranks.
        host: the accused host, with all its ranks; empty: none.
    """
    if not job.formed or job.ended or job.layout is None:
        return FaultTargets((), f"{_not_training(job)}: no such rank can be accused, and nothing was done")
    wanted, problems = set(ranks), []
    strangers = sorted(rank for rank in wanted if rank not in job.members)
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


def _not_training(job: Membership) -> str:
    if job.layout is None:
        return "no job has joined this controller yet"
    if job.ended:
        return "the job is over"
    return f"the job is still forming ({len(job.members)} of {job.layout.world_size} ranks) and has nothing to lose yet"


def _of_host(job: Membership, host: str) -> tuple[set[Rank], str]:
    ranks: dict[str, set[Rank]] = {}
    for rank, member in job.members.items():
        ranks.setdefault(member.hello.host, set()).add(rank)
    if host in ranks:
        return ranks[host], ""
    alike = {mb.hello.host for mb in job.members.values() if mb.hello.address == host or _alike(mb.hello.host, host)}
    if len(alike) == 1:
        return ranks[alike.pop()], ""
    shown = ", ".join(sorted(alike or ranks)[:HOSTS_SHOWN]) + (", ..." if len(alike or ranks) > HOSTS_SHOWN else "")
    if alike:
        return set(), f"host {host!r:.200} may be {shown}: give the full name"
    return set(), f"no such rank: none runs on host {host!r:.200}; the hosts of this job are {shown}"


def _alike(name: str, given: str) -> bool:
    """Return whether two host names are equal or one is the short form of the other. An address has no short form."""
    if given.replace(".", "").isdigit() or ("." in name) == ("." in given):
        return name.lower() == given.lower()
    return name.partition(".")[0].lower() == given.partition(".")[0].lower()
