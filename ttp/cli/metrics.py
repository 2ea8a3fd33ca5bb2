"""``ttp metrics``: prints the numbers of a running job, once, in the format of Prometheus."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttp.cli.connection import Address, Port, Token, connected, find
from ttp.cli.output import fields_of
from ttp.errors import ConfigError, ToldAs, UsageError

if TYPE_CHECKING:
    from ttp.controller.metrics import JobNumbers
    from ttp.wire.v1 import controller_pb2 as pb

TextFile = Annotated[
    Path | None,
    typer.Option("--textfile", help="Write to this file, atomically, for node_exporter. Default: standard output."),
]


def metrics(*, textfile: TextFile = None, address: Address = None, port: Port = None, token: Token = None) -> None:
    """Print the current numbers of a running job in the format of Prometheus. Counters over time: TTP_METRICS_PORT.

    Needs prometheus-client: pip install 'ttp-ft[metrics]'.
    """
    if textfile is not None and textfile.exists() and not textfile.is_file():  # a device would be replaced, too
        raise UsageError(f"{textfile} is not a regular file")
    try:
        from prometheus_client import CollectorRegistry, generate_latest, write_to_textfile
    except ImportError:
        raise ConfigError("ttp metrics needs prometheus-client: pip install 'ttp-ft[metrics]'") from None
    from ttp.controller.metrics import Collector

    with connected(find(address, port, token)) as client:
        now = client.status()
    collector, registry = Collector(), CollectorRegistry()
    collector.latest = seen(now)
    registry.register(collector)
    if textfile is None:
        sys.stdout.write(generate_latest(registry).decode())
        return
    with ToldAs(ConfigError, f"{textfile} cannot be written", OSError):
        write_to_textfile(str(textfile), registry)


def seen(status: pb.GetStatusResponse) -> JobNumbers:
    """Convert a status into the numbers that the controller itself would export."""
    from ttp.controller.metrics import RANKS_MAX, JobNumbers, RankNumbers

    speaking = [rank for rank in status.ranks if rank.state in ("live", "frozen", "broken")]
    versions = [rank.version for rank in speaking] or [rank.version for rank in status.ranks if rank.host]
    here = {rank.rank for rank in speaking}
    return JobNumbers(
        **fields_of(status, "stage", "run_id", "framework", "term", "incarnation"),
        leads=bool(status.world_size),
        standbys=len(status.standbys),
        expected=status.world_size,
        states=Counter(rank.state for rank in status.ranks),
        newest=max(versions, default=0),
        oldest=min(versions, default=0),
        copied=status.copied_version if status.HasField("copied_version") else None,
        silent_s=max((rank.silent_s for rank in speaking), default=0.0),
        replicas_min=min((len(here.intersection(group.ranks)) for group in status.groups), default=None),
        ranks=tuple(
            RankNumbers(rank.rank, rank.host, rank.version, rank.silent_s) for rank in status.ranks if rank.host
        )
        if status.world_size <= RANKS_MAX
        else (),
    )
