"""Reads ``RANK_TABLE_FILE``: the hosts, devices and ranks of a job on Ascend (HCCL's JSON, versions 1.0, 1.2, 2.0).

``{"version": "1.0", "server_count": "1", "server_list": [{"server_id": "10.0.0.1", "device": [{"device_id": "0",
"device_ip": "192.1.27.6", "rank_id": "0"}]}], "status": "completed"}``. Numbers are JSON strings.

Version 2.0 names no hosts: ``{"version": "2.0", "status": "completed", "rank_count": 2, "rank_list": [{"rank_id": 0,
"local_id": 0, "device_id": 0, "level_list": []}, ...]}``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttp.core.layout import WORLD_SIZE_MAX
from ttp.errors import ConfigError

logger = logging.getLogger("ttp.launch")

VERSION_FILE = "version"
LOOK_S = 0.5
VERSIONS = ("1.0", "1.2", "2.0")
NO_HOSTS = VERSIONS[-1]
SIZE_MAX = 1 << 28
"""Maximum size of a table in bytes, far above that of any real table."""


@dataclass(frozen=True, slots=True)
class Server:
    """One host of a rank table.

    Args:
        address: its ``server_id``; empty: the table names no hosts.
        ranks: its ranks.
        devices: device id of each rank, at the same position.
    """

    address: str
    ranks: tuple[int, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankTable:
    """All ranks of a job, by host."""

    servers: tuple[Server, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return sum(len(server.ranks) for server in self.servers)

    @property
    def in_order(self) -> tuple[Server, ...]:
        """The hosts in the order of their lowest ranks."""
        return tuple(sorted(self.servers, key=lambda server: min(server.ranks)))

    @property
    def master(self) -> str:
        """Address of the host of rank 0; empty: the table names no hosts."""
        return self.server_of(0).address

    def server_of(self, rank: int) -> Server:
        """Return the host of ``rank``.

        Raises:
            ConfigError: there is no such rank.
        """
        for server in self.servers:
            if rank in server.ranks:
                return server
        raise ConfigError(f"rank {rank} is not in the rank table, which has ranks 0 to {self.world_size - 1}")

    def local_rank(self, rank: int) -> int:
        """Return the position of ``rank`` among the ranks of its host."""
        return sorted(self.server_of(rank).ranks).index(rank)


class UnfinishedError(ConfigError):
    """The table is missing, incomplete, or not ``completed``: its writer may still finish it."""


def read_rank_table(path: str | Path, local_size: int | None = None) -> RankTable:
    """Read and check the table at ``path``.

    Args:
        path: the JSON file.
        local_size: number of ranks on each host, for a table that names no hosts. None: a new host begins where a
            ``device_id`` repeats.

    Raises:
        UnfinishedError: the table is not complete yet; reading it later may succeed.
        ConfigError: it is absent, not JSON, not finished, or contradicts itself; the text says what to change.
    """
    from ttp.store.json_text import parse_json
    from ttp.store.plain_file import read_plain

    try:
        document = parse_json(read_plain(Path(path), SIZE_MAX))
    except FileNotFoundError as problem:
        unfinished = UnfinishedError if Path(path).parent.is_dir() else ConfigError
        raise unfinished(f"the rank table {path} cannot be read: {problem.strerror or problem}") from None
    except OSError as problem:
        raise ConfigError(f"the rank table {path} cannot be read: {problem.strerror or problem}") from None
    except ValueError as problem:
        raise UnfinishedError(f"the rank table {path} is not JSON: {problem!s:.200}") from None
    try:
        return _checked(document, local_size)
    except _NotYetError as problem:
        raise UnfinishedError(f"the rank table {path} is wrong: {problem!s:.300}") from None
    except ValueError as problem:
        raise ConfigError(f"the rank table {path} is wrong: {problem!s:.300}") from None


def table_version(path: str | Path) -> int:
    """Return the table's version from the file ``version`` beside it; -1: there is no such number.

    The writer raises this number each time it has written the table.
    """
    from ttp.store.plain_file import read_plain

    try:
        text = read_plain(Path(path).parent / VERSION_FILE, 64).strip()
    except (OSError, ValueError):
        return -1
    return int(text) if text.isdigit() else -1


def await_rank_table(
    path: str | Path, local_size: int | None, patience_s: float, newer_than: int = -1
) -> tuple[RankTable, int]:
    """Wait until the writer has completed the table, and read it. The file is opened anew each time: it may be a link.

    Args:
        path: the JSON file.
        local_size: see ``read_rank_table``.
        patience_s: seconds to wait.
        newer_than: wait also until ``table_version`` is larger than this; -1: accept any version.

    Returns:
        The table and its version. If it has not become newer when time is up, the old one, with a warning.

    Raises:
        UnfinishedError: time is up, and there is no complete table.
        ConfigError: the table contradicts itself.
    """
    deadline_s, logged = time.monotonic() + patience_s, ""
    while True:
        late = time.monotonic() >= deadline_s
        try:
            version = table_version(path)  # read before the table: the writer writes the table before its version
            table = read_rank_table(path, local_size)
            if newer_than < 0 or version > newer_than:
                return table, version
            why = f"the rank table {path} is still that of version {newer_than}"
            if late:
                logger.warning("%s; it is used as it is", why)
                return table, version
        except UnfinishedError as problem:
            if late:
                raise
            why = str(problem)
        if why != logged:
            logger.warning("waiting up to %.0f s for the rank table's writer: %s", deadline_s - time.monotonic(), why)
            logged = why
        time.sleep(min(LOOK_S, max(0.0, patience_s)))


class _NotYetError(ValueError):
    """The table's status is not ``completed``."""


def _checked(document: Any, local_size: int | None) -> RankTable:
    if not isinstance(document, dict):
        raise ValueError("expected an object with server_list")
    version, status = document.get("version", VERSIONS[0]), document.get("status", "completed")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version!r:.40}; {', '.join(VERSIONS)} are known")
    if status != "completed":
        raise _NotYetError(f"its status is {status!r:.40}: wait until its writer has set it to completed")
    if version == NO_HOSTS:
        return RankTable(_hosts(document, local_size))
    listed = enumerate(_list(document, "server_list", "the table"))
    servers = tuple(_server(entry, f"server_list[{place}]") for place, entry in listed)
    if "server_count" in document and _number(document, "server_count", "the table") != len(servers):
        raise ValueError(f"server_count is {document['server_count']!r:.40}, but {len(servers)} servers are listed")
    _check_ranks(servers)
    by_address = sorted(servers, key=lambda server: server.address)
    if [s.address for s in sorted(servers, key=lambda server: min(server.ranks))] != [s.address for s in by_address]:
        raise ValueError("in the order of server_id as text, ranks have to increase; otherwise HCCL does not start")
    return RankTable(servers)


def _hosts(document: dict[str, Any], local_size: int | None) -> tuple[Server, ...]:
    """Return the hosts of a table that does not name them. Consecutive ranks belong to one host."""
    ranks, devices = _devices(document, "rank_list", "the table")
    if "rank_count" in document and _number(document, "rank_count", "the table") != len(ranks):
        raise ValueError(f"rank_count is {document['rank_count']!r:.40}, but {len(ranks)} ranks are listed")
    hosts: list[list[tuple[int, int]]] = []
    seen: set[int] = set()
    for rank, device in sorted(zip(ranks, devices, strict=True)):
        if not hosts or (len(seen) == local_size if local_size else device in seen):
            hosts.append([])
            seen = set()
        if device in seen:
            raise ValueError(
                f"device_id {device} repeats at rank_id {rank}: a host has fewer than {local_size} devices"
            )
        seen.add(device)
        hosts[-1].append((rank, device))
    servers = tuple(Server("", tuple(r for r, _ in host), tuple(d for _, d in host)) for host in hosts)
    _check_ranks(servers)
    return servers


def _check_ranks(servers: tuple[Server, ...]) -> None:
    ranks = [rank for server in servers for rank in server.ranks]
    if len(ranks) > WORLD_SIZE_MAX:
        raise ValueError(f"it has {len(ranks)} ranks, more than the maximum of {WORLD_SIZE_MAX}")
    twice = next((rank for rank, count in Counter(ranks).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"rank_id {twice} is given to two devices")
    missing = sorted(set(range(len(ranks))) - set(ranks))
    if missing:
        raise ValueError(f"rank_id {missing[0]} is missing: {len(ranks)} devices need the ranks 0 to {len(ranks) - 1}")


def _server(entry: Any, where: str) -> Server:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is not an object")
    address = entry.get("server_id")
    if not isinstance(address, str) or not address or not address.isprintable():
        raise ValueError(f"{where} has no server_id, the address of the host")
    ranks, devices = _devices(entry, "device", where)
    if len(set(devices)) < len(devices):
        raise ValueError(f"{where} lists one device_id twice")
    return Server(address, ranks, devices)


def _devices(holder: dict[str, Any], name: str, where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks and devices of a list, by position."""
    devices: list[int] = []
    ranks: list[int] = []
    for position, device in enumerate(_list(holder, name, where)):
        spot = f"{where}.{name}[{position}]"
        if not isinstance(device, dict):
            raise ValueError(f"{spot} is not an object")
        devices.append(_number(device, "device_id", spot))
        ranks.append(_number(device, "rank_id", spot))
    return tuple(ranks), tuple(devices)


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
    raise ValueError(f"{name} of {where} is {value!r:.40}, not a number of at least 0")
