"""TLS of servers that are not gRPC's: a resumed session is checked again."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wire.certificates import Authority
from ttp.config import Config
from ttp.wire import https
from ttp.wire.https import server_context


@contextlib.contextmanager
def greeting(context: ssl.SSLContext) -> Iterator[int]:
    """Run a server that sends one word to each client that it accepts; returns its port."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = listening.accept()
                with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as secured:
                    secured.sendall(b"hello")

    threading.Thread(target=serve, daemon=True).start()
    yield listening.getsockname()[1]
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def greeted(port: int, client: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
    plain = socket.create_connection(("127.0.0.1", port), 20)
    with client.wrap_socket(plain, server_hostname="localhost", session=session) as secured:
        if secured.recv(5) != b"hello":
            raise ConnectionError("the server has hung up")
        return secured.session


def test_a_revoked_certificate_resumes_no_session(tmp_path: Path) -> None:
    """Where Python cannot make sessions be forgotten, TLS 1.2 is switched off."""
    authority = Authority(tmp_path)
    own, shown = authority.sign(), authority.sign(file="client")
    authority.sign(file="other")
    context = server_context(Config.from_env({**own, "TTP_TLS_CRL": str(authority.revoke("other"))}))
    assert context is not None
    client = ssl.create_default_context(cafile=str(authority.certificate))
    client.check_hostname = False
    client.load_cert_chain(shown["TTP_TLS_CERT"], shown["TTP_TLS_KEY"])
    with greeting(context) as port:
        session = greeted(port, client)
        authority.revoke("client")
        with pytest.raises(OSError):
            greeted(port, client, session)
        client.load_cert_chain(own["TTP_TLS_CERT"], own["TTP_TLS_KEY"])
        greeted(port, client)
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError):
            greeted(port, client)


def test_files_that_are_replaced_while_they_are_read_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    context = server_context(Config.from_env(authority.sign("localhost")), client_certificates=False)
    assert context is not None
    read, failed = https._context, list[Config]()

    def replaced_at_first(config: Config, client_certificates: bool) -> ssl.SSLContext:
        if not failed:
            failed.append(config)
            raise ssl.SSLError("the key is not that of the certificate")
        return read(config, client_certificates)

    monkeypatch.setattr(https, "_context", replaced_at_first)
    client = ssl.create_default_context(cafile=str(authority.certificate))
    with greeting(context) as port:
        first = certificate(port, client)
        authority.sign("localhost")
        assert certificate(port, client) == first and failed
        assert certificate(port, client) != first


def certificate(port: int, client: ssl.SSLContext) -> bytes | None:
    with client.wrap_socket(socket.create_connection(("127.0.0.1", port), 20), server_hostname="localhost") as secured:
        assert secured.recv(5) == b"hello"
        return secured.getpeercert(binary_form=True)
