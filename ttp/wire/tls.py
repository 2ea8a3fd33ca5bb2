"""Mutual TLS between the processes of a job: both sides of a connection show a certificate.

Every process of a job may become its controller, so all have the same kind of identity: a certificate of the job's own
authority, its key, and that authority. A server accepts every client with a certificate of the authority. A client also
requires that the server's certificate has the same name as its own (the first DNS name, else the common name). The name
is that of the job, because the addresses of hosts change.

The identity comes from ``TTP_TLS_CERT``, ``TTP_TLS_KEY`` and ``TTP_TLS_CA``. Both sides check these files for every
connection, so that the next connection uses a renewed certificate.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import ssl
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttp.config import Config
from ttp.errors import ConfigError, ToldAs, strerror_of
from ttp.wire.address import connect
from ttp.wire.revocation import OPENSSL_S, Guard

if TYPE_CHECKING:
    import grpc

log = logging.getLogger("ttp.tls")

WARN_DAYS = 30
"""Days of validity below which a certificate causes a warning in the log."""
DAY_S = 86_400
GREETING_S = 2.0
"""Seconds that a server may take to accept the connection of ``speaks_tls``."""
_UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification", "is not in peer certificate")
"""Parts of gRPC's descriptions, the last of old ones, of a certificate that is not believed."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The certificate of a process, its key, and the authority that the process trusts.

    Args:
        certificate: the process' own certificate, then intermediate ones (PEM).
        key: the key of the certificate (PEM, not encrypted).
        authority: the certificate of the authority (PEM).
        name: the name that a server's certificate must have.
        guard: checks certificates against revocation lists; None without such lists.
        lists: modification time of these lists, in nanoseconds.
    """

    certificate: bytes
    key: bytes
    authority: bytes
    name: str
    guard: Guard | None = None
    lists: int = 0


def identity(config: Config | None = None) -> Identity | None:
    """Return the identity of this process; None if connections are not encrypted.

    Args:
        config: has the paths of the files; None: the configuration from the environment.

    Raises:
        ConfigError: the identity cannot be used; the text says what to do.
    """
    config = config or Config.from_env()
    files = {"TTP_TLS_CERT": config.tls_cert, "TTP_TLS_KEY": config.tls_key, "TTP_TLS_CA": config.tls_ca}
    if not any(files.values()):
        return None
    missing = [name for name, path in files.items() if not path]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be set too: TLS needs a certificate, its key and the authority"
        )
    paths = tuple(Path(path) for path in files.values() if path)
    password = Path(config.tls_key_password) if config.tls_key_password else None
    lists = Path(config.tls_crl) if config.tls_crl else None
    revoked = None if lists is None else (lists, _changed("TTP_TLS_CRL", lists))
    return _loaded(*((path, _changed(name, path)) for name, path in zip(files, paths, strict=True)), password, revoked)


def key_password(config: Config) -> str:
    """Return the password of the key; empty if the key is not encrypted.

    Raises:
        ConfigError: the file cannot be read.
    """
    return _password(Path(config.tls_key_password) if config.tls_key_password else None)


def secured() -> bool:
    """Return whether this process is configured to speak TLS."""
    config = Config.from_env()
    return bool(config.tls_cert or config.tls_key or config.tls_ca)


def open_channel(where: str, options: list[tuple[str, Any]]) -> grpc.Channel:
    """Open a channel to ``host:port``, encrypted if this process has an identity.

    Once a channel was opened, a problem with a renewed file is logged once, and the old certificate stays in use.

    Raises:
        ConfigError: see ``identity``.
    """
    import grpc

    mine = _present()
    if mine is None:
        return grpc.insecure_channel(where, options=options)
    believed = mine.authority
    if mine.guard is not None:  # a channel that trusts its own certificate only connects to such a server, or to none
        believed = mine.guard.believed(where) or mine.certificate
    credentials = grpc.ssl_channel_credentials(believed, mine.key, mine.certificate)
    return grpc.secure_channel(
        where, credentials, options=[*options, ("grpc.ssl_target_name_override", mine.name)]
    )  # fmt: skip


_clients: dict[tuple[str | None, ...], Renewals] = {}
"""What the clients of this process show, by the paths of the files."""


def _present() -> Identity | None:
    config = Config.from_env()
    files = config.tls_cert, config.tls_key, config.tls_ca, config.tls_key_password, config.tls_crl
    if files not in _clients:
        _clients[files] = Renewals(config, identity(config))
    _clients[files].renewed()
    return _clients[files].mine


SERVED: set[tuple[str, int]] = set()
"""Host and port of each service of this process."""


def add_port(server: Any, where: str) -> int:
    """Make a gRPC server, threaded or asyncio, listen at ``where``. Return the port.

    With TLS the server checks its files for every connection and uses a renewed certificate, because a job may outlive
    its certificate. A problem with a renewed file is logged once, and the old certificate stays in use.

    Raises:
        ConfigError: see ``identity``.
        RuntimeError: the port cannot be bound.
    """
    import grpc

    config = Config.from_env()
    mine = identity(config)
    if mine is None:
        return _noted(where, server.add_insecure_port(where))
    renewals = Renewals(config, mine)

    def again() -> Any:
        """Return the certificate to use from now on; None keeps the present one. Never raises, as gRPC requires."""
        renewed = renewals.renewed()
        return None if renewed is None else _as_grpc(renewed)

    credentials = grpc.dynamic_ssl_server_credentials(_as_grpc(mine), again, require_client_authentication=True)
    return _noted(where, server.add_secure_port(where, credentials))


def _noted(where: str, port: int) -> int:
    SERVED.add((where.rpartition(":")[0].strip("[]"), port))
    return port


class Renewals:
    """The identity of a server, or of the clients of this process, read again for each connection.

    Args:
        config: has the paths of the files.
        mine: the present identity; None: connections are not encrypted.
    """

    def __init__(self, config: Config, mine: Identity | None) -> None:
        self._config, self.mine, self._problem = config, mine, ""

    def renewed(self) -> Identity | None:
        """Return the identity to use from now on; None keeps the present one. Never raises."""
        try:
            mine = identity(self._config)
        except Exception as problem:
            if str(problem) != self._problem:
                log.error("the renewed certificate cannot be used, the old one stays in use: %s", problem)
            self._problem = str(problem)
            return None
        self._problem = ""
        if mine is None or mine == self.mine:
            return None
        log.info("using the renewed certificate, authority or revocation list from now on")
        self.mine = mine
        return mine


def _as_grpc(mine: Identity) -> grpc.ServerCertificateConfiguration:
    import grpc

    return grpc.ssl_server_certificate_configuration([(mine.key, mine.certificate)], mine.authority)


def diagnose(address: str, port: int, details: str) -> str | None:
    """Return what is wrong with the encryption of a failed connection; None if the failure has another reason.

    Args:
        address: the server's host.
        port: the server's port.
        details: gRPC's description of the failure.
    """
    where = f"{address}:{port}"
    mine = secured()
    if mine and any(reason in details for reason in _UNTRUSTED):
        return (
            f"the certificate of the controller at {where} is not signed by the authority in TTP_TLS_CA, is out of "
            "date, was revoked (TTP_TLS_CRL), or has another name than this process' own: give all processes of the "
            "job certificates of one authority and one name"
        )
    theirs = speaks_tls(address, port)
    if theirs is None:
        return None
    if theirs and not mine:
        return (
            f"the server at {where} uses TLS, and this process does not: set TTP_TLS_CERT, TTP_TLS_KEY and "
            "TTP_TLS_CA to the job's"
        )
    if mine and not theirs:
        return (
            f"the server at {where} does not use TLS, and this process does: set TTP_TLS_CERT, TTP_TLS_KEY and "
            "TTP_TLS_CA for every process of the job, or for none"
        )
    if mine and ("handshake" in details.lower() or "ssl" in details.lower()):
        return f"the controller at {where} does not take this process' certificate: is it of the job's authority?"
    return None


def speaks_tls(address: str, port: int) -> bool | None:
    """Return whether the server at ``address`` answers a TLS handshake; None if no server answers at all."""
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    asking.set_alpn_protocols(["h2"])
    try:
        with connect(address, port, GREETING_S) as plain, asking.wrap_socket(plain):
            return True
    except ssl.SSLError as problem:
        return "ALERT" in (problem.reason or "")  # an alert is a TLS answer too
    except ConnectionResetError:  # a server without TLS does so, and one that has just died
        with contextlib.suppress(OSError), connect(address, port, GREETING_S):
            return False
        return None
    except OSError:
        return None


# ------------------------------------------------------------------------------------------------------------- reading


def _changed(setting: str, path: Path) -> int:
    with ToldAs(ConfigError, f"{setting}={path} cannot be read", OSError, reason=strerror_of):
        return path.stat().st_mtime_ns


_File = tuple[Path, int]


@functools.lru_cache(maxsize=4)
def _loaded(certificate: _File, key: _File, authority: _File, password: Path | None, revoked: _File | None) -> Identity:
    """Read and check an identity. Cached by the files' modification times, so that renewed files are read again."""
    (cert, _), (own, _), (ca, _) = certificate, key, authority
    secret = _password(password)
    shown = _shake_hands(cert, own, ca, secret)
    name = _name(shown)
    if not name:
        raise ConfigError(f"TTP_TLS_CERT={cert} has no name: make it with a DNS name or a common name")
    left_days = (ssl.cert_time_to_seconds(str(shown["notAfter"])) - time.time()) / DAY_S
    if left_days < WARN_DAYS:
        log.warning("TTP_TLS_CERT=%s ends in %d days, on %s: renew it", cert, left_days, shown["notAfter"])
    guard = None if revoked is None else Guard(revoked[0], ca, cert, own, secret)
    if guard is not None and (problem := guard.problem(_read(cert))):
        raise ConfigError(f"TTP_TLS_CERT={cert} will be refused by the other processes of the job: {problem}")
    return Identity(_read(cert), _plain_key(own, secret), _read(ca), name, guard, revoked[1] if revoked else 0)


def _password(path: Path | None) -> str:
    if path is None:
        return ""
    with ToldAs(ConfigError, f"TTP_TLS_KEY_PASSWORD={path} cannot be read", OSError, UnicodeDecodeError):
        return path.read_text().strip("\r\n")


def _read(path: Path) -> bytes:
    with ToldAs(ConfigError, f"{path} cannot be read", OSError, reason=strerror_of):
        return path.read_bytes()


def _shake_hands(cert: Path, key: Path, ca: Path, password: str) -> dict[str, Any]:
    """Make a TLS handshake of this identity with itself, in memory. Return the content of its certificate.

    Raises:
        ConfigError: a peer would not accept the identity; the text says why.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    server.verify_mode = ssl.CERT_REQUIRED
    for context in (server, client):
        with ToldAs(ConfigError, f"TTP_TLS_CA={ca} holds no certificate that can be read", ssl.SSLError, OSError):
            context.load_verify_locations(cafile=str(ca))
        try:
            context.load_cert_chain(cert, key, password=lambda: password)
        except (ssl.SSLError, OSError, ValueError) as problem:
            raise ConfigError(_about_pair(cert, key, password, problem)) from None
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)]
    try:
        for _ in range(4):
            for side in sides:
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLCertVerificationError as problem:
        raise ConfigError(
            f"TTP_TLS_CERT={cert} will be refused by the other processes of the job: {problem.verify_message}. It must "
            f"be signed by the authority in TTP_TLS_CA={ca}, be within its dates, and serve as server and as client"
        ) from None
    except ssl.SSLError as problem:
        raise ConfigError(f"TTP_TLS_CERT={cert} cannot be used: {problem}") from None
    return dict(sides[0].getpeercert() or {})


def _about_pair(cert: Path, key: Path, password: str, problem: Exception) -> str:
    reason = getattr(problem, "reason", None) or str(problem)
    if "MISMATCH" in reason:
        return f"TTP_TLS_KEY={key} is not the key of TTP_TLS_CERT={cert}"
    if "ENCRYPTED" in _read(key)[:4096].decode(errors="replace"):
        with_it = "does not open" if password else "is needed for"
        return f"TTP_TLS_KEY={key} is encrypted, and the password {with_it} it: TTP_TLS_KEY_PASSWORD names its file"
    return f"TTP_TLS_CERT={cert} and TTP_TLS_KEY={key} are no certificate and key in PEM: {reason}"


def _plain_key(path: Path, password: str) -> bytes:
    """Return the key decrypted, as gRPC needs it."""
    data = _read(path)
    if b"ENCRYPTED" not in data[:4096]:
        return data
    with ToldAs(
        ConfigError, f"TTP_TLS_KEY={path} is encrypted and openssl cannot open it", OSError, subprocess.SubprocessError
    ):
        done = subprocess.run(
            ["openssl", "pkey", "-in", str(path), "-passin", "stdin"],
            input=password.encode() + b"\n", capture_output=True, timeout=OPENSSL_S, check=True,
        )  # fmt: skip
    return done.stdout


def _name(shown: dict[str, Any]) -> str:
    for kind, value in shown.get("subjectAltName", ()):
        if kind == "DNS":
            return str(value)
    return next((str(v) for part in shown.get("subject", ()) for k, v in part if k == "commonName"), "")
