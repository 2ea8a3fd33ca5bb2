"""What the kernel knows of a connection, whatever its two processes do."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ttp.wire.sockets import Sockets, parse, second


@pytest.fixture(params=["127.0.0.1", "::1", "mapped"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, str]]:
    """Return an accepted connection, and gRPC's name of its peer; the other end reads nothing."""
    mapped = request.param == "mapped"
    family = socket.AF_INET if request.param == "127.0.0.1" else socket.AF_INET6
    with closing(
        socket.create_server(("::" if mapped else request.param, 0), family=family, dualstack_ipv6=mapped)
    ) as s:
        with closing(
            socket.create_connection(("127.0.0.1" if mapped else request.param, s.getsockname()[1]))
        ) as client:
            accepted, _ = s.accept()
            port = client.getsockname()[1]
            name = f"ipv6:%5B::1%5D:{port}" if request.param == "::1" else f"ipv4:127.0.0.1:{port}"
            with closing(accepted):
                yield accepted, name


def test_a_connection_is_found_by_the_name_of_its_peer(pair: tuple[socket.socket, str]) -> None:
    accepted, peer = pair
    silent_s = Sockets().silent_s([peer])
    assert silent_s is not None and 0 <= silent_s < 60
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), "the kernel asks from now on"


def test_one_that_is_closed_is_not_taken_for_its_successor(pair: tuple[socket.socket, str]) -> None:
    accepted, peer = pair
    sockets = Sockets()
    assert sockets.silent_s([peer]) is not None
    with socket.socket() as other:
        os.dup2(other.fileno(), accepted.fileno())
        assert sockets.silent_s([peer]) is None


def test_a_connection_that_was_opened_again_is_found() -> None:
    """A rank that connects again reaches the same address through another descriptor."""
    sockets = Sockets()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as successor:
        address = server.getsockname()
        peer = f"ipv4:127.0.0.1:{address[1]}"
        with socket.create_connection(address):
            assert sockets.silent_s([peer]) is not None
        successor.connect(address)
        assert sockets.silent_s([peer]) is not None


def test_what_cannot_be_known_is_said() -> None:
    assert Sockets().silent_s([]) is None
    assert Sockets().silent_s(["unix:/run/x", "ipv4:127.0.0.1:1"]) is None
    assert parse("unix:/run/x") is None and parse("ipv4:nonsense:5") is None and parse("") is None


def test_a_file_that_took_the_number_of_a_closed_socket_is_left_alone(tmp_path: Path) -> None:
    """A second descriptor of the file would keep its lock, and its space on the disk."""
    path = tmp_path.resolve() / "file"

    def descriptors() -> int:
        """Count this file's: threads that other tests have left open and close others."""
        return sum(os.path.realpath(entry) == str(path) for entry in Path("/proc/self/fd").iterdir())

    with path.open("w") as file:
        for _ in range(2):
            with pytest.raises(OSError, match="socket"), second(file.fileno()):
                pass
            assert descriptors() == 1
        assert file.write("still open") == 10
