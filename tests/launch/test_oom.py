"""Kills for lack of memory are told from others, on made-up cgroups and on a real one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.test_deaths import Notes
from ttp.launch import worker_watch
from ttp.launch.deaths import describe_exit
from ttp.launch.worker_watch import OomWatch, WorkerWatch, killed_together

PID = 77
LONG_S = 30.0


class System:
    """A fake machine with ``/proc`` and cgroups under a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounts: list[str] = []
        (root / "proc" / "self").mkdir(parents=True)
        self.mount("tmpfs tmpfs rw", "/", "/tmp")
        self.write("proc/vmstat", "nr_free_pages 7\noom_kill 40\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def mount(self, kind: str, root: str, point: str) -> None:
        """Add a mount. ``kind`` is type, source and options, as after the dash in mountinfo."""
        place = f"{self.root}{point}".replace(" ", r"\040")
        self.mounts.append(f"31 23 0:28 {root} {place} rw,relatime shared:1 - {kind}\n")
        self.write("proc/self/mountinfo", "".join(self.mounts))

    def unified(self, root: str = "/") -> None:
        self.mount("cgroup2 cgroup2 rw,nsdelegate", root, "/sys/fs/cgroup")

    def run(self, cgroup: str, pid: int = PID) -> None:
        self.write(f"proc/{pid}/cgroup", cgroup)

    def in_job(self, *pids: int) -> None:
        """Run processes in the cgroup of a job (v2)."""
        self.unified()
        for pid in pids or (PID,):
            self.run("0::/job\n", pid)

    def killed(self, cgroup: str, count: int) -> None:
        """Set the counter of kills of a cgroup (v2)."""
        self.write(
            f"sys/fs/cgroup{cgroup}/memory.events", f"low 0\nmax 12\noom 9\noom_kill {count}\noom_group_kill 0\n"
        )

    def killed_v1(self, cgroup: str, count: int) -> None:
        text = f"oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n"
        self.write(f"sys/fs/cgroup/memory{cgroup}/memory.oom_control", text)


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_in_a_cgroup(system: System) -> None:
    system.unified()
    system.run("0::/jobs/17\n")
    system.killed("/jobs/17", 3)
    watch = OomWatch([PID], system.root)
    assert watch.explain(PID) == "", "somebody else's SIGKILL"
    system.killed("/jobs/17", 4)
    why = watch.explain(PID)
    assert why == "out of memory (cgroup /jobs/17, oom_kill 3 -> 4)"
    assert describe_exit(-9, why) == f"killed by signal 9 (SIGKILL): {why}"
    assert describe_exit(137, why) == f"exited with code 137: {why}"
    assert watch.explain(PID) == "", "one kill explains one death"


def test_each_kill_explains_one_death(system: System) -> None:
    system.in_job(1, 2, 3)
    system.killed("/job", 0)
    watch = OomWatch([1, 2, 3], system.root)
    system.killed("/job", 2)
    assert [bool(watch.explain(pid)) for pid in (1, 2, 3)] == [True, True, False]


def test_the_nearest_that_counts(system: System) -> None:
    """The rank's cgroup has no memory controller, so its parent counts. Kills elsewhere do not explain the death."""
    system.unified()
    system.run("0::/jobs/17/rank\n")
    system.killed("/jobs", 5)
    system.killed("/jobs/17", 0)
    watch = OomWatch([PID], system.root)
    system.killed("/jobs", 6)
    assert watch.explain(PID) == ""
    system.killed("/jobs/17", 1)
    assert "cgroup /jobs/17, oom_kill 0 -> 1" in watch.explain(PID)


@pytest.mark.parametrize(("inner", "outer", "named"), [("1", "0", "/"), ("0", "1", "/pod"), ("0", "0", "")])
def test_a_cgroup_that_is_killed_as_a_whole(system: System, inner: str, outer: str, named: str) -> None:
    """As in a container of Kubernetes, whose own cgroup is all that it sees, or below it; and without such a file."""
    assert killed_together(system.root) == ""
    system.unified("/pod/train" if named == "/" else "/")
    system.write("proc/self/cgroup", "0::/pod/train\n")
    system.write(f"sys/fs/cgroup{'' if named == '/' else '/pod/train'}/memory.oom.group", f"{inner}\n")
    system.write("sys/fs/cgroup/pod/memory.oom.group", f"{outer}\n")
    assert killed_together(system.root) == (f"cgroup {'/pod/train' if named == '/' else named}" if named else "")


def test_outside_of_all_cgroups_the_machine_counts(system: System) -> None:
    system.unified()
    system.run("0::/\n")
    watch = OomWatch([PID], system.root)
    system.write("proc/vmstat", "oom_kill 41\n")
    assert watch.explain(PID) == "out of memory (this machine, oom_kill 40 -> 41)"


@pytest.mark.parametrize("root", ["/", "/docker/abc", "/elsewhere"])
def test_version_1_also_in_a_container(system: System, root: str) -> None:
    system.mount("cgroup cgroup rw,cpu", "/", "/sys/fs/cgroup/cpu")
    system.mount("cgroup cgroup rw,memory", root, "/sys/fs/cgroup/memory")
    system.mount("cgroup2 cgroup2 rw", "/", "/sys/fs/cgroup/unified")
    system.run("9:cpu:/other\n4:hugetlb,memory:/docker/abc\n0::/\n")
    where = "/docker/abc" if root == "/" else ""
    system.killed_v1(where, 0)
    watch = OomWatch([PID], system.root)
    system.killed_v1(where, 1)
    assert watch.explain(PID) == f"out of memory (cgroup {'/docker/abc' if root == '/' else root}, oom_kill 0 -> 1)"


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill many\n", "oom_kill 1 2\n", "\0\n"])
def test_a_counter_that_cannot_be_read(system: System, text: str) -> None:
    system.in_job()
    system.write("sys/fs/cgroup/job/memory.events", text)
    system.write("proc/vmstat", text)
    assert OomWatch([PID], system.root).explain(PID) == ""


def test_a_counter_that_goes_away(system: System) -> None:
    system.in_job()
    system.killed("/job", 0)
    watch = OomWatch([PID], system.root)
    (system.root / "sys/fs/cgroup/job/memory.events").unlink()
    assert watch.explain(PID) == ""


@pytest.mark.parametrize("broken", ["proc/self/mountinfo", f"proc/{PID}/cgroup"])
@pytest.mark.parametrize("text", ["", "nonsense", "1 2 3 - \n:\n", "\xff"])
def test_a_strange_proc_leaves_the_machine(system: System, broken: str, text: str) -> None:
    system.in_job()
    (system.root / broken).write_bytes(text.encode("latin-1"))
    watch = OomWatch([PID], system.root)
    system.write("proc/vmstat", "oom_kill 41\n")
    assert watch.explain(PID).startswith("out of memory (this machine")


def test_nothing_at_all(tmp_path: Path) -> None:
    assert OomWatch([PID], tmp_path).explain(PID) == ""
    assert OomWatch([PID], tmp_path).explain(99) == ""


def test_the_launcher_says_so(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    system.unified()
    system.killed("/job", 0)
    monkeypatch.setattr(worker_watch, "OomWatch", lambda pids=(): OomWatch(pids, system.root))
    workers = {rank: subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for rank in range(3)}
    for worker in workers.values():
        system.run("0::/job\n", worker.pid)
    notes, watch = Notes(), WorkerWatch()

    def heard() -> str:
        return notes.heard.get(timeout=LONG_S)[2]

    try:
        watch.watch(workers, notes)
        workers[0].terminate()
        system.killed("/job", 1)
        assert heard() == "killed by signal 15 (SIGTERM)", "that is nobody's lack of memory"
        workers[1].kill()
        assert heard().endswith("(SIGKILL): out of memory (cgroup /job, oom_kill 0 -> 1)")
        workers[2].kill()
        assert heard() == "killed by signal 9 (SIGKILL)"
    finally:
        watch.close()
        for worker in workers.values():
            worker.kill()
            worker.communicate()


GREEDY = """
import sys
open(sys.argv[1], "w").write("0")
print("ready", flush=True)
input()
hoard = bytearray(512 << 20)
"""


LIMITS = {
    "/sys/fs/cgroup/memory": ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", 64 << 20),
    "/sys/fs/cgroup": ("memory.max", "memory.swap.max", 0),
}


@contextlib.contextmanager
def small_cgroup() -> Iterator[Path]:
    """Return a cgroup of version 1 or 2 that is limited to 64 MiB."""
    for base, (limit, swap, swap_bytes) in LIMITS.items():
        path = Path(base, f"ttp-test-{os.getpid()}")
        with contextlib.ExitStack() as undo, contextlib.suppress(OSError):
            path.mkdir()
            undo.callback(path.rmdir)
            (path / limit).write_text(str(64 << 20))
            with contextlib.suppress(FileNotFoundError):  # swap is not accounted for
                (path / swap).write_text(str(swap_bytes))
            yield path
            return
    pytest.skip("needs the right to make a cgroup")


@pytest.mark.slow
def test_a_real_one() -> None:
    with small_cgroup() as cgroup:
        command = [sys.executable, "-c", GREEDY, str(cgroup / "cgroup.procs")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            watch = OomWatch([process.pid])
            process.communicate("go\n", timeout=LONG_S)
        assert process.returncode == -signal.SIGKILL
        assert watch.explain(process.pid) == f"out of memory (cgroup /{cgroup.name}, oom_kill 0 -> 1)"


def test_a_signal_to_the_launcher_is_not_lost_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's launcher raises an exception for SIGTERM wherever the main thread is."""

    class SignalError(Exception):
        pass

    def signalled(_: object) -> None:
        raise SignalError

    monkeypatch.setattr(worker_watch, "mounts", signalled)
    with pytest.raises(SignalError):
        OomWatch()
