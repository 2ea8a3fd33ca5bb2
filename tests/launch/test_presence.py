"""What a host knows of an address without asking a controller: who listens there, and whether it is this host's."""

from __future__ import annotations

from ttp.launch.presence import is_local, listens, port_owner, probe
from ttp.wire.address import target


def test_nobody(unused_port: int) -> None:
    assert probe("127.0.0.1", unused_port, "secret") == "nobody"
    assert port_owner(unused_port) is None
    assert not listens("127.0.0.1", unused_port, 1.0)


def test_addresses() -> None:
    assert is_local("127.0.0.1")
    assert is_local("localhost")
    assert not is_local("192.0.2.1")  # reserved for documentation: on no machine
    assert not is_local("no.such.host.invalid")
    assert target("::1", 5) == "[::1]:5"
    assert target("host", 5) == "host:5"
