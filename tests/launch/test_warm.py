"""Warm restarts with real launchers: a forked worker equals one that was started; in doubt it is started."""

from __future__ import annotations

import ctypes
import decimal
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forking
from tests.launch.conftest import LAUNCHERS, OF_MINDSPORE, PATIENCE_S, Job, Start
from tests.waiting import until
from ttp.cli.connection import Where
from ttp.cli.status import describe, restarts_line
from ttp.config import Config
from ttp.launch.warm import memory
from ttp.launch.warm.starter import PR_GET_CHILD_SUBREAPER, PR_SET_CHILD_SUBREAPER, WarmStarter, adopting, read_status
from ttp.store.durable import replace_file
from ttp.wire.v1.controller_pb2 import GetStatusResponse

FLAGS = ["--nproc-per-node", "2", "--max-restarts", "1"]
HERE = Path(__file__).parent


def said(job: Job, rank: int, attempt: int) -> dict[str, Any]:
    """Return what a worker has reported about its process."""
    return dict(json.loads(job.wait_for(f"facts-{rank}-{attempt}")))


def template(job: Job) -> psutil.Process:
    """Return the process from which workers are forked."""
    (found,) = (
        child
        for child in psutil.Process(job.process.pid).children()
        if any("warm.template" in word for word in child.cmdline())
    )
    return found


@pytest.fixture(autouse=True)
def _cold_first(environ: dict[str, str]) -> None:
    environ["TTP_CONTINUITY"] = "warm"


@pytest.fixture
def imports(tmp_path: Path, out: Path, environ: dict[str, str]) -> Callable[..., None]:
    """Return a function that writes the list of imports as ranks do; ``sources`` are modules to make."""

    def write(*names: str, **sources: str) -> None:
        site = tmp_path / "site"
        site.mkdir(exist_ok=True)
        files = {name: __import__(name).__file__ for name in names}
        for name, source in sources.items():
            (site / f"{name}.py").write_text(source)
            files[name] = str(site / f"{name}.py")
        variables = json.loads((out / "facts-0-0").read_text())["environ"]
        reported = forking.imports(sorted(files.items()), str(site), environ=variables)
        replace_file(Path(environ["TTP_RUN_DIR"]) / "imports.json", reported.encode())

    return write


@pytest.fixture
def ready(environ: dict[str, str]) -> Callable[[], None]:
    """Return a function that waits until the template process has reported its state."""

    def wait() -> None:
        place = Path(environ["TTP_RUN_DIR"]) / "warm.json"
        until(lambda: place.exists() and json.loads(place.read_text())["state"] != "preparing", PATIENCE_S)

    return wait


@pytest.fixture
def restarted(start: Start, imports: Any, ready: Any) -> Callable[..., Job]:
    """Return a function that starts a job, and restarts it when the template has imported what was written."""

    def run(
        launcher: str = "ttp-run", *flags: str, end: str = "nothing", before: Any = lambda _: None, **sources: str
    ) -> Job:
        job = start(launcher, [*FLAGS, *flags], "warm_worker.py", end)
        said(job, 0, 0), said(job, 1, 0)
        imports("decimal", **sources)
        ready()
        before(job)
        (job.out / "go").touch()
        return job

    return run


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS), indirect=True)
def test_a_forked_worker_sees_what_a_fresh_one_sees(
    launcher: str, start: Start, imports: Any, ready: Any, environ: dict[str, str], unused_port: int
) -> None:
    environ["TTP_PORT"] = str(unused_port)
    _same_as_cold(start(launcher, FLAGS, "warm_worker.py", "nothing"), imports, ready)


def test_a_forked_module_sees_what_a_fresh_one_sees(
    start: Start, imports: Any, ready: Any, environ: dict[str, str]
) -> None:
    environ["PYTHONSAFEPATH"] = "1"
    environ |= {f"LARGE_{number}": "x" * 100_000 for number in range(8)}  # more than a message of a socket holds
    _same_as_cold(start("ttp-run", [*FLAGS, "-m"], "tests.launch.warm_worker", "nothing"), imports, ready)


def test_a_forked_worker_of_mindspore_sees_what_a_fresh_one_sees(start: Start, imports: Any, ready: Any) -> None:
    _same_as_cold(start(OF_MINDSPORE, FLAGS, "warm_worker.py", "nothing"), imports, ready)


def test_its_output_goes_to_the_files_of_its_attempt(
    launcher: str, restarted: Callable[..., Job], environ: dict[str, str], out: Path, unused_port: int
) -> None:
    environ["TTP_PORT"] = str(unused_port)
    job = restarted(launcher, "--redirects", "3", "--log-dir", str(out / "logs"))
    assert all(said(job, rank, 1)["warm"] for rank in range(2))
    assert job.finish() == 0, job.log
    for rank in range(2):
        (file,) = (out / "logs").glob(f"*/attempt_1/{rank}/stdout.log")
        assert file.read_text() == f"rank {rank} prints in attempt 1\n"


def _same_as_cold(job: Job, imports: Any, ready: Any) -> None:
    cold = [said(job, rank, 0) for rank in range(2)]
    imports("asyncio", "decimal", "random", setter="import os\nos.environ['SET_BY_IMPORT'] = '1'\n")
    ready()
    (job.out / "go").touch()
    warm = [said(job, rank, 1) for rank in range(2)]
    assert job.finish() == 0, job.log
    for before, after in zip(cold, warm, strict=True):
        assert (before.pop("warm"), after.pop("warm")) == (False, True)
        assert before.pop("random") != after.pop("random")
        assert after["environ"].pop("SET_BY_IMPORT") == "1"
        assert after == before
        assert after["parent"] == job.process.pid and after["session"]
    assert "rank 1 prints in attempt 1" in job.log
    assert not psutil.pid_exists(job.process.pid) or not psutil.Process(job.process.pid).children()


@pytest.mark.parametrize(("end", "code"), [("exit 7", "exitcode  : 7"), ("raise", "exitcode  : 1")])
def test_it_ends_as_a_fresh_one_ends(end: str, code: str, restarted: Callable[..., Job]) -> None:
    job = restarted(end=end)
    assert said(job, 1, 1)["warm"]
    assert job.finish() == 1
    assert code in job.log
    if end == "raise":
        shown = job.log[job.log.index("Traceback (most recent call last)") :].splitlines()
        assert "warm_worker.py" in shown[1] and shown[1].endswith(", in <module>"), shown[:4]


@pytest.mark.parametrize("hurt", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_process_to_fork_from_workers_are_started(hurt: int, restarted: Callable[..., Job]) -> None:
    def hurts(job: Job) -> None:
        forked_from.append(template(job))
        assert Path(f"/proc/{forked_from[0].pid}/oom_score_adj").read_text() == "1000\n"
        forked_from[0].send_signal(hurt)

    forked_from: list[psutil.Process] = []
    job = restarted(before=hurts)
    assert not said(job, 0, 1)["warm"] and not said(job, 1, 1)["warm"]
    assert job.finish() == 0, job.log
    assert "restarts are cold" in job.log
    assert not forked_from[0].is_running()


DOUBTS = {
    "a thread": ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n", "thread"),
    "a pipe": ("import os\nends = os.pipe()\n", "import odd opens pipe:"),
    "a device": (
        "import os\nhere = os.getpid()\ndef _is_in_bad_fork(): return os.getpid() != here\n",
        "initialised a device",
    ),
    "what the program sets": (
        "import os\nfirst = os.environ.get('SET_BY_PROGRAM') == '1'\n",
        "the program sets SET_BY_PROGRAM",
    ),
    "a rank": ("import os\nfirst = os.environ.get('RANK') == '0'\n", "RANK differs between workers"),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_modules_that_cannot_be_shared(doubt: str, restarted: Callable[..., Job], environ: dict[str, str]) -> None:
    source, reason = DOUBTS[doubt]
    job = restarted(odd=source)
    assert not said(job, 0, 1)["warm"]
    assert job.finish() == 0, job.log
    assert reason in job.log
    told = read_status(Path(environ["TTP_RUN_DIR"]))
    assert told is not None and reason in restarts_line(told).plain


NO_DOUBTS = {
    "ends before a fork": "thread.start()\nos.register_at_fork(before=lambda: (over.set(), thread.join()))\n",
    "jemalloc's": "thread.start()\nwith open(f'/proc/self/task/{thread.native_id}/comm', 'w') as name:\n"
    "    name.write('jemalloc_bg_thd')\n",
}


@pytest.mark.parametrize("thread", NO_DOUBTS)
def test_a_thread_that_a_fork_can_do_without_is_no_doubt(thread: str, restarted: Callable[..., Job]) -> None:
    odd = "import os, threading\nover = threading.Event()\nthread = threading.Thread(target=over.wait, daemon=True)\n"
    job = restarted(odd=odd + NO_DOUBTS[thread])
    assert said(job, 0, 1)["warm"] and said(job, 1, 1)["warm"], job.log
    assert job.finish() == 0, job.log


def test_what_runs_before_every_program_may_look_at_the_rank(
    restarted: Callable[..., Job], environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nfirst = os.environ.get('RANK') == '0'\n")
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environ["PYTHONPATH"]])
    job = restarted()
    assert not said(job, 0, 1)["warm"]
    assert job.finish() == 0, job.log
    assert "sitecustomize.py reads variables" in job.log


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('{"path": [], "modules": [["a", ""]], "environ": {}, "bytes": 0}', "0 MiB are left on this host"),
        ("{}", "cannot be read: KeyError"),
        ("{", "cannot be read: JSONDecodeError"),
    ],
)
def test_no_process_is_prepared(said: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "left", lambda: 0)
    starter = WarmStarter(Config(), tmp_path)
    assert starter.worker([sys.executable, "-u", __file__], os.environ, None, None) is None
    (tmp_path / "imports.json").write_text(said)
    starter.look()
    assert reason in json.loads((tmp_path / "warm.json").read_text())["state"]


def test_a_scheduler_with_another_environment_does_not_make_the_ranks_cold(tmp_path: Path) -> None:
    """It starts first and is no rank, so it has no ``TTP_PORT``; a module may look at all variables."""
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    odd = tmp_path / "lib" / "site-packages" / "odd.py"
    odd.write_text("import os\nseen = dict(os.environ)\n")
    rank = {**os.environ, "OF_RANKS": "4711"}
    starter, command = WarmStarter(Config(), tmp_path), [sys.executable, "-u", str(odd)]
    reported = forking.imports([("odd", str(odd))], str(odd.parent), environ=rank)

    def start(name: str, environ: dict[str, str], is_rank: bool) -> bool:
        with (tmp_path / name).open("wb") as output:
            worker = starter.worker(command, environ, output, output, stdin=False, is_rank=is_rank)
        return worker is not None and worker.wait(PATIENCE_S) == 0

    try:
        for _ in range(2):
            scheduler = start("scheduler", {**rank, "OF_RANKS": ""}, is_rank=False)
            forked = start("rank", rank, is_rank=True)
            (tmp_path / "imports.json").write_text(reported)
            starter.look()
        assert forked and not scheduler
    finally:
        starter.close()


@pytest.mark.parametrize(("inherited", "lacks"), [(0, ()), (1024, ()), (0, ("memfd_create", "pidfd_open"))])
def test_of_the_moment_of_the_fork(
    inherited: int, lacks: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program with a relative path gets no input, and the launcher's cores at the time of the fork.

    Numbers of descriptors from 1024 on are no hindrance, nor is a Python that was built for an old glibc.
    """
    for name in lacks:
        monkeypatch.delattr(os, name)
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(inherited)]
    Path("show.py").write_text("import os\nprint(__file__, os.readlink('/proc/self/fd/0'), os.sched_getaffinity(0))\n")
    starter = WarmStarter(Config(), tmp_path)
    command = [sys.executable, "-u", "show.py"]
    cores = os.sched_getaffinity(0)
    try:
        assert starter.worker(command, os.environ, None, None) is None
        (tmp_path / "imports.json").write_text(forking.imports([("decimal", decimal.__file__)]))
        starter.look()
        os.sched_setaffinity(0, [min(cores)])
        with Path("said").open("wb") as output:
            worker = starter.worker(command, os.environ, output, output, stdin=False)
        assert worker is not None and worker.wait(PATIENCE_S) == 0
        assert Path("said").read_text() == f"{tmp_path}/show.py /dev/null {{{min(cores)}}}\n"
    finally:
        os.sched_setaffinity(0, cores)
        starter.close()
        for other in others:
            os.close(other)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def importing(tmp_path: Path) -> Iterator[WarmStarter]:
    """Return a starter whose process is to import three modules that compute for a while."""
    starter, modules = WarmStarter(Config(), tmp_path), []
    for number in range(3):
        file = tmp_path / f"busy{number}.py"
        file.write_text("import time\nuntil = time.process_time() + 0.1\nwhile time.process_time() < until: pass\n")
        modules.append((file.stem, str(file)))
    (tmp_path / "program.py").touch()
    assert starter.worker([sys.executable, str(tmp_path / "program.py")], os.environ, None, None) is None
    (tmp_path / "imports.json").write_text(forking.imports(modules, str(tmp_path)))
    starter.look()
    yield starter
    starter.close()


def test_a_restart_waits_for_the_imports(importing: WarmStarter, tmp_path: Path) -> None:
    assert not importing.ready
    worker = importing.worker([sys.executable, str(tmp_path / "program.py")], os.environ, None, None)
    assert worker is not None and worker.wait(PATIENCE_S) == 0


def test_it_leaves_three_quarters_of_a_core_to_the_ranks(importing: WarmStarter, tmp_path: Path) -> None:
    """While no restart waits, the template sleeps three times as long as each import took."""

    def ready() -> bool:
        importing.look()
        return bool(importing.ready)

    until(ready, PATIENCE_S, (tmp_path / "warm.json").read_text)
    told = json.loads((tmp_path / "warm.json").read_text())
    assert told["modules"] == 3 and told["seconds"] >= 3 * 0.4
    assert told["bytes"] >= 2**20
    assert f"{told['bytes'] / 2**20:.0f} MiB, shared" in restarts_line(told).plain


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), 9)", ""])
def test_a_launcher_that_has_ended_starts_nothing_again(ends: str, tmp_path: Path) -> None:
    """It was killed, or its host has left a job that goes on. Nobody may have taken its exit code yet."""
    where, noted = Where("127.0.0.1", 1, "", run_dir=tmp_path), WarmStarter(Config(), tmp_path)
    noted._note("ready")
    assert describe(GetStatusResponse(), where)["restarts"] == {"state": "ready"}
    code = "import os, sys; from pathlib import Path; from ttp.launch.warm.starter import WarmStarter, Config; "
    code += "WarmStarter(Config(), Path(sys.argv[1]))._note('ready'); "
    launcher = subprocess.Popen([sys.executable, "-c", code + ends, str(tmp_path)])
    os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):
        told = describe(GetStatusResponse(), where)["restarts"]
        assert "are cold: the launcher has ended" in restarts_line(told).plain
        launcher.wait()


def test_forked_ranks_draw_other_numbers(start: Start, environ: dict[str, str]) -> None:
    pytest.importorskip("torch")
    del environ["TTP_CONTINUITY"]  # the first start, too, is forked from a process that has imported torch
    job = start("ttp-run", FLAGS, "warm_worker.py", "draw")
    (job.out / "go").touch()
    assert all(said(job, rank, 1)["warm"] for rank in range(2))
    assert job.finish() == 0, job.log
    first, second = (json.loads((job.out / f"drawn-{rank}").read_text()) for rank in range(2))
    assert first[0] != second[0] and first[1] != second[1]


@pytest.mark.parametrize("set_before", [0, 1])
def test_somebody_elses_orphans_are_adopted_as_before(set_before: int) -> None:
    """The program that runs the launcher may have set PR_SET_CHILD_SUBREAPER itself."""
    prctl, flag = ctypes.CDLL(None).prctl, ctypes.c_int()

    def adopts() -> int:
        prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(flag), 0, 0, 0)
        return flag.value

    before = adopts()
    prctl(PR_SET_CHILD_SUBREAPER, set_before, 0, 0, 0)
    try:
        with adopting():
            assert adopts() == 1
        assert adopts() == set_before
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, before, 0, 0, 0)


def test_off_is_off(start: Start, imports: Any) -> None:
    job = start("ttp-run", [*FLAGS, "--continuity", "off"], "warm_worker.py", "nothing")
    said(job, 0, 0), said(job, 1, 0)
    imports("decimal")
    assert len(psutil.Process(job.process.pid).children()) == 2, "two ranks"
    (job.out / "go").touch()
    assert not said(job, 0, 1)["warm"]
    assert job.finish() == 0, job.log
