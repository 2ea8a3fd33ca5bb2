"""Checks certificates against revocation lists, which make a stolen certificate invalid before it expires.

gRPC for Python does not support revocation lists, so they are checked beside it. A server has openssl check the
certificate of each caller before it serves the request. A client first makes a TLS handshake of its own with the
server, which checks the server's certificate. Then it lets gRPC accept only this one certificate, so that no other
server can take the place of the checked one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import ssl
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ttp.wire.address import connect, split

log = logging.getLogger("ttp.tls")

REACH_S = 1.0
"""Seconds that a server may take to answer the handshake; then the client tries another server."""
OPENSSL_S = 30.0
AGAIN_S = 600.0
"""Seconds for which the result of a check is cached: lists and certificates expire. A renewed list is used at once."""

_WHY = re.compile(r"lookup: ?(.+)")


@dataclass(frozen=True, slots=True)
class Guard:
    """Checks certificates against revocation lists.

    Args:
        lists: PEM file with the revocation list of each authority that has signed a certificate.
        authority: PEM file of the authority.
        own: PEM file with the certificate of this process, followed by intermediate certificates.
        key: PEM file with the key of that certificate.
        password: the password of the key; empty if it is not encrypted.
    """

    lists: Path
    authority: Path
    own: Path
    key: Path
    password: str

    def problem(self, certificate: bytes) -> str:
        """Return why a certificate (PEM) is not valid; empty if it is. The first check takes some 20 ms."""
        try:
            return _judged(certificate, self, _changed(self.lists), int(time.time() // AGAIN_S))
        except (OSError, subprocess.SubprocessError) as problem:
            return f"TTP_TLS_CRL is set, and openssl cannot judge certificates: {problem}"

    def caller_problem(self, auth_context: Mapping[str, list[bytes]]) -> str:
        """Return why the certificate of a gRPC caller is not valid; empty if it is."""
        shown = auth_context.get("x509_pem_cert", [])
        return self.problem(shown[0]) if shown else "no certificate was shown"

    def believed(self, where: str) -> bytes:
        """Return the certificate (PEM) that the server at ``where`` (``host:port``) shows; empty if none is valid."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # gRPC checks the name
        context.set_alpn_protocols(["h2"])
        try:
            context.load_verify_locations(cafile=str(self.authority))
            context.load_verify_locations(cafile=str(self.lists))
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN
            with contextlib.suppress(OSError):  # being renewed: the server shows its certificate all the same (TLS 1.3)
                context.load_cert_chain(self.own, self.key, password=lambda: self.password)
            with connect(*split(where), REACH_S) as plain:
                with context.wrap_socket(plain) as secure:
                    shown = secure.getpeercert(binary_form=True)
        except ssl.SSLCertVerificationError as problem:
            _say_rejected(where, problem.verify_message, int(time.time() // AGAIN_S))
        except OSError as problem:  # covers ssl.SSLError
            log.debug("the server at %s showed no certificate: %s", where, problem)
        else:
            return ssl.DER_cert_to_PEM_cert(shown or b"").encode()
        return b""


@functools.lru_cache(maxsize=100)  # a client that finds no other server comes back in seconds
def _say_rejected(where: str, why: str, _time: int) -> None:
    log.error("the certificate of the server at %s was rejected: %s", where, why)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0  # openssl reports the problem


@functools.lru_cache(maxsize=10_000)  # every rank may have a certificate of its own; calls that raise are not cached
def _judged(certificate: bytes, guard: Guard, _changed: int, _time: int) -> str:
    command = ["openssl", "verify", "-crl_check_all", "-CAfile", str(guard.authority), "-CRLfile", str(guard.lists)]
    done = subprocess.run(
        [*command, "-untrusted", str(guard.own)], input=certificate, capture_output=True, timeout=OPENSSL_S, check=False
    )
    if done.returncode == 0:
        return ""
    said = done.stderr.decode(errors="replace").strip() or "openssl rejects it"
    why = _WHY.search(said)
    return f"{why[1] if why else said.splitlines()[0]} (by the list TTP_TLS_CRL={guard.lists})"
