"""Forks the workers of a run of all tests from one process that has imported all tests: each would need seven seconds.

pytest-xdist starts ``CONNECT`` as the Python of each worker. That hands its streams over to the process with the
imports, a fork of which is the worker, and ends when the worker ends.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SERVE = "import sys; from tests import workers; workers.main(int(sys.argv[1]))"
CONNECT = """
import os, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
socket.send_fds(server, [b"1"], [0, 1, 2])
os.close(0)
os.close(1)
server.recv(1)
"""


def start() -> tuple[str, Callable[[], None]]:
    """Start the process with the imports. Returns the command line of a Python for workers, and what ends the process.

    It also ends with this one.
    """
    directory = tempfile.TemporaryDirectory()
    address = f"{directory.name}/workers"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        command = [sys.executable, "-c", SERVE, str(listener.fileno())]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=HERE.parent, pass_fds=[listener.fileno()])

    def end() -> None:
        server.communicate()
        directory.cleanup()

    return shlex.join([sys.executable, "-IS", "-c", CONNECT, address]), end


class Imports:
    """Imports the tests, in the place of a test run: pytest gives them other asserts, and knows the conftest files."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self) -> int:
        """Import all tests. What cannot be imported, or warns, is reported by the workers, which try again."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # as while pytest collects: workers would not see a warning again
            for path in sorted(HERE.rglob("test_*.py")):
                with contextlib.suppress(Exception, pytest.skip.Exception):  # the workers' collection tells of it
                    importlib.import_module(".".join(path.relative_to(HERE.parent).with_suffix("").parts))
        return 0


def look_for_constants() -> None:
    """Let hypothesis read all that was imported for constants to try. Each worker would, which takes seconds."""
    with warnings.catch_warnings(), contextlib.suppress(ImportError, AttributeError):  # of a hypothesis without it
        warnings.simplefilter("ignore")  # of slow starts
        importlib.import_module("hypothesis.internal.conjecture.providers")._get_local_constants()


def main(listener: int) -> None:
    """Import all tests, and fork a worker for each connection to the socket ``listener``, until stdin is closed."""
    pytest.main(["-s"], plugins=[Imports()])
    look_for_constants()
    gc.collect()
    gc.freeze()
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C only the test run and its workers tell
    with socket.socket(fileno=listener) as requests:
        while requests.fileno() in select.select([requests.fileno(), 0], [], [])[0]:
            connection, _ = requests.accept()
            if os.fork():
                connection.close()
                continue
            signal.signal(signal.SIGINT, interrupt)
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            break
        else:
            return
    sys.argv, sys.stdin = ["-c"], open(0, closefd=False)  # noqa: SIM115 - stdin stays open
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})  # what execnet has its workers do
    atexit._run_exitfuncs()
    os._exit(0)  # to free all that has been imported would take half a second
