"""Access control for the gRPC servers of a job: which address a server listens on, and whose requests it serves.

The same rules hold for every gRPC server of a job. A request must carry the job's token and, with TLS, its connection
must show a valid certificate of the job's authority that was not revoked. A server without a token listens on loopback
and serves only processes of its own user and of root: within one host the kernel tells which user owns a connection.
With ``TTP_INSECURE=1`` a server serves every client.

To add a service, make ``grpc.server(..., interceptors=guards(config))`` or ``grpc.aio.server(..., interceptors=
aio_guards(config))``, then call ``tls.add_port(server, target(listening_address(config), port))``. Its clients add
``channel.metadata(config.token)`` to each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from ttp.config import Config
from ttp.errors import ConfigError
from ttp.wire import tls
from ttp.wire.address import resolve
from ttp.wire.sock_diag import owner_of_connection
from ttp.wire.sockets import parse

log = logging.getLogger("ttp.access")

TOKEN_KEY = "ttp-token"
LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"
OPEN_TO_ALL = "/grpc.health.v1.Health/"
"""Prefix of the methods of an asyncio server that need no token: health checks reveal only that a process is alive.

Their handlers must not read the request, which may be large.
"""
NO_TOKEN = (
    "the request does not carry this job's token: set TTP_TOKEN or TTP_TOKEN_FILE to what the job was started with"
)

_ESTABLISHED = "01"


def is_loopback(address: str) -> bool:
    """Return whether ``address``, a host name or an IP address, can only be reached from this host."""
    try:
        found = resolve(address.strip("[]"), None)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback for *_, where in found)


def listening_address(config: Config) -> str:
    """Return the address that a service binds to: ``TTP_BIND``, else every address, or loopback if there is no token.

    Raises:
        ConfigError: ``TTP_BIND`` is an address that other hosts reach, and neither a token nor ``TTP_INSECURE`` is set.
    """
    if config.token or config.insecure:
        return config.bind or EVERYWHERE
    if config.bind and not is_loopback(config.bind):
        raise ConfigError(
            f"TTP_BIND={config.bind} is reached from other hosts, and the job has no token: set TTP_TOKEN_FILE (or "
            "TTP_TOKEN) to the same secret for every process of the job; TTP_INSECURE=1 serves everybody"
        )
    return config.bind or LOOPBACK


@functools.cache
def warn_if_open(insecure: bool) -> None:
    """Warn, once in each process, if the job serves every client (``insecure``)."""
    if insecure:
        log.warning(
            "TTP_INSECURE=1 and no token: everybody who reaches a port of this job can end it, save it and read its "
            "messages. Set TTP_TOKEN_FILE instead"
        )


class AccessCheck:
    """Decides which requests a server accepts.

    Args:
        config: the job's configuration, of which ``token`` and ``insecure`` are used.
    """

    def __init__(self, config: Config) -> None:
        mine = tls.identity()
        self._token = config.token.encode()
        self._guard = None if mine is None else mine.guard
        self._asks_kernel = not config.token and not config.insecure
        self.looks_at_peers = self._guard is not None or self._asks_kernel
        """Whether ``about_peer`` can refuse a request: there are revocation lists, or there is no token."""
        warn_if_open(not config.token and config.insecure)

    def about_token(self, metadata: Iterable[tuple[str, Any]] | None) -> str:
        """Return why the request is refused because of its token; empty: it is not."""
        given = str(dict(metadata or ()).get(TOKEN_KEY, "")).encode()
        return "" if not self._token or hmac.compare_digest(given, self._token) else NO_TOKEN

    def about_peer(self, peer: str, auth_context: Mapping[str, list[bytes]]) -> str:
        """Return why the request is refused because of its certificate or its user; empty: it is not.

        May block, as it may run openssl or read the kernel's list of connections.

        Args:
            peer: the caller's address as gRPC writes it, ``ipv4:127.0.0.1:4711``.
            auth_context: gRPC's authentication context of the call.
        """
        if self._guard is not None and (problem := self._guard.caller_problem(auth_context)):
            return f"the certificate of this request: {problem}"
        if self._asks_kernel and owner_of(peer) not in (None, 0, os.getuid()):
            return (
                "this job has no token, and the request is of another user than the job's: set TTP_TOKEN or "
                "TTP_TOKEN_FILE for every process of the job"
            )
        return ""


UNKNOWN = -1
"""User id for a connection that no process owns: it is closed, or belongs to another network namespace."""


def owner_of(peer: str) -> int | None:
    """Return the user id of the process of this host that opened a connection.

    Args:
        peer: the connection's address as gRPC writes it.

    Returns:
        The user id; ``UNKNOWN`` if no process of this host has the connection open; None if the system cannot tell
        (``/proc/net`` is missing).
    """
    known = parse(peer)
    if known is None or not (address := ipaddress.ip_address(known[0])).is_loopback:
        return UNKNOWN
    port = known[1]
    for served_at, served in tuple(tls.SERVED):
        with contextlib.suppress(ValueError):  # it is a name
            owner = owner_of_connection((address, port), (ipaddress.ip_address(served_at), served))
            if owner is not None:
                return owner
    told, names = False, _as_in_proc(address, port)
    for name in ("tcp", "tcp6"):  # the kernel takes some milliseconds for each table
        lines = _connections(f"/proc/net/{name}", names)
        told |= lines is not None
        for fields in lines or ():
            local, state, uid, inode = fields[1], fields[3], fields[7], fields[9]
            if state == _ESTABLISHED and inode != "0" and local in names:
                return int(uid)
    return UNKNOWN if told else None


def _connections(table: str, names: Iterable[str]) -> list[list[str]] | None:
    """Return the fields of the lines of ``table`` that contain one of ``names``; None if the table cannot be read.

    All other lines are skipped unparsed: a job of many ranks has thousands of them.
    """
    try:
        with Path(table).open() as lines:
            return [line.split() for line in lines if any(name in line for name in names)]
    except OSError:
        return None


def _as_in_proc(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> tuple[str, ...]:
    """Return address and port as ``/proc/net/tcp`` and ``tcp6`` write them: 32-bit words in the host's byte order."""

    def words(packed: bytes) -> str:
        numbers = (int.from_bytes(packed[i : i + 4], "big") for i in range(0, len(packed), 4))
        return "".join(f"{socket.htonl(number):08X}" for number in numbers)

    mapped = [address.packed] if address.version == 6 else [address.packed, b"\0" * 10 + b"\xff\xff" + address.packed]
    return tuple(f"{words(packed)}:{port:04X}" for packed in mapped)


def guards(config: Config) -> list[grpc.ServerInterceptor]:
    """Return interceptors that make a threaded gRPC server refuse the requests that ``AccessCheck`` refuses.

    Raises:
        ConfigError: TLS is configured and cannot be used.
    """
    return [_Guard(AccessCheck(config))]


def aio_guards(config: Config) -> list[grpc.aio.ServerInterceptor]:
    """Return interceptors that make an asyncio gRPC server refuse the requests that ``AccessCheck`` refuses.

    Raises:
        ConfigError: TLS is configured and cannot be used.
    """
    return [_AioGuard(AccessCheck(config))]


_MAKERS = {
    (False, False): (grpc.unary_unary_rpc_method_handler, "unary_unary"),
    (False, True): (grpc.unary_stream_rpc_method_handler, "unary_stream"),
    (True, False): (grpc.stream_unary_rpc_method_handler, "stream_unary"),
    (True, True): (grpc.stream_stream_rpc_method_handler, "stream_stream"),
}


def _like(handler: Any, behaviour: Callable[[Any], Any]) -> Any:
    """Return a handler of the same kind as ``handler`` that calls ``behaviour(its function)``."""
    make, name = _MAKERS[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(behaviour(getattr(handler, name)), handler.request_deserializer, handler.response_serializer)


class _Guard(grpc.ServerInterceptor):
    def __init__(self, check: AccessCheck) -> None:
        self._check = check

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Refuse a request without the token now, and wrap the handler so that the caller is checked before it runs."""
        handler = continuation(handler_call_details)
        if handler is None:
            return handler
        if problem := self._check.about_token(handler_call_details.invocation_metadata):

            def refuse(requests: Any, context: Any) -> Iterator[Any]:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, problem)
                yield  # makes this a generator

            return grpc.stream_stream_rpc_method_handler(refuse)  # fits any method, because it reads no request
        if not self._check.looks_at_peers:
            return handler

        def behaviour(inner: Any) -> Any:
            def unary(request: Any, context: Any) -> Any:
                self._admit(context)
                return inner(request, context)

            def stream(request: Any, context: Any) -> Iterator[Any]:
                self._admit(context)
                yield from inner(request, context)

            return stream if handler.response_streaming else unary

        return _like(handler, behaviour)

    def _admit(self, context: Any) -> None:
        if problem := self._check.about_peer(context.peer(), context.auth_context()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, problem)


class _AioGuard(grpc.aio.ServerInterceptor):
    def __init__(self, check: AccessCheck) -> None:
        self._check = check

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Refuse a request without the token now, and wrap the handler so that the caller is checked before it runs."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_TO_ALL):
            return handler
        if problem := self._check.about_token(handler_call_details.invocation_metadata):

            async def refuse(requests: Any, context: Any) -> AsyncIterator[Any]:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, problem)
                yield  # makes this a generator

            return grpc.stream_stream_rpc_method_handler(refuse)  # fits any method, because it reads no request
        if not self._check.looks_at_peers:
            return handler

        def behaviour(inner: Any) -> Any:
            async def unary(request: Any, context: Any) -> Any:
                await self._admit(context)
                return await inner(request, context)

            async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
                await self._admit(context)
                async with contextlib.aclosing(inner(request, context)) as answers:
                    async for answer in answers:
                        yield answer

            return stream if handler.response_streaming else unary

        return _like(handler, behaviour)

    async def _admit(self, context: Any) -> None:
        problem = await asyncio.to_thread(self._check.about_peer, context.peer(), context.auth_context())
        if problem:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, problem)
