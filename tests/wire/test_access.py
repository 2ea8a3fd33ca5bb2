"""Access to services: secrets in files, bound addresses, users of this host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.controller.conftest import Controller, ended, outside
from tests.ports import free_port
from tests.test_legacy import PROGRAM
from ttp.config import Config
from ttp.errors import ConfigError
from ttp.launch.admission import admitted
from ttp.launch.run_dir import allow_journal, journals_allowed
from ttp.wire import access, tls
from ttp.wire.access import UNKNOWN, AccessCheck, listening_address, owner_of

ELSEWHERE = "192.0.2.1"
"""An address of no machine."""
STRANGER = 65534


# ------------------------------------------------------------------------------------------------------------ the file


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("sesame\n")
    return path


def test_a_token_comes_from_its_file_and_the_variable_goes_before_it(secret: Path) -> None:
    assert Config.from_env({"TTP_TOKEN_FILE": str(secret)}).token == "sesame"
    assert Config.from_env({"TTP_TOKEN_FILE": str(secret), "TTP_TOKEN": "other"}).token == "other"


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o666])
def test_a_file_that_others_may_look_into_is_refused(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    with pytest.raises(ConfigError, match=rf"has mode 0{mode:o}, .* chmod 600 it") as refused:
        Config.from_env({"TTP_TOKEN_FILE": str(secret)})
    assert "sesame" not in str(refused.value)


def test_what_is_no_secret_file_says_so(tmp_path: Path, secret: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    empty = tmp_path / "empty"
    empty.touch(mode=0o600)
    two = tmp_path / "two"
    two.touch(mode=0o600)
    two.write_text("sesame\nand more\n")
    for path, why in [
        (tmp_path / "none", "cannot be read: No such file"),
        (pipe, "is not a regular file"),
        (empty, "is empty: `openssl rand -hex 16`"),
        (two, "does not contain a valid token: expected at most 4000 printable"),
    ]:
        with pytest.raises(ConfigError, match=why) as refused:
            Config.from_env({"TTP_TOKEN_FILE": str(path)})
        assert "sesame" not in str(refused.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_file_of_somebody_else_is_refused(secret: Path) -> None:
    os.chown(secret, STRANGER, -1)
    with pytest.raises(ConfigError, match=f"belongs to uid {STRANGER}.*as that user"):
        Config.from_env({"TTP_TOKEN_FILE": str(secret)})


# --------------------------------------------------------------------------------------------------------- the address


def test_without_a_token_only_loopback_is_bound() -> None:
    assert listening_address(Config()) == "127.0.0.1"
    assert listening_address(Config(bind="127.0.0.2")) == "127.0.0.2"
    assert listening_address(Config(token="t")) == listening_address(Config(insecure=True)) == "0.0.0.0"
    assert listening_address(Config(token="t", bind="10.0.0.7")) == "10.0.0.7"
    for bind in ("0.0.0.0", "::", ELSEWHERE):
        with pytest.raises(ConfigError, match="the job has no token: set TTP_TOKEN_FILE"):
            listening_address(Config(bind=bind))


def test_a_job_without_a_token_is_admitted_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert admitted(Config(), "127.0.0.1", several=True) == (Config(bind="127.0.0.1"), "127.0.0.1")
    assert admitted(Config(), "localhost")[1] == "localhost"
    unknown = r"^this host finds no address of 'no\.such\.host\.invalid' \(MASTER_ADDR\)"
    several = r"runs on several hosts .* TTP_TOKEN_FILE .* TTP_INSECURE=1"
    for address, text in ((ELSEWHERE, several), ("no.such.host.invalid", unknown)):
        with pytest.raises(ConfigError, match=text):
            admitted(Config(), address)
        assert admitted(Config(token="t"), address) == (Config(token="t"), address)
        assert admitted(Config(insecure=True), address)[1] == address
    monkeypatch.setattr("ttp.launch.admission.is_local", lambda address: True)
    assert admitted(Config(), ELSEWHERE) == (Config(bind="127.0.0.1"), "127.0.0.1"), "another name of this host"
    with pytest.raises(ConfigError, match="runs on several hosts"):
        admitted(Config(), ELSEWHERE, several=True)


TORCH = """
import torch, ttp

@ttp.ttp_to_persist
def train():
    model = torch.nn.Linear(2, 2)
    ttp.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, save_dir="checkpoints")
    raise AssertionError("it may train")

train()
"""


def _rank(folder: Path, text: str = PROGRAM, **env: str) -> tuple[int, str]:
    run = {"TTP_PORT": str(free_port()), "TTP_RUN_DIR": str(folder / "run"), "TTP_ABANDONED_S": "5"}
    clean = outside(("TTP_", "MASTER_", "RANK", "WORLD", "LOCAL_"))
    (program := folder / "program.py").write_text(text)
    return ended(program, [folder], {**clean, "RANK": "0", "WORLD_SIZE": "1", **run, **env}, folder)


def test_a_program_of_one_host_needs_nothing_and_one_of_several_is_told_what(tmp_path: Path) -> None:
    code, said = _rank(tmp_path, MASTER_ADDR="127.0.0.1")
    assert code == 75, said
    code, said = _rank(tmp_path, TORCH, MASTER_ADDR=ELSEWHERE)
    assert code == 64 and "has no token that keeps strangers out" in said and "it may train" not in said, said
    code, said = _rank(tmp_path, MASTER_ADDR="127.0.0.1", TTP_INSECURE="1")
    assert code == 75 and said.count("TTP_INSECURE=1 and no token") == 1, said
    assert "TTP_INSECURE=1 and no token" in (tmp_path / "run" / "controller.log").read_text()


# ------------------------------------------------------------------------------------------------------------ the user


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, str]]:
    """Return an open connection within this host, and gRPC's name of its peer."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as opened:
        accepted, peer = server.accept()
        with accepted:
            yield opened, f"ipv4:{peer[0]}:{peer[1]}"


def test_the_kernel_says_whose_a_connection_is(connection: tuple[socket.socket, str]) -> None:
    opened, peer = connection
    assert owner_of(peer) == os.getuid()
    assert AccessCheck(Config()).about_peer(peer, {}) == ""
    opened.close()  # what is over is nobody's; the kernel says root's
    assert owner_of(peer) == UNKNOWN
    assert "of another user" in AccessCheck(Config()).about_peer(peer, {})
    for strange in ("ipv4:192.0.2.1:80", "unix:/run/x", "ipv4:nonsense", "", "ipv6:%5B::1%5D:1"):
        assert owner_of(strange) == UNKNOWN
    assert (
        AccessCheck(Config(token="t")).about_peer("", {}) == AccessCheck(Config(insecure=True)).about_peer("", {}) == ""
    )


SAME_PORT = """
import os, socket, sys
os.setuid(int(sys.argv[3]))
with socket.socket() as opened:
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    opened.bind(("127.0.0.1", int(sys.argv[1])))
    opened.connect(("127.0.0.1", int(sys.argv[2])))
    print("connected", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_of_two_connections_from_one_port_the_one_to_this_service_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that connects to another service from a rank's port is not taken for that rank."""
    monkeypatch.setattr("ttp.wire.tls.SERVED", served := set[tuple[str, int]]())
    with socket.create_server(("127.0.0.1", 0)) as own, socket.create_server(("127.0.0.1", 0)) as other:
        with socket.socket() as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(("127.0.0.1", 0))
            port = opened.getsockname()[1]
            ports = [str(port), str(own.getsockname()[1]), str(STRANGER)]
            with subprocess.Popen(
                [sys.executable, "-c", SAME_PORT, *ports], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as stranger:
                assert stranger.stdin is not None and stranger.stdout is not None
                assert stranger.stdout.readline() == b"connected\n"
                opened.connect(other.getsockname())
                for server, owner in ((own, STRANGER), (other, os.getuid())):
                    served.clear()
                    served.update({("a.name", 1), ("::1", 1), server.getsockname()})
                    assert owner_of(f"ipv4:127.0.0.1:{port}") == owner
                stranger.stdin.close()


def test_of_what_is_connected_to_a_service_the_kernel_does_not_list_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "_connections", lambda table, names: pytest.fail("the list is read"))
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = tls.add_port(server, "127.0.0.1:0")
    server.start()
    try:
        with socket.create_connection(("127.0.0.1", port)) as opened:
            assert owner_of(f"ipv4:127.0.0.1:{opened.getsockname()[1]}") == os.getuid()
    finally:
        server.stop(0).wait()


ASK = """
import os, sys
import grpc
from ttp.wire.channel import open_channel, stub
from ttp.wire.v1 import controller_pb2 as pb
os.setuid(int(sys.argv[2]))
try:
    stub(open_channel("127.0.0.1", int(sys.argv[1]))).SaveNow(pb.SaveNowRequest(), timeout=30)
except grpc.RpcError as problem:
    print(problem.code().name, problem.details())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_of_the_host_is_not_served(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    try:
        command = [sys.executable, "-c", ASK, str(controller.port)]
        said = subprocess.run([*command, str(STRANGER)], capture_output=True, text=True, timeout=120, check=True).stdout
        assert said.startswith("UNAUTHENTICATED") and "of another user" in said
        own = subprocess.run([*command, str(os.getuid())], capture_output=True, text=True, timeout=120, check=True)
        assert "UNAUTHENTICATED" not in own.stdout
        assert controller.status().stage == "waiting"
    finally:
        controller.close()


def test_ipv6_is_looked_up_too() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server, socket.create_connection(server.getsockname()[:2]) as opened:
        host, port = opened.getsockname()[:2]
        assert owner_of(f"ipv6:%5B{host}%5D:{port}") == os.getuid()
        assert owner_of(f"ipv6:[{host}]:{port}") == os.getuid()


def test_where_the_kernel_says_nothing_the_loopback_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_connections", lambda table, names: None)
    assert owner_of("ipv4:127.0.0.1:1") is None and AccessCheck(Config()).about_peer("ipv4:127.0.0.1:1", {}) == ""


# --------------------------------------------------------------------------------------------------------- directories


def test_a_directory_of_incidents_is_named_by_who_may_write_the_run_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert journals_allowed(run_dir) == frozenset()
    allow_journal(run_dir, Path("/checkpoints"), None)
    allow_journal(run_dir, Path("/checkpoints"), Path("/other"))
    assert journals_allowed(run_dir) == {"/checkpoints", "/other"}
    assert (run_dir / "journals").read_bytes().count(b"/checkpoints") == 1
    run_dir.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write to the run directory"):
        allow_journal(run_dir, Path("/elsewhere"))


def test_a_service_does_not_listen_where_it_may_not(tmp_path: Path) -> None:
    refused = Controller(tmp_path, "--bind", "0.0.0.0", wait=False)
    assert refused.process.wait(60) == 64 and "the job has no token" in refused.output()
    refused.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", refused.port), 5)


def _health(controller: Controller, name: str) -> list[Any]:
    """Return the first answers to both kinds of health check; the second call stays open."""
    stub: Any = health_pb2_grpc.HealthStub
    request = health_pb2.HealthCheckRequest(service=name)
    asked = stub(controller.channel)
    watching = asked.Watch(request, timeout=120)
    return [asked.Check(request, timeout=120).status, next(watching).status, watching]


def test_health_checks_need_no_token(tmp_path: Path) -> None:
    """Kubernetes sends the name of a service, or none."""
    controller = Controller(tmp_path, token="secret")
    try:
        for name in ("", "ttp.wire.v1.Controller"):
            *answers, watching = _health(controller, name)
            assert answers == [health_pb2.HealthCheckResponse.SERVING] * 2
            assert watching.is_active(), "whoever watches a server that lives stays connected"
            watching.cancel()
    finally:
        controller.close()


def test_what_a_stranger_sends_is_not_even_read(tmp_path: Path) -> None:
    """A message may have 256 MiB, so a few of them would exhaust a controller."""
    controller = Controller(tmp_path, token="secret")

    def resident() -> int:
        return int(Path(f"/proc/{controller.process.pid}/status").read_text().split("VmRSS:")[1].split()[0]) << 10

    try:
        before, message = resident(), bytes(64 << 20)
        with pytest.raises(grpc.RpcError) as refused:
            call: Any = controller.channel.unary_unary("/ttp.wire.v1.Controller/ReportFault")
            call(message, timeout=120)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert _health(controller, "x" * len(message))[:2] == [health_pb2.HealthCheckResponse.SERVING] * 2
        assert resident() - before < len(message) // 2
    finally:
        controller.close()
