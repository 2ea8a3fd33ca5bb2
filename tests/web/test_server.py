"""``ttp web`` as a process: TLS, ports in use, clients that misbehave."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.web.browser import ROOT, served
from tests.wire.certificates import Authority

pytest.importorskip("uvicorn", reason="pip install 'ttp-ft[web]'")
pytestmark = pytest.mark.slow


def fetch(address: str, authority: Authority, shown: dict[str, str] | None = None) -> int:
    """Return the HTTP status of the page; -1: no connection."""
    context = ssl.create_default_context(cafile=str(authority.certificate))
    context.check_hostname = False
    if shown is not None:
        context.load_cert_chain(shown["TTP_TLS_CERT"], shown["TTP_TLS_KEY"])
    page, _, token = address.partition("?token=")
    request = urllib.request.Request(page + "plain", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as problem:
        return problem.code
    except OSError:
        return -1


def test_with_tls_browsers_show_a_certificate_unless_the_operator_says_otherwise(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    own, stranger = authority.sign(), other.sign()
    revoked = authority.sign(file="revoked")
    env = {"TTP_RUN_DIR": str(tmp_path / "none"), **own, "TTP_TLS_CRL": str(authority.revoke("revoked"))}
    with served("--save-dir", str(tmp_path), env=env) as address:
        assert address.startswith("https://")
        assert fetch(address, authority, own) == 200
        assert (
            fetch(address, authority) == fetch(address, authority, stranger) == fetch(address, authority, revoked) == -1
        )
        assert fetch(address.partition("?")[0], authority, own) == 401, "the token is asked for besides"
        with pytest.raises(OSError):
            urllib.request.urlopen(address.replace("https", "http"), timeout=20)
        authority.sign(file="own"), authority.revoke("own")
        renewed, late = authority.sign(), authority.sign(file="late")
        assert fetch(address, authority, renewed) == 200, "what was renewed is shown, and goes by the new list"
        authority.revoke("late")
        assert fetch(address, authority, late) == -1, "a list that is newer than the server"
    with served("--save-dir", str(tmp_path), "--no-client-certificates", env=env) as address:
        assert fetch(address, authority) == 200


def test_an_encrypted_key_is_opened(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours")
    password = tmp_path / "password"
    password.touch(mode=0o600)
    password.write_text("secret\n")
    env = {**authority.sign(password="secret"), "TTP_TLS_KEY_PASSWORD": str(password)}
    with served("--save-dir", str(tmp_path), env=env) as address:
        assert fetch(address, authority, authority.sign(file="client")) == 200


def test_who_does_not_read_or_sends_rubbish_keeps_nobody_out(tmp_path: Path) -> None:
    with served("--save-dir", str(tmp_path), env={}) as address:
        where, _, token = address.partition("/?token=")
        port = int(where.rpartition(":")[2])
        lazy = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for number, one in enumerate(lazy):
            asked = f"GET /events HTTP/1.1\r\nHost: x\r\nCookie: ttp_web_{port}={token}\r\n\r\n".encode()
            one.sendall([asked, b"GET / HT", b"\x16\x03\x01" + bytes(200), b""][number % 4])
        request = urllib.request.Request(f"{where}/plain", headers={"Authorization": f"Bearer {token}"})
        assert urllib.request.urlopen(request, timeout=20).status == 200
        for one in lazy:
            one.close()


HANGS = """
import runpy, threading
from ttp.web import looks
looks.Incidents.look = lambda self: threading.Event().wait()
runpy.run_module("ttp", run_name="__main__")
"""


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_it_is_told_to_although_the_storage_hangs(tmp_path: Path, asked: signal.Signals) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TTP_")}
    command = [sys.executable, "-c", HANGS, "web", "--listen", "127.0.0.1:0", "--save-dir", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, env=clean, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            where, _, token = server.stdout.readline().strip().partition("/?token=")
            request = urllib.request.Request(f"{where}/plain", headers={"Authorization": f"Bearer {token}"})
            assert urllib.request.urlopen(request, timeout=20).status == 200, "from now on it looks at the files"
            server.send_signal(asked)
            assert server.wait(60) == -asked
        finally:
            server.kill()
