"""Options of every gRPC channel and server of ttp, and the functions that open a channel to a controller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from ttp.wire import tls
from ttp.wire.access import TOKEN_KEY
from ttp.wire.address import target
from ttp.wire.v1 import controller_pb2_grpc as rpc

MESSAGE_BYTES_MAX = 256 << 20
"""Largest message in bytes that a server takes. The largest of a rank is the table of its pieces."""
ORDER_BYTES_MAX = (1 << 31) - 1
"""Largest message in bytes that a client takes: protobuf's own limit. The order to commit carries the tables of all
ranks, about 200 bytes for each tensor of each shard: a model of 800 tensors with Adam in 512 shards has 200 MiB.
"""


def _keepalive(after_ms: int, patience_ms: int) -> list[tuple[str, Any]]:
    """Return the options to probe a peer after ``after_ms`` of silence and to drop it ``patience_ms`` later."""
    patience = [("grpc.keepalive_timeout_ms", patience_ms), ("grpc.http2.ping_timeout_ms", patience_ms)]
    return [("grpc.keepalive_time_ms", after_ms), *patience]


_COMMON: list[tuple[str, Any]] = [
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),
]

CLIENT_OPTIONS = [
    *_COMMON,
    ("grpc.max_receive_message_length", ORDER_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    *_keepalive(5_000, 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
]

SERVER_OPTIONS = [
    *_COMMON,
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", ORDER_BYTES_MAX),
    *_keepalive(1_250, 8_750),  # probes early, so that the server's kernel notices a lost host, and gives up late
    ("grpc.so_reuseport", 0),  # two controllers on one port must not be possible
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server.max_pending_requests", 100_000),  # a thousand ranks connect at once
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
]


RELAY_OPTIONS = [("grpc.keepalive_time_ms", 2_000), ("grpc.keepalive_timeout_ms", 2_000)]
"""Options of a rank's channel to a relay of its host. A silent relay is given up early, because the rank can connect to
the controller directly.
"""


def open_channel(address: str, port: int, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
    """Open a channel to the controller, with a new connection that no other channel shares.

    Args:
        address: the controller's host.
        port: the controller's port.
        options: gRPC options to add to ``CLIENT_OPTIONS``; they replace options of the same name.

    Raises:
        ConfigError: TLS is configured and cannot be used; see ``ttp.wire.tls``.
    """
    instead = {name for name, _ in options}
    usual = [option for option in CLIENT_OPTIONS if option[0] not in instead]
    return tls.open_channel(target(address, port), [*usual, *options])


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that every request carries: the token, if there is one."""
    return ((TOKEN_KEY, token),) if token else ()


def details_of(problem: Exception) -> str:
    """Return what an error of gRPC says, in words: the details of the call, or the error itself."""
    return str(problem.details() if isinstance(problem, grpc.Call) else problem)


def stub(channel: grpc.Channel) -> rpc.ControllerStub:
    """Return a client of the controller's service."""
    return rpc.ControllerStub(channel)
