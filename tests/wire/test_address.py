"""Names that cannot be those of hosts, wherever an address is looked up or connected to."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from ttp.config import Config
from ttp.errors import ConfigError
from ttp.launch.admission import _numbers
from ttp.launch.mindspore.launch import _number_of
from ttp.launch.presence import is_local, listens, may_be_bound
from ttp.launch.standby import own_address, reachable
from ttp.wire.access import is_loopback
from ttp.wire.address import split, target
from ttp.wire.sockets import peers
from ttp.wire.tls import speaks_tls

NO_NAMES = ["a" * 64, "a..b", "\udc80", "\u00e9" * 64]


@pytest.mark.parametrize("name", NO_NAMES)
@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (is_local, False),
        (lambda name: may_be_bound(name, 1), False),
        (lambda name: listens(name, 1, 1.0), False),
        (lambda name: reachable(name, 1, 1.0)[0], False),
        (lambda name: own_address(Config(), name), ""),
        (_numbers, set()),
        (is_loopback, False),
        (lambda name: peers(name, 1), ()),
        (lambda name: speaks_tls(name, 1), None),
    ],
)
def test_nobody_has_such_a_name(name: str, ask: Callable[[str], Any], answer: object) -> None:
    """``getaddrinfo`` raises UnicodeError for these, and OSError for other unknown names."""
    assert ask(name) == answer


@pytest.mark.parametrize(
    ("address", "place"),
    [("node0", "node0:80"), ("::1", "[::1]:80"), ("fe80::1%eth0", "[fe80::1%25eth0]:80")],
)
def test_a_place_is_what_grpc_connects_to(address: str, place: str) -> None:
    """It never connects to ``[fe80::1%eth0]:80``, and cannot bind it."""
    assert target(address, 80) == place
    assert split(place) == (address, 80)


@pytest.mark.parametrize(
    ("token", "master", "answer"),
    [("secret", "node0", "node0"), ("", "node0", "127.0.0.1"), ("secret", "127.0.1.1", "127.0.0.1")],
)
def test_a_first_node_that_takes_its_own_name_for_loopback_is_known_to_others_by_that_name(
    monkeypatch: pytest.MonkeyPatch, token: str, master: str, answer: str
) -> None:
    found = (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 1))  # Debian's line in /etc/hosts
    monkeypatch.setattr("ttp.launch.standby.resolve", lambda *_: [found])
    assert own_address(Config(token=token), master) == answer


def test_a_host_is_known_by_its_address_of_the_family_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of other hosts could not reach the standby controller here at an IPv6 address that leads nowhere."""
    ways = [(socket.AF_INET6, ("::1", 1, 0, 0)), (socket.AF_INET, ("127.0.0.1", 1))]
    monkeypatch.setattr("ttp.launch.standby.resolve", lambda *_: [(family, 0, 0, "", to) for family, to in ways])
    monkeypatch.setattr("ttp.launch.standby.reachable", lambda address, _: (":" not in address, ""))
    assert own_address(Config(), "node0") == "127.0.0.1"


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_master_of_such_a_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be resolved"):
        _number_of(name, 0.0)


def test_a_name_service_that_fails_for_a_moment_ends_no_job_that_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [OSError("temporary failure in name resolution"), [(None,) * 4 + (("10.0.0.1", 0),)]]

    def resolve(_host: str, _port: None) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr("ttp.launch.mindspore.launch.resolve", resolve)
    assert _number_of("node-0", 5.0) == "10.0.0.1"
