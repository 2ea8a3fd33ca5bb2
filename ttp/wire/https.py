"""TLS contexts for the job's servers that do not use gRPC: metrics and the web page.

Like the gRPC servers (``ttp.wire.tls``), these servers check the files of certificate, authority and revocation lists
at every connection, and use renewed ones. A problem with a renewed file is logged once, and the old files stay in use.
"""

from __future__ import annotations

import logging
import ssl
from typing import Any

from ttp.config import Config
from ttp.errors import ConfigError
from ttp.wire import tls

log = logging.getLogger("ttp.wire")


def server_context(config: Config, *, client_certificates: bool = True) -> ssl.SSLContext | None:
    """Return the TLS context of a server; None if this job does not encrypt.

    Args:
        config: has the paths of the files.
        client_certificates: whether clients must show a certificate of the job's authority, too.

    Raises:
        ConfigError: a file cannot be used; the text says what to do.
    """
    mine = tls.identity(config)
    if mine is None:
        return None
    made = _context(config, client_certificates)
    renewals = tls.Renewals(config, mine)
    newest, due = [made], [False]

    def greeted(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        """Make a new connection use the present files. The ssl module calls this at a client's first message."""
        due[0] = renewals.renewed() is not None or due[0]
        if due[0]:
            try:
                newest[0], due[0] = _context(config, client_certificates), False
                newest[0].sni_callback = greeted
            except (OSError, ConfigError) as problem:  # the files are just being replaced once more
                log.warning("the renewed certificate is used later, it cannot be read now: %s", problem)
        connection.context = newest[0]

    made.sni_callback = greeted
    return made


def _context(config: Config, client_certificates: bool) -> ssl.SSLContext:
    assert config.tls_cert is not None
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(config.tls_cert, config.tls_key, lambda: tls.key_password(config))
    if client_certificates:
        made.minimum_version, made.num_tickets = ssl.TLSVersion.TLSv1_3, 0  # a resumed session is not checked
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(config.tls_ca)
        if config.tls_crl:
            made.load_verify_locations(config.tls_crl)
            made.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_CHAIN
    return made
