"""The job's TLS for servers that are not gRPC's: metrics and the web page.

As gRPC's servers do (``ttp.wire.tls``), they look at their files again for every connection and use renewed ones:
certificate, authority and revocation lists. A problem with a renewed file is logged once, and the last usable one
stays.
"""

from __future__ import annotations

import ssl
from typing import Any

from ttp.config import Config
from ttp.wire import tls


def server_context(config: Config, *, client_certificates: bool = True) -> ssl.SSLContext | None:
    """Return the TLS context of a server; None if this job does not encrypt.

    Args:
        config: names the files.
        client_certificates: whether clients must show a certificate of the job's authority too.

    Raises:
        ConfigError: a file cannot be used; the text says what to do.
    """
    mine = tls.identity(config)
    if mine is None:
        return None
    made = _context(config, client_certificates)
    renewals = tls.Renewals(config, mine)
    newest = [made]

    def greeted(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        """Switch a new connection to the files' present content. Called on the first message of a client."""
        if renewals.renewed() is not None:
            newest[0] = _context(config, client_certificates)
            newest[0].sni_callback = greeted
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
