"""The job's TLS for servers that are not gRPC's: metrics and the web page.

As those of gRPC do (``ttp.wire.tls``) they look at their files again for every connection, and use what was renewed
there: certificate, authority and revocation lists. What cannot be used is said once, and the last one that could stays.
"""

from __future__ import annotations

import ssl
from typing import Any

from ttp.config import Config
from ttp.wire import tls


def server_context(config: Config, *, client_certificates: bool = True) -> ssl.SSLContext | None:
    """What a server wraps its connections with; None: this job does not encrypt.

    Args:
        config: names the files.
        client_certificates: whether clients have to show one of the job's authority, too.

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
        """The first word of a client: from here on the connection goes by what the files hold now."""
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
        made.minimum_version, made.num_tickets = ssl.TLSVersion.TLSv1_3, 0  # a session resumed is not judged again
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(config.tls_ca)
        if config.tls_crl:
            made.load_verify_locations(config.tls_crl)
            made.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_CHAIN
    return made
