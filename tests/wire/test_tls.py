"""Mutual TLS: requirements of an identity, and real processes that accept or refuse each other."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controller.conftest import Controller, ended, outside
from tests.ports import free_port
from tests.test_legacy import PROGRAM
from tests.waiting import until
from tests.wire.certificates import NAME, Authority
from ttp.errors import ConfigError
from ttp.launch.presence import ask_status
from ttp.wire import tls

pytestmark = pytest.mark.xdist_group("tls")  # they share certificates and a controller


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def own(authority: Authority) -> dict[str, str]:
    return authority.sign()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return Authority(tmp_path_factory.mktemp("stranger")).sign()


def _identity(monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]) -> tls.Identity | None:
    for name in [name for name in os.environ if name.startswith("TTP_")]:
        monkeypatch.delenv(name)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return tls.identity()


@pytest.mark.parametrize("dies", [False, True])
def test_a_server_that_dies_in_the_handshake_is_not_one_without_tls(dies: bool) -> None:
    """Both reset the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def serve() -> None:
            accepted, _ = listening.accept()
            accepted.recv(1)
            if dies:
                listening.close()
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets
            accepted.close()

        server = threading.Thread(target=serve)
        server.start()
        assert tls.speaks_tls("127.0.0.1", port) is (None if dies else False)
        server.join()


def test_without_settings_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _identity(monkeypatch, {}) is None and not tls.secured()


def test_an_identity_bears_the_name_of_its_certificate(monkeypatch: pytest.MonkeyPatch, own: dict[str, str]) -> None:
    found = _identity(monkeypatch, own)
    assert found is not None and found.name == NAME and b"PRIVATE KEY" in found.key


def test_a_renewed_certificate_is_read(monkeypatch: pytest.MonkeyPatch, authority: Authority) -> None:
    settings = authority.sign(file="renewed")
    before = _identity(monkeypatch, settings)
    authority.sign(file="renewed")
    after = tls.identity()
    assert before is not None and after is not None and before.certificate != after.certificate


def test_an_encrypted_key_is_opened_with_its_password(
    monkeypatch: pytest.MonkeyPatch, authority: Authority, tmp_path: Path
) -> None:
    settings, password = authority.sign(password="open sesame", file="secret"), tmp_path / "password"
    password.write_text("open sesame\n")
    found = _identity(monkeypatch, settings | {"TTP_TLS_KEY_PASSWORD": str(password)})
    assert found is not None and b"ENCRYPTED" not in found.key
    tls._loaded.cache_clear()
    with pytest.raises(ConfigError, match=r"is encrypted, and the password is needed for it: TTP_TLS_KEY_PASSWORD"):
        _identity(monkeypatch, settings)
    password.write_text("wrong\n")
    tls._loaded.cache_clear()
    with pytest.raises(ConfigError, match=r"the password does not open it"):
        _identity(monkeypatch, settings | {"TTP_TLS_KEY_PASSWORD": str(password)})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"TTP_TLS_KEY": ""}, "TTP_TLS_KEY must be set too"),
        ({"TTP_TLS_CERT": "/nowhere/cert.pem"}, "TTP_TLS_CERT=/nowhere/cert.pem cannot be read: No such file"),
        ({"TTP_TLS_CA": os.devnull}, "TTP_TLS_CA=/dev/null holds no certificate that can be read"),
        ({"TTP_TLS_KEY": os.devnull}, "are no certificate and key in PEM"),
        ({"TTP_TLS_KEY": "theirs"}, "is not the key of"),
        ({"TTP_TLS_CA": "theirs"}, "will be refused by the other processes of the job"),
    ],
)
def test_what_cannot_be_used_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str], stranger: dict[str, str], change: dict[str, str], text: str
) -> None:
    settings = own | {name: stranger[name] if value == "theirs" else value for name, value in change.items()}
    with pytest.raises(ConfigError, match=text):
        _identity(monkeypatch, settings)


def test_one_that_is_out_of_date_is_refused(monkeypatch: pytest.MonkeyPatch, authority: Authority) -> None:
    with pytest.raises(ConfigError, match="certificate has expired"):
        _identity(monkeypatch, authority.sign(days=-1, file="old"))


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Return the settings of two processes: one is accepted, the other's certificate was revoked."""
    authority = Authority(tmp_path_factory.mktemp("listed"))
    made = {name: authority.sign(file=name) for name in ("welcome", "stolen")}
    lists = {"TTP_TLS_CRL": str(authority.revoke("stolen"))}
    return {name: settings | lists for name, settings in made.items()}


def test_a_certificate_that_was_revoked_is_refused(
    monkeypatch: pytest.MonkeyPatch, listed: dict[str, dict[str, str]]
) -> None:
    assert _identity(monkeypatch, listed["welcome"]) is not None
    with pytest.raises(ConfigError, match=r"stolen.pem will be .* certificate revoked \(by the list TTP_TLS_CRL="):
        _identity(monkeypatch, listed["stolen"])


def test_a_list_that_cannot_be_used_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    own = authority.sign()
    old = authority.revoke(days=-1)
    for path, text in (
        ("/nowhere.pem", "TTP_TLS_CRL=/nowhere.pem cannot be read: No such file"),
        (os.devnull, "TTP_TLS_CRL=/dev/null"),
        (other.revoke(), "CRL signature failure"),
        (old, "CRL has expired"),
    ):
        with pytest.raises(ConfigError, match=text):
            _identity(monkeypatch, own | {"TTP_TLS_CRL": str(path)})
    fresh = authority.revoke()
    assert fresh == old and _identity(monkeypatch, own | {"TTP_TLS_CRL": str(fresh)}) is not None
    authority.revoke("own")
    with pytest.raises(ConfigError, match="certificate revoked"):
        tls.identity()


def test_a_check_that_could_not_be_made_is_made_again(
    monkeypatch: pytest.MonkeyPatch, listed: dict[str, dict[str, str]]
) -> None:
    """The host had no memory for one more process for a moment: its ranks are not refused for minutes."""
    mine = _identity(monkeypatch, listed["welcome"])
    assert mine is not None and mine.guard is not None
    shown = mine.certificate + b"\n"  # not checked before
    with monkeypatch.context() as bare:
        bare.setenv("PATH", "/nowhere")
        assert "openssl cannot judge certificates" in mine.guard.problem(shown)
    assert mine.guard.problem(shown) == ""


# ------------------------------------------------------------------------------------------------------ real processes


@pytest.fixture(scope="module")
def guarded(own: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        settings: dict[str, Any] = own | {"TTP_ABANDONED_S": "3600"}  # it has no rank, and serves all tests of the file
        controller = Controller(tmp_path_factory.mktemp("guarded"), **settings)
    yield controller
    controller.close()


@pytest.fixture
def status(tmp_path: Path) -> Callable[[int, dict[str, str]], tuple[int, str]]:
    """Return a function that runs ``ttp status`` of a port with some settings, and returns its exit code and output."""
    return lambda port, settings: ended("ttp", ["status", "--port", port], outside() | settings, tmp_path)


@pytest.mark.parametrize(
    ("who", "told"),
    [
        ("own", ""),
        ("plain", "uses TLS, and this process does not: set TTP_TLS_CERT"),
        ("stranger", "is not signed by the authority in TTP_TLS_CA"),
        ("another", "has another name than"),
    ],
)
def test_only_who_has_a_certificate_of_the_authority_with_its_name_is_answered(
    who: str, told: str, guarded: Controller, own: dict[str, str], stranger: dict[str, str], authority: Authority,
    status: Any,
) -> None:  # fmt: skip
    another = authority.sign("another.job", file="another") if who == "another" else {}
    code, said = status(guarded.port, {"own": own, "stranger": stranger}.get(who, another))
    assert (code, told in said) == (64 if told else 0, True), said


def test_a_controller_without_tls_is_not_spoken_to(own: dict[str, str], tmp_path: Path, status: Any) -> None:
    controller = Controller(tmp_path)
    try:
        code, said = status(controller.port, own)
    finally:
        controller.close()
    assert code == 64 and "does not use TLS, and this process does" in said


def test_a_controller_with_a_bad_identity_does_not_start(own: dict[str, str], tmp_path: Path) -> None:
    env = outside() | own | {"TTP_TLS_KEY": "/nowhere"}
    code, said = ended("ttp.controller", ["--port", free_port(), "--run-dir", tmp_path], env, tmp_path)
    assert code == 64 and "TTP_TLS_KEY=/nowhere cannot be read" in said


def _life(folder: Path, port: int, settings: dict[str, str]) -> tuple[int, str]:
    env = outside() | settings | {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "TTP_PORT": str(port),
        "TTP_RUN_DIR": str(folder / "run"), "TTP_SAVE_DIR": str(folder), "TTP_ABANDONED_S": "5",
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (program := folder / "program.py").write_text(PROGRAM)
    return ended(program, [folder], env, folder)


def test_a_rank_is_saved_over_tls(own: dict[str, str], tmp_path: Path) -> None:
    code, said = _life(tmp_path, free_port(), own)
    assert code == 75, said
    assert (tmp_path / "step_5").exists()


def test_a_rank_that_speaks_plainly_is_refused_before_it_trains(guarded: Controller, tmp_path: Path) -> None:
    code, said = _life(tmp_path, guarded.port, {})
    assert code != 75 and not list(tmp_path.glob("step_*"))
    assert "uses TLS, and this process does not" in said


@pytest.fixture
def stolen(listed: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the settings of the revoked process, without a revocation list; this process has them, too."""
    settings = {name: value for name, value in listed["stolen"].items() if name != "TTP_TLS_CRL"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return settings


def test_a_controller_refuses_a_certificate_that_was_revoked(
    listed: dict[str, dict[str, str]], stolen: dict[str, str], tmp_path: Path, status: Any
) -> None:
    """Accepted processes are served, also on streams, which last as long as a rank."""
    controller = Controller(tmp_path, wait=False, **listed["welcome"])
    try:
        _life(tmp_path / "welcome", controller.port, listed["welcome"])
        assert (tmp_path / "welcome" / "step_5").exists()
        code, said = status(controller.port, stolen)
        assert code == 64 and "refused this request: the certificate of this request: certificate revoked" in said, said
        assert status(controller.port, listed["welcome"])[0] == 0
    finally:
        controller.close()


def test_a_controller_with_a_certificate_that_was_revoked_is_not_spoken_to(
    listed: dict[str, dict[str, str]],
    stolen: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    status: Any,
) -> None:
    controller = Controller(tmp_path, **stolen)  # type: ignore[arg-type]  # settings, and none else
    try:
        assert status(controller.port, stolen)[0] == 0
        code, said = status(controller.port, listed["welcome"])
        mine = _identity(monkeypatch, listed["welcome"])
        assert mine is not None and mine.guard is not None
        assert [mine.guard.believed(f"127.0.0.1:{controller.port}") for _ in range(2)] == [b"", b""]
        assert caplog.text.count("was rejected") == 1, "a rank comes back in seconds"
    finally:
        controller.close()
    assert code == 64 and "was revoked (TTP_TLS_CRL)" in said, said


def _shown(port: int) -> bytes:
    import socket
    import ssl

    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    asking.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", port), 30) as plain, asking.wrap_socket(plain) as secure:
        return secure.getpeercert(binary_form=True) or b""


def test_a_controller_shows_a_certificate_that_was_renewed_and_keeps_it_when_the_next_is_spoilt(
    monkeypatch: pytest.MonkeyPatch, authority: Authority, tmp_path: Path, status: Any
) -> None:
    """Without a restart, and open connections stay open."""
    settings: dict[str, Any] = authority.sign(file="long-running")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    controller = Controller(tmp_path, **settings)
    try:
        first = _shown(controller.port)
        authority.sign(file="long-running")
        second = _shown(controller.port)
        assert second != first and status(controller.port, settings)[0] == 0
        assert controller.status().stage == "waiting", "a connection of before"
        Path(settings["TTP_TLS_CERT"]).write_text("no certificate")
        assert _shown(controller.port) == second
        until(lambda: "the renewed certificate cannot be used" in controller.output(), story=controller.output)
        authority.sign(file="long-running")
        assert _shown(controller.port) not in (first, second)
    finally:
        controller.close()


def test_a_client_keeps_its_certificate_while_half_of_a_renewal_is_there(
    monkeypatch: pytest.MonkeyPatch, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a rank whose stream breaks in that moment could not come back, and its job would end with 70."""
    settings: dict[str, Any] = authority.sign(file="client")
    settings["TTP_TLS_CRL"] = str(authority.revoke())
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    controller = Controller(tmp_path, **settings)
    try:
        assert ask_status("127.0.0.1", controller.port, "") is not None
        certificate = Path(settings["TTP_TLS_CERT"])
        before = certificate.read_bytes()
        certificate.write_bytes(Path(authority.sign(file="another")["TTP_TLS_CERT"]).read_bytes())
        for _ in range(2):
            assert ask_status("127.0.0.1", controller.port, "") is not None, controller.output()
        assert caplog.text.count("the renewed certificate cannot be used") == 1
        certificate.unlink()
        assert ask_status("127.0.0.1", 1, "") is None, "where nobody answers the next controller is asked"
        certificate.write_bytes(before)
        assert ask_status("127.0.0.1", controller.port, "") is not None
    finally:
        controller.close()
