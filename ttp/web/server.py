"""Listens for browsers: uvicorn, with the TLS of the job."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from ttp.config import Config
from ttp.errors import ConfigError
from ttp.launch.token_file import secret_in
from ttp.web.app import make_app
from ttp.web.looks import Looks
from ttp.wire import tls
from ttp.wire.access import is_loopback
from ttp.wire.address import target

log = logging.getLogger("ttp.web")

CONNECTIONS_MAX = 200
END_S = 2
"""How long requests that run may take once the server is told to end."""


@dataclass(frozen=True)
class Place:
    """Where and how to listen.

    Args:
        address: an address of this host.
        port: 0: any that is free.
        token_file: the page's token; None: one is made.
        client_certificates: with TLS, whether browsers have to show one too.
    """

    address: str
    port: int
    token_file: Path | None = None
    client_certificates: bool = True


def serve(looks: Looks, place: Place, config: Config) -> None:
    """Serve until SIGINT or SIGTERM. Prints the address to open.

    Raises:
        ConfigError: the port is taken, or the token or the TLS settings cannot be used.
    """
    token = secrets.token_urlsafe(24)
    if place.token_file is not None:
        token = secret_in(place.token_file, f"--access-token-file {place.token_file}")
    identity = tls.identity(config)
    listening = _listen(place)
    port = int(listening.getsockname()[1])
    with contextlib.closing(listening):
        app = make_app(looks, token, port, identity is not None, lambda: server.should_exit)
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=END_S,
            **(_tls(config, place) if identity is not None else {}),
        )
        settings.load()
        if config.tls_crl and settings.ssl is not None and place.client_certificates:
            settings.ssl.load_verify_locations(config.tls_crl)
            settings.ssl.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
        server = uvicorn.Server(settings)
        scheme = "http" if identity is None else "https"
        shown = "" if place.token_file is not None else f"?token={token}"
        print(f"{scheme}://{target(place.address, port)}/{shown}", flush=True)
        if identity is None and not is_loopback(place.address):
            log.warning("who listens to the network can read this page and its token: TTP_TLS_CERT encrypts it")
        server.run(sockets=[listening])


def _listen(place: Place) -> socket.socket:
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    try:
        return socket.create_server((place.address, place.port), family=family, backlog=CONNECTIONS_MAX)
    except (OSError, OverflowError) as problem:
        where = target(place.address, place.port)
        raise ConfigError(f"cannot listen at {where}: {problem}. Choose another one by --listen HOST:PORT") from None


def _tls(config: Config, place: Place) -> dict[str, Any]:
    """The files of the job; like its services this one asks for a certificate of the job's authority."""
    password = config.tls_key_password
    return {
        "ssl_certfile": config.tls_cert,
        "ssl_keyfile": config.tls_key,
        "ssl_keyfile_password": Path(password).read_text().strip() if password else None,
        "ssl_ca_certs": config.tls_ca if place.client_certificates else None,
        "ssl_cert_reqs": ssl.CERT_REQUIRED if place.client_certificates else ssl.CERT_NONE,
    }
