"""Reads ``RANK_TABLE_FILE``: the hosts, devices and ranks of a job on Ascend (HCCL's JSON, versions 1.0 and 1.2).

``{"version": "1.0", "server_count": "1", "server_list": [{"server_id": "10.0.0.1", "device": [{"device_id": "0",
"device_ip": "192.1.27.6", "rank_id": "0"}]}], "status": "completed"}``. Numbers are written as texts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.core.layout import WORLD_SIZE_MAX
from ttp.errors import ConfigError

VERSIONS = ("1.0", "1.2")
SIZE_MAX = 1 << 28
"""Bytes: ten thousand times what a table of a thousand devices takes."""


@dataclass(frozen=True, slots=True)
class Server:
    """One host. ``ranks`` and ``devices`` belong together by position."""

    address: str
    ranks: tuple[int, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankTable:
    """Every rank of a job, by host."""

    servers: tuple[Server, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return sum(len(server.ranks) for server in self.servers)

    @property
    def in_order(self) -> tuple[Server, ...]:
        """The hosts in the order of their lowest ranks."""
        return tuple(sorted(self.servers, key=lambda server: min(server.ranks)))

    @property
    def master(self) -> str:
        """Address of the host of rank 0."""
        return self.server_of(0).address

    def server_of(self, rank: int) -> Server:
        """The host of ``rank``.

        Raises:
            ConfigError: there is no such rank.
        """
        for server in self.servers:
            if rank in server.ranks:
                return server
        raise ConfigError(f"rank {rank} is not in the rank table, which has ranks 0 to {self.world_size - 1}")

    def local_rank(self, rank: int) -> int:
        """Position of ``rank`` among the ranks of its host."""
        return sorted(self.server_of(rank).ranks).index(rank)


def read_rank_table(path: str | Path) -> RankTable:
    """Read and check the table at ``path``.

    Raises:
        ConfigError: it is absent, not JSON, not finished, or contradicts itself; the text says what to change.
    """
    from ttp.store.json_text import parse_json
    from ttp.store.plain_file import read_plain

    try:
        document = parse_json(read_plain(Path(path), SIZE_MAX))
    except OSError as problem:
        raise ConfigError(f"the rank table {path} cannot be read: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise ConfigError(f"the rank table {path} is not JSON: {problem!s:.200}") from None
    try:
        return _checked(document)
    except ValueError as problem:
        raise ConfigError(f"the rank table {path} is wrong: {problem!s:.300}") from None


def _checked(document: Any) -> RankTable:
    if not isinstance(document, dict):
        raise ValueError("an object with server_list is wanted")
    version, status = document.get("version", VERSIONS[0]), document.get("status", "completed")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version!r:.40}; {' and '.join(VERSIONS)} are known")
    if status != "completed":
        raise ValueError(f"its status is {status!r:.40}: wait until its writer has set it to completed")
    servers = tuple(_server(entry, place) for place, entry in enumerate(_list(document, "server_list", "the table")))
    if "server_count" in document and _number(document, "server_count", "the table") != len(servers):
        raise ValueError(f"server_count is {document['server_count']!r:.40}, but {len(servers)} servers are listed")
    _check_ranks(servers)
    return RankTable(servers)


def _check_ranks(servers: tuple[Server, ...]) -> None:
    ranks = [rank for server in servers for rank in server.ranks]
    if len(ranks) > WORLD_SIZE_MAX:
        raise ValueError(f"it has {len(ranks)} ranks, more than the {WORLD_SIZE_MAX} that can be")
    twice = next((rank for rank, count in Counter(ranks).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"rank_id {twice} is given to two devices")
    missing = sorted(set(range(len(ranks))) - set(ranks))
    if missing:
        raise ValueError(f"rank_id {missing[0]} is missing: {len(ranks)} devices need the ranks 0 to {len(ranks) - 1}")
    by_address = sorted(servers, key=lambda server: server.address)
    if [s.address for s in sorted(servers, key=lambda server: min(server.ranks))] != [s.address for s in by_address]:
        raise ValueError("ranks have to grow in the order of the server_id as texts; HCCL does not start otherwise")


def _server(entry: Any, place: int) -> Server:
    where = f"server_list[{place}]"
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is no object")
    address = entry.get("server_id")
    if not isinstance(address, str) or not address or not address.isprintable():
        raise ValueError(f"{where} has no server_id, the address of the host")
    devices: list[int] = []
    ranks: list[int] = []
    for position, device in enumerate(_list(entry, "device", where)):
        spot = f"{where}.device[{position}]"
        if not isinstance(device, dict):
            raise ValueError(f"{spot} is no object")
        devices.append(_number(device, "device_id", spot))
        ranks.append(_number(device, "rank_id", spot))
    if len(set(devices)) < len(devices):
        raise ValueError(f"{where} lists one device_id twice")
    return Server(address, tuple(ranks), tuple(devices))


def _list(document: dict[str, Any], name: str, where: str) -> list[Any]:
    value = document.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} has no {name}")
    return value


def _number(document: dict[str, Any], name: str, where: str) -> int:
    value = document.get(name)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    if type(value) is int and 0 <= value < 10**9:
        return value
    raise ValueError(f"{name} of {where} is {value!r:.40}, not a number from 0 on")
