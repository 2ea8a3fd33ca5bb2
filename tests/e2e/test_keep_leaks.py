"""The resources of a process that has gone on many times: old connections of gloo, and nothing else."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import Job, MakeJob, processes
from tests.e2e.test_keep import KEEP, again, met
from tests.waiting import until
from ttp.processor import import_list
from ttp.wire.channel import metadata, open_channel, stub
from ttp.wire.v1 import controller_pb2 as pb

TIMEOUT_S = 500
GLOO = ("gloo_tcp_loop", "pt_gloo_runloop")
GLOOS = Counter({"pipe": 2, "eventpoll": 1, "listens": 1})
"""Descriptors of a backend of gloo whose connections were broken."""
TRAIN_AGAIN = "all ranks train again"
"""What the launcher says after the first update of each rank."""
OBJECTS_EACH = 20
"""Of Python, at most, for each time: those that stand for a backend and its store."""
KIB_EACH = 2048
"""Of memory, at most, for each time: three stacks, gloo's buffers, what the allocator does not give back."""


@dataclass
class Held:
    """What a process holds: descriptors and threads by kind, and resident memory in KiB."""

    descriptors: Counter[str]
    threads: Counter[str]
    kib: int


def held(pid: int) -> Held:
    """Return what the process holds in each of several looks, because files are opened and closed all the time."""
    looks = [look(pid) for _ in range(5)]
    for one in looks[1:]:
        looks[0].descriptors &= one.descriptors
        looks[0].threads &= one.threads
    return looks[0]


def look(pid: int) -> Held:
    process = psutil.Process(pid)
    sockets = {c.fd: "listens" if c.status == psutil.CONN_LISTEN else "connected" for c in process.net_connections()}
    kinds = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # closed since
            continue
        kinds.append(sockets.get(int(entry.name)) or re.sub(r"^anon_inode:|[\[\]:\d]", "", target))
    names = Counter[str]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # ended since
            names[(task / "comm").read_text().strip()] += 1
    return Held(Counter(kinds), names, process.memory_info().rss // 1024)


def settled(job: Job, wanted: Counter[str], threads: Counter[str]) -> None:
    """Wait until rank 0 holds these descriptors, and besides gloo's no more than these threads, give or take one each.

    A rank has a thread for removing old checkpoints, and the page of another rank open, only once it needs them. What
    was left each time that ranks go on would be more than one.
    """
    rank_0 = met(job)[0]

    def difference() -> dict[str, Counter[str]]:
        now = held(rank_0)
        threads_more = Counter({name: n for name, n in (now.threads - threads).items() if name not in GLOO})
        found = {"more": now.descriptors - wanted, "less": wanted - now.descriptors, "threads": threads_more}
        return {how: Counter({name: n for name, n in counts.items() if n > 1}) for how, counts in found.items()}

    until(lambda: not any(difference().values()), story=lambda: f"{difference()}\n{job.story()}")


def of_all(job: Job) -> dict[str, Held]:
    """Return what each long-lived process holds: the launcher, its helpers, and rank 0, which is never killed here."""
    launcher = psutil.Process(job.processes[0].pid)
    (controller,) = processes("ttp.controller", job.directory / "run")
    found = {"launcher": launcher, "rank 0": psutil.Process(met(job)[0]), "controller": controller}
    for child in launcher.children(recursive=True):
        found |= {name: child for name in ("warm.template",) if name in " ".join(child.cmdline())}
    return {name: held(process.pid) for name, process in found.items()}


def files(job: Job) -> set[str]:
    """Return the names in the run directory, digits replaced by N; without the list of imports, which is temporary."""
    lasting = Counter(path for path in places(job) if path.name != import_list.FILE)
    return {re.sub(r"\d+", "N", str(path)) + f" x{n}" for path, n in lasting.items()}


def places(job: Job) -> list[Path]:
    return [path.with_name(re.sub(r"\d+", "N", path.name)) for path in (job.directory / "run").rglob("*")]


def go_on(job: Job, *, kill: bool) -> None:
    """Make ranks go on once, after a death or on request; return when all of them train again."""
    launch, version = newest(job)
    times = job.log.read_text().count(TRAIN_AGAIN)
    if kill:
        psutil.Process(met(job)[1]).kill()
    else:
        with open_channel("127.0.0.1", job.port) as channel:
            request = pb.SaveNowRequest(reason="to count what is left", again=True)
            assert stub(channel).SaveNow(request, timeout=60, metadata=metadata(job.token())).saved, job.story()
    until(lambda: newest(job) >= (launch + 1, version + 2), story=job.story)
    until(lambda: job.log.read_text().count(TRAIN_AGAIN) > times, story=job.story)  # else a death starts all anew


def newest(job: Job) -> tuple[int, int]:
    """Return rank 0's launch number and newest version."""
    return [(launch, value) for launch, kind, value in job.notes(0) if kind == "version"][-1]


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.xdist_group("ttp")
@pytest.mark.parametrize(("times", "every"), [(6, 2), pytest.param(50, 5, marks=pytest.mark.slow)])
def test_old_connections_are_all_that_stays(make_job: MakeJob, times: int, every: int) -> None:
    """Ranks go on ``times`` times; one in ``every`` is after a death, the others are on request."""
    env = {"TTP_CONTINUE_MAX": "1000", "JOB_STEP_S": "0.02", "JOB_COUNT": "1"}
    job = make_job(ranks=2, steps=100_000, max_restarts=1000, flags=KEEP, env=env).start()
    job.wait_for_version(10)
    warm = job.directory / "run" / "warm.json"
    until(lambda: warm.exists() and '"ready"' in warm.read_text(), 120, job.story)
    go_on(job, kill=True)
    go_on(job, kill=False)  # whatever is made once has been made now
    before, files_before = of_all(job), files(job)
    for number in range(times):
        go_on(job, kill=number % every == every - 1)
        assert "do not go on" not in job.log.read_text(), job.story()
    wanted = before["rank 0"].descriptors + Counter({kind: n * times for kind, n in GLOOS.items()})
    settled(job, wanted, before["rank 0"].threads)
    after = of_all(job)
    print({name: after[name].kib - before[name].kib for name in after}, "KiB more;", counted(job, "objects"), "objects")
    assert all(again(job)), job.story()
    more = after["rank 0"].threads - before["rank 0"].threads
    assert sum(more[name] for name in GLOO) == 3 * times, more
    assert after["rank 0"].kib - before["rank 0"].kib < KIB_EACH * (times + 5)
    for name in set(after) - {"rank 0"}:
        assert (after[name].descriptors - before[name].descriptors).total() <= 2, name  # who is connected just now
        assert not after[name].threads - before[name].threads, name
        assert after[name].kib - before[name].kib < 8192, name
    assert files(job) == files_before
    threads = counted(job, "threads")[2:]
    assert min(threads[-3:]) <= min(threads) + 1, threads  # one is made only once it is needed; see ``settled``
    objects = counted(job, "objects")[2:]
    assert objects[-1] - objects[0] <= OBJECTS_EACH * times, objects


def counted(job: Job, kind: str) -> list[Any]:
    return [value for _, found, value in job.notes(0) if found == kind]
