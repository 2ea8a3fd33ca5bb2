"""Carrying out faults: from a target in words to the processes, hosts and disks that are hurt."""

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
from ttp.chaos.desk import Seat
from ttp.chaos.disk import Disk
from ttp.chaos.hosts import Hosts
from ttp.chaos.script import Fault, Script

SIGNALS = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "term": signal.SIGTERM,
    "stop": signal.SIGSTOP,
    "cont": signal.SIGCONT,
}
_DEADLY = ("kill", "segv", "exit", "disk-quota", "stop")
_TORN = "in_step"


class MissedError(Exception):
    """The fault cannot be done now, and why."""


@dataclass(slots=True)
class Scene:
    """What there is to be hurt. The driver keeps it up to date.

    Args:
        script: the job.
        hosts: where it runs.
        disk: what it saves to, where that is a file system of its own.
        seats: connected ranks.
        launchers: the launchers' processes by host.
        observers: processes in the hosts' networks that speak to the controller.
        latest: facts of the newest event of each kind in this run.
        cut: hosts that are cut off now.
        stopped: processes that are stopped now.
        hurt: ranks that were killed since the last start.
        dead: hosts that were killed since the last start.
        leader: host of the controller that leads.
    """

    script: Script
    hosts: Hosts
    disk: Disk | None
    seats: dict[int, Seat] = field(default_factory=dict)
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
    """What a fault came to: to whom it was done, in words; whose state is gone; who is on the far side of a cut."""

    who: str
    unreadable: frozenset[int] = frozenset()
    cut_off: frozenset[int] = frozenset()


def strike(fault: Fault, scene: Scene) -> Done:
    """Do it.

    Raises:
        MissedError: there is nobody to do it to, or it cannot be done.
    """
    try:
        match fault.who.kind:
            case "host":
                return _host(fault, scene)
            case "disk":
                return _disk(fault, scene)
            case "controller" | "launcher":
                return _service(fault, scene)
            case _:
                return _ranks(fault, scene)
    except (OSError, psutil.Error) as problem:
        raise MissedError(f"{fault.what}: {problem}") from None


def heal_all(scene: Scene) -> None:
    """Whatever can be undone is undone."""
    for host in list(scene.cut):
        scene.hosts.join(host)
    scene.cut.clear()
    if scene.disk is not None:
        scene.disk.heal()
    for pid in scene.stopped:
        _signal(pid, signal.SIGCONT)
    scene.stopped.clear()


def leading_controller(scene: Scene) -> list[psutil.Process]:
    """The process of the controller that leads; others may stand by on other hosts."""
    return [process for process in scene.hosts.processes(scene.leader) if _is_controller(process)]


# --------------------------------------------------------------------------------------------------------------- ranks


def targets(fault: Fault, scene: Scene) -> tuple[int, ...]:
    """The ranks that are meant.

    Raises:
        MissedError: no such rank is there.
    """
    there = [r for r in sorted(scene.seats) if r not in scene.hurt]
    match fault.who.kind:
        case "ranks":
            return fault.who.numbers
        case "all":
            return tuple(there)
        case "saver":
            chosen = sorted({int(r) for r in scene.latest.get("plan", {}).get("savers", {}).values()})[:1]
        case "committer":
            chosen = [int(scene.latest["commit"]["rank"])] if "commit" in scene.latest else []
        case _:
            savers = {int(r) for r in scene.latest.get("plan", {}).get("savers", {}).values()}
            chosen = [r for r in there if r not in savers][:1]
    if not chosen:
        raise MissedError(f"there is no {fault.who} to {fault.what}")
    return tuple(chosen)


def _ranks(fault: Fault, scene: Scene) -> Done:
    ranks = targets(fault, scene)
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {' '.join(map(str, ranks))}"
    gone = fault.what in _DEADLY or (fault.what == "raise" and fault.phase == _TORN)
    if fault.what == "report":
        _tell(scene, {"order": "report", "ranks": list(ranks)})
    elif fault.what in SIGNALS or fault.what == "disk-quota":
        pids = {rank: scene.seats[rank].pid for rank in ranks if rank in scene.seats}
        if not pids:
            raise MissedError(f"{who} is not there")
        for pid in pids.values():
            if fault.what == "disk-quota":
                disks.limit(pid)
            else:
                _signal(pid, SIGNALS[fault.what])
        _remember_stops(fault.what, set(pids.values()), scene)
    if fault.what in ("kill", "segv", "exit"):
        scene.hurt.update(ranks)
    return Done(who, frozenset(ranks) if gone else frozenset())


def _remember_stops(what: str, pids: set[int], scene: Scene) -> None:
    if what == "stop":
        scene.stopped |= pids
    elif what in ("cont", "kill"):
        scene.stopped -= pids


# ------------------------------------------------------------------------------------------------------------ services


def _service(fault: Fault, scene: Scene) -> Done:
    if fault.what == "save":
        _tell(scene, {"order": "save"})
        return Done("controller")
    found = leading_controller(scene) if fault.who.kind == "controller" else _launchers(scene)
    if not found:
        raise MissedError(f"there is no {fault.who.kind} to {fault.what}")
    for process in found:
        _signal(process.pid, SIGNALS[fault.what])
    _remember_stops(fault.what, {process.pid for process in found}, scene)
    return Done(fault.who.kind)


def _launchers(scene: Scene) -> list[psutil.Process]:
    """The launchers themselves; in a namespace they are children of what carried them there."""
    found = []
    for process in scene.launchers.values():
        with contextlib.suppress(psutil.Error):
            carrier = psutil.Process(process.pid)
            found.append(carrier.children()[0] if carrier.name() == "nsenter" else carrier)
    return found


def _is_controller(process: psutil.Process) -> bool:
    try:
        return "ttp.controller" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _tell(scene: Scene, order: dict[str, Any]) -> None:
    observer = scene.observers[scene.leader]
    assert observer.stdin is not None
    observer.stdin.write(json.dumps(order) + "\n")
    observer.stdin.flush()


def _signal(pid: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)


# ------------------------------------------------------------------------------------------------------ hosts and disks


def _host(fault: Fault, scene: Scene) -> Done:
    (host,) = fault.who.numbers
    ranks = frozenset(scene.script.ranks_of(host))
    match fault.what:
        case "kill":
            scene.hosts.power_off(host)
            scene.hurt |= ranks
            scene.dead.add(host)
            return Done(str(fault.who), ranks)
        case "partition" | "unplug":
            scene.hosts.cut(host, carrier=fault.what == "partition")
            scene.cut.add(host)
            return Done(str(fault.who), cut_off=ranks)
        case "heal":
            scene.hosts.join(host)
            scene.cut.discard(host)
        case _:
            pids = {process.pid for process in scene.hosts.processes(host)}
            for pid in pids:
                _signal(pid, SIGNALS[fault.what])
            _remember_stops(fault.what, pids, scene)
            return Done(str(fault.who), ranks if fault.what == "stop" else frozenset())
    return Done(str(fault.who))


def _disk(fault: Fault, scene: Scene) -> Done:
    if scene.disk is None:
        raise MissedError("the job has no disk of its own")
    match fault.what:
        case "disk-full":
            scene.disk.fill()
        case "disk-ro":
            scene.disk.protect()
        case _:
            scene.disk.heal()
    return Done("disk")
