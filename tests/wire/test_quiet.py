"""gRPC prints nothing of its own into the log of a training program that forks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, threading
import {module}
import grpc
failed = threading.Event()  # from then on a thread of grpcio watches the channel
channel = grpc.insecure_channel("127.0.0.1:1")
channel.subscribe(lambda state: state.value[1] == "transient failure" and failed.set(), try_to_connect=True)
assert failed.wait(60)
for _ in range(10):
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("module", ["ttp.wire.access", "ttp.processor.link.stream"])
@pytest.mark.parametrize(("verbosity", "prints"), [(None, False), ("INFO", True)])
def test_a_fork_is_not_worth_a_line_unless_the_user_asks_for_it(
    module: str, verbosity: str | None, prints: bool
) -> None:
    env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    env |= {"GRPC_VERBOSITY": verbosity} if verbosity else {}
    program = PROGRAM.format(module=module)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]  # Python 3.12 warns of the fork
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert ("fork_posix" in done.stderr) == prints, done.stderr
    assert prints or not done.stderr
