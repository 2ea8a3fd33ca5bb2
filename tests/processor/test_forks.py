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


def test_the_controller_sees_the_death_while_the_child_lives(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    try:
        controller.rank(0, run_id="none", save_dir=str(tmp_path))
        env = {k: v for k, v in os.environ.items() if not k.startswith("TTP_")} | {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TTP_PORT": str(controller.port),
            "TTP_RUN_DIR": str(tmp_path / "run"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
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
import os, socket
from ttp.processor.liveness import forks

server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
kept, closed = socket.socket(), socket.create_connection(("127.0.0.1", port))
if {listen}:
    forks.close_in_children(port)
child = os.fork()
if child == 0:
    try:
        os.fstat(closed.fileno())
    except OSError:
        os.fstat(kept.fileno())
        os._exit(7)
    os._exit(8)
os.fstat(closed.fileno())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("listen", "code"), [(True, "7"), (False, "8")])
def test_the_child_loses_the_sockets_to_the_controller_and_no_others(listen: bool, code: str) -> None:
    """Newer gRPC closes its sockets in children by itself; older ones do not."""
    program = SOCKETS.format(listen=listen)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == code


TWO = """
import os, socket
from ttp.processor.liveness import forks

servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
streams = [socket.create_connection(server.getsockname()) for server in servers]
for server in servers:
    forks.close_in_children(server.getsockname()[1])
child = os.fork()
if child == 0:
    there = 0
    for stream in streams:
        try:
            os.fstat(stream.fileno())
            there += 1
        except OSError:
            pass
    os._exit(there)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_stream_to_a_stand_in_does_not_make_children_keep_the_first_stream() -> None:
    done = subprocess.run([sys.executable, "-c", TWO], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "0"


REUSED = """
import os, socket
from ttp.processor.liveness import forks

server = socket.create_server(("127.0.0.1", 0))
stream = socket.create_connection(server.getsockname())
forks.close_in_children(server.getsockname()[1])
number = stream.fileno()
stream.close()  # the stream is down, and its number is given to somebody else
read, write = os.pipe()
os.dup2(read, number)
child = os.fork()
if child == 0:
    os.fstat(number)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_child_keeps_what_has_come_under_the_number_of_an_old_stream() -> None:
    done = subprocess.run([sys.executable, "-c", REUSED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "7"
