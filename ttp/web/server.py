"""The web server of ``ttp web``: uvicorn, with the TLS settings of the job."""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from ttp.config import Config
from ttp.errors import ConfigError
from ttp.launch.token_file import secret_in
from ttp.web.app import make_app
from ttp.web.looks import Looks
from ttp.wire.access import is_loopback
from ttp.wire.address import target
from ttp.wire.https import server_context

log = logging.getLogger("ttp.web")

CONNECTIONS_MAX = 200
END_S = 2
"""Seconds in which running requests have to finish when the server shuts down."""


@dataclass(frozen=True)
class Place:
    """Where and how to listen.

    Args:
        address: an address of this host.
        port: the port; 0 for any free one.
        token_file: file with the page's token; None to generate one.
        client_certificates: with TLS, whether browsers have to show a certificate too.
    """

    address: str
    port: int
    token_file: Path | None = None
    client_certificates: bool = True


def serve(looks: Looks, place: Place, config: Config) -> None:
    """Print the address of the page, and serve it until SIGINT or SIGTERM.

    Args:
        looks: observes the job.
        place: where and how to listen.
        config: the TLS settings, and the job's token, which cannot be the page's.

    Raises:
        ConfigError: the port is taken, or the token or the TLS settings cannot be used.
    """
    token = secrets.token_urlsafe(24)
    if place.token_file is not None:
        token = secret_in(place.token_file, f"--access-token-file {place.token_file}")
        if token == config.token:
            raise ConfigError("--access-token-file holds the job's own token, which can do more than read: use another")
    secured = server_context(config, client_certificates=place.client_certificates)
    listening = _listen(place)
    port = int(listening.getsockname()[1])
    with contextlib.closing(listening):
        app = make_app(looks, token, port, secured is not None, lambda: server.should_exit)
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=END_S,
        )
        settings.load()
        settings.ssl = secured
        server = uvicorn.Server(settings)
        scheme = "http" if secured is None else "https"
        shown = "" if place.token_file is not None else f"?token={token}"
        print(f"{scheme}://{target(place.address, port)}/{shown}", flush=True)
        if secured is None and not is_loopback(place.address):
            log.warning("this page and its token are sent unencrypted: set TTP_TLS_CERT to serve it by HTTPS")
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C waits for no thread whose storage hangs, as SIGTERM does
        server.run(sockets=[listening])


def _listen(place: Place) -> socket.socket:
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    try:
        return socket.create_server((place.address, place.port), family=family, backlog=CONNECTIONS_MAX)
    except (OSError, OverflowError, TypeError, UnicodeError) as problem:
        where = target(place.address, place.port)
        raise ConfigError(f"cannot listen at {where}: {problem}. Choose another with --listen HOST:PORT") from None
