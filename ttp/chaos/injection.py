"""Fault injection: resolve the target of a fault to processes, hosts or the disk, and carry out the fault on it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from ttp.chaos import disk as disks
from ttp.chaos.disk import Disk
from ttp.chaos.hosts import Hosts
from ttp.chaos.script import Fault, Script
from ttp.chaos.switchboard import RankProcess
from ttp.chaos.vocabulary import Target
from ttp.errors import ToldAs

SIGNALS = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "term": signal.SIGTERM,
    "stop": signal.SIGSTOP,
    "cont": signal.SIGCONT,
}
_DEADLY = ("kill", "segv", "exit", "disk-quota", "stop")
_TORN = "in_step"
_TEMPLATE = "ttp.launch.warm.template"


class MissedError(Exception):
    """Raised when a fault cannot be injected now; the text says why."""


@dataclass(slots=True)
class HurtJob:
    """The job under test and its current state, which the driver keeps up to date.

    Args:
        script: the script of the job.
        hosts: the hosts on which the job runs.
        disk: the job's own file system for checkpoints, if it has one.
        rank_processes: the connected process of each rank.
        launchers: the launcher process of each host.
        observers: for each host, the process in its network that talks to the controller.
        latest: facts of the newest event of each kind in this run.
        cut: hosts that are cut off now.
        stopped: ids of processes that are stopped now.
        hurt: ranks that were killed since the last start.
        dead: hosts that were killed since the last start.
        leader: host of the controller that leads.
    """

    script: Script
    hosts: Hosts
    disk: Disk | None
    rank_processes: dict[int, RankProcess] = field(default_factory=dict)
    launchers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    observers: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    latest: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    hurt: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    leader: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """The effects of an injected fault.

    Args:
        who: the target, in words.
        unreadable: ranks whose state can no longer be read.
        cut_off: ranks on a host that was cut off.
    """

    who: str
    unreadable: frozenset[int] = frozenset()
    cut_off: frozenset[int] = frozenset()


def inject(fault: Fault, job: HurtJob) -> Done:
    """Inject ``fault`` into ``job`` now.

    Raises:
        MissedError: the target does not exist now, or the operating system refuses.
    """
    with ToldAs(MissedError, fault.what, OSError, psutil.Error):
        match fault.who.kind:
            case "host":
                return _host(fault, job)
            case "disk":
                return _disk(fault, job)
            case "controller" | "launcher" | "template":
                return _service(fault, job)
            case _:
                return _ranks(fault, job)


def heal_all(job: HurtJob) -> None:
    """Undo all faults that can be undone: reconnect hosts, free the disk, continue stopped processes."""
    for host in list(job.cut):
        job.hosts.join(host)
    job.cut.clear()
    if job.disk is not None:
        job.disk.heal()
    for pid in job.stopped:
        _signal(pid, signal.SIGCONT)
    job.stopped.clear()
    _wake_carriers(job)


def leading_controller(job: HurtJob) -> list[psutil.Process]:
    """Return the processes of the controller that leads the job, without standby controllers on other hosts."""
    return [process for process in job.hosts.processes(job.leader) if _runs(process, "ttp.controller")]


# --------------------------------------------------------------------------------------------------------------- ranks


def targets(fault: Fault, job: HurtJob) -> tuple[int, ...]:
    """Return the ranks that are the target of a fault.

    Raises:
        MissedError: the target names no rank that is connected now.
    """
    # Processes of a later life wait to replace dead ranks.
    first = min((process.life for process in job.rank_processes.values()), default=None)
    there = [r for r, p in sorted(job.rank_processes.items()) if r not in job.hurt and p.life == first]
    match fault.who.kind:
        case "ranks":
            return fault.who.numbers
        case "all":
            return tuple(there)
        case "saver":
            chosen = sorted({int(r) for r in job.latest.get("plan", {}).get("savers", {}).values()})[:1]
        case "committer":
            chosen = [int(job.latest["commit"]["rank"])] if "commit" in job.latest else []
        case _:
            savers = {int(r) for r in job.latest.get("plan", {}).get("savers", {}).values()}
            chosen = [r for r in there if r not in savers][:1]
    if not chosen:
        raise MissedError(f"there is no {fault.who} to {fault.what}")
    return tuple(chosen)


def _ranks(fault: Fault, job: HurtJob) -> Done:
    ranks = targets(fault, job)
    who = str(Target("ranks", ranks))
    gone = fault.what in _DEADLY or (fault.what == "raise" and fault.phase == _TORN)
    if fault.what == "report":
        _tell(job, {"order": "report", "ranks": list(ranks)})
    elif fault.what in SIGNALS or fault.what == "disk-quota":
        pids = {job.rank_processes[rank].pid for rank in ranks if rank in job.rank_processes}
        if not pids:
            raise MissedError(f"{who} is not connected")
        if fault.what in SIGNALS:
            _signal_all(fault.what, pids, job)
        for pid in pids if fault.what == "disk-quota" else ():
            disks.limit(pid)
    if fault.what in ("kill", "segv", "exit"):
        job.hurt.update(ranks)
    return Done(who, frozenset(ranks) if gone else frozenset())


def _signal_all(what: str, pids: set[int], job: HurtJob) -> None:
    """Send processes the signal of a fault, and remember which ones are stopped."""
    for pid in pids:
        _signal(pid, SIGNALS[what])
    if what == "stop":
        job.stopped |= pids
    elif what in ("cont", "kill"):
        job.stopped -= pids


# ------------------------------------------------------------------------------------------------------------ services


def _service(fault: Fault, job: HurtJob) -> Done:
    if fault.what in ("save", "again"):
        _tell(job, {"order": fault.what})
        return Done("controller")
    found = {"controller": leading_controller, "launcher": _launchers, "template": _templates}[fault.who.kind](job)
    if not found:
        raise MissedError(f"there is no {fault.who.kind} to {fault.what}")
    _signal_all(fault.what, {process.pid for process in found}, job)
    if fault.what == "cont":
        _wake_carriers(job)
    return Done(fault.who.kind)


def _launchers(job: HurtJob) -> list[psutil.Process]:
    """Return the launcher processes; in a namespace each is the child of the ``nsenter`` that started it."""
    found = []
    for process in job.launchers.values():
        with contextlib.suppress(psutil.Error):
            carrier = psutil.Process(process.pid)
            found += carrier.children()[:1] if carrier.name() == "nsenter" else [carrier]
    return found


def _templates(job: HurtJob) -> list[psutil.Process]:
    """Return the template processes, from which launchers fork ranks."""
    return [child for launcher in _launchers(job) for child in launcher.children() if _runs(child, _TEMPLATE)]


def _wake_carriers(job: HurtJob) -> None:
    """Continue the ``nsenter`` processes: each stops itself when its launcher stops, and nothing else continues it."""
    for process in job.launchers.values():
        _signal(process.pid, signal.SIGCONT)


def _runs(process: psutil.Process, module: str) -> bool:
    """Return whether a living process has this module in its command line."""
    try:
        return any(module in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _tell(job: HurtJob, order: dict[str, Any]) -> None:
    observer = job.observers[job.leader]
    assert observer.stdin is not None
    observer.stdin.write(json.dumps(order) + "\n")
    observer.stdin.flush()


def _signal(pid: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)


# ------------------------------------------------------------------------------------------------------ hosts and disks


def _host(fault: Fault, job: HurtJob) -> Done:
    (host,) = fault.who.numbers
    ranks = frozenset(job.script.ranks_of(host))
    match fault.what:
        case "kill":
            job.hosts.power_off(host)
            job.hurt |= ranks
            job.dead.add(host)
            return Done(str(fault.who), ranks)
        case "partition" | "unplug":
            job.hosts.cut(host, carrier=fault.what == "partition")
            job.cut.add(host)
            return Done(str(fault.who), cut_off=ranks)
        case "heal":
            job.hosts.join(host)
            job.cut.discard(host)
        case _:
            pids = {process.pid for process in job.hosts.processes(host)}
            _signal_all(fault.what, pids, job)
            if fault.what == "cont":
                _wake_carriers(job)
            return Done(str(fault.who), ranks if fault.what == "stop" else frozenset())
    return Done(str(fault.who))


def _disk(fault: Fault, job: HurtJob) -> Done:
    if job.disk is None:
        raise MissedError("the job has no disk of its own")
    match fault.what:
        case "disk-full":
            job.disk.fill()
        case "disk-ro":
            job.disk.protect()
        case _:
            job.disk.heal()
    return Done("disk")
