"""A forked child does not keep the stream of its dead parent open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.controller.conftest import Controller
from tests.waiting import until
from ttp.store.history import read_word

PROGRAM = """
import os, signal, sys
from tests.processor.fake_source import FakeSource
from ttp import session
from ttp.config import RankEnv
from ttp.core.layout import Layout
from pathlib import Path

env = RankEnv.from_env()
session.current().start_processor(env, Layout.data_parallel(env.world_size), FakeSource(), Path(sys.argv[1]))
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
signal.pause()
"""


def rank_1(controller: Controller, tmp_path: Path) -> dict[str, str]:
    """Return the environment of the second rank of two."""
    return {k: v for k, v in os.environ.items() if not k.startswith("TTP_")} | {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "TTP_PORT": str(controller.port),
        "TTP_RUN_DIR": str(tmp_path / "run"),
        "TTP_SAVE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }


def test_the_controller_sees_the_death_while_the_child_lives(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    try:
        controller.rank(0, run_id="none", save_dir=str(tmp_path))
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
        with subprocess.Popen(command, env=rank_1(controller, tmp_path), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            until(lambda: controller.status().stage == "training")
            process.send_signal(signal.SIGKILL)
            try:
                until(lambda: controller.status().incidents_total == 1)
                os.kill(child, 0)  # the child is alive all the while
            finally:
                os.kill(child, signal.SIGKILL)
    finally:
        controller.close()


SOCKETS = """
import os, socket, sys
from ttp.processor.liveness import forks

servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
streams = [socket.create_connection(server.getsockname()) for server in servers]
kept = socket.socket()
numbers = [each.fileno() for each in (*streams, kept)]

def is_open(number):
    try:
        return os.fstat(number) is not None
    except OSError:
        return False

def is_stream(which):
    forks.close_in_children(servers[which].getsockname()[1])

def is_reused():  # the stream is down, and its number is given to somebody else
    streams[0].close()
    os.dup2(os.pipe()[0], numbers[0])

exec(sys.argv[1])
child = os.fork()
if child == 0:
    os._exit(sum(is_open(number) << place for place, number in enumerate(numbers)))
assert all(map(is_open, numbers))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(
    ("before", "left"),
    [
        ("", 0b111),
        ("is_stream(0)", 0b110),
        ("is_stream(0); is_stream(1)", 0b100),  # as with a stand-in
        ("is_stream(0); is_reused()", 0b111),
    ],
)
def test_the_child_loses_the_sockets_to_the_controllers_and_nothing_else(before: str, left: int) -> None:
    """Newer gRPC closes its sockets in children by itself; older ones do not."""
    command = [sys.executable, "-c", SOCKETS, before]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) == left


RETURNS = """
import os, sys, time
import ttp
from pathlib import Path
from tests.processor.fake_source import FakeSource
from ttp import session
from ttp.config import RankEnv
from ttp.core.layout import Layout
from ttp.errors import UsageError

@ttp.ttp_to_persist
def train():
    env = RankEnv.from_env()
    session.current().start_processor(env, Layout.data_parallel(env.world_size), FakeSource(), Path(sys.argv[1]))
    child = os.fork()
    if not child:
        {end}
    for _ in range(2000):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
    print(os.waitstatus_to_exitcode(status) if pid else "the child does not end", flush=True)
    sys.stdin.read()
    os._exit(0)

os._exit(train())
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("return 7", "7"), ("sys.exit(0)", "0"), ("raise ValueError", "1"), ("raise UsageError", "1")],
)
def test_a_child_that_leaves_train_is_not_the_rank(end: str, code: str, tmp_path: Path) -> None:
    """It ends as without ttp: it neither waits for the job nor says that it has failed or is misconfigured."""
    controller = Controller(tmp_path)
    try:
        controller.rank(0, run_id="none", save_dir=str(tmp_path))
        command = [sys.executable, "-W", "ignore", "-c", RETURNS.format(end=end), str(tmp_path)]
        at = rank_1(controller, tmp_path)
        with subprocess.Popen(command, env=at, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline().strip() == code
            until(lambda: controller.status().stage == "training")
            assert controller.status().incidents_total == 0
            process.stdin.close()
        assert read_word(tmp_path) is None
    finally:
        controller.close()


MINDIO = """
import os
from ttp.compat.mindio.rank import THIS

THIS.participant = THIS
child = os.fork()
if not child:
    os._exit(THIS.participant is not None)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), THIS.participant is not None)
"""


def test_a_child_is_no_rank_in_programs_for_mindio() -> None:
    done = subprocess.run([sys.executable, "-c", MINDIO], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "True"]
