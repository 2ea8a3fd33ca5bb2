"""Finding the controller of a job and asking it; what gRPC says is translated into what to do about it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttp.config import Config
from ttp.errors import ConfigError, TtpError

if TYPE_CHECKING:
    import grpc

    from ttp.wire.v1 import controller_pb2 as pb
    from ttp.wire.v1.controller_pb2_grpc import ControllerStub

Address = Annotated[
    str | None, typer.Option("--address", help="Host of the controller. Default: MASTER_ADDR, else this host.")
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port", min=1, max=65535, help="Its port. Default: TTP_PORT, else that of your only job on this host."
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        help="Secret of the job. Default: TTP_TOKEN, TTP_TOKEN_FILE, else what the launcher left on this host. "
        "Prefer these: arguments are visible to everybody.",
    ),
]

ANSWER_S = 5.0
LOCAL = "127.0.0.1"


class UnreachableError(TtpError):
    """There is no controller, or none that answers. Not the user's mistake: jobs end."""


@dataclass(frozen=True, slots=True)
class Where:
    """A controller's place, and the secret that it asks for."""

    address: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def find(address: str | None, port: int | None, token: str | None) -> Where:
    """The controller that is meant. What is not given comes from the environment, then from what jobs here left.

    Raises:
        ConfigError: nothing says which port, or the environment is wrong.
    """
    config = Config.from_env()
    chosen = address or os.environ.get("MASTER_ADDR") or LOCAL
    found = port or config.port or _only_local_job(chosen)
    secret = token if token is not None else config.token or _left_behind(dataclasses.replace(config, port=found))
    if not secret:
        chosen = _on_this_host(config, chosen, found)
    return Where(chosen, found, secret)


def _on_this_host(config: Config, address: str, port: int) -> str:
    """Where the controller of a job without a token is: on loopback, whatever the host is called."""
    from ttp.launch.admission import admitted
    from ttp.launch.presence import listens

    if not listens(address, port, 1.0):
        with contextlib.suppress(ConfigError):
            return admitted(config, address)[1]
    return address


def _left_behind(config: Config) -> str:
    from ttp.launch.token_file import read_token

    return read_token(config.resolved_run_dir()) or ""


def _only_local_job(address: str) -> int:
    from ttp.launch.presence import listens

    running = [port for port in _known_ports() if listens(LOCAL, port, 1.0)] if address == LOCAL else []
    if len(running) == 1:
        return running[0]
    several = f"You have several jobs here, on ports {', '.join(map(str, running))}"
    none = "No running job of yours was found on this host" if address == LOCAL else "None was given"
    raise ConfigError(f"which port? {several if running else none}: use --port, or set TTP_PORT as the job has it")


def _known_ports() -> list[int]:
    """Ports of this user's jobs on this host, by their run directories; see ``Config.resolved_run_dir``."""
    folder = Path(tempfile.gettempdir()) / f"ttp-{os.getuid()}"
    try:
        return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal())
    except OSError:
        return []


class Client:
    """The controller's questions and answers, with its errors in plain words. Use ``connected``."""

    def __init__(self, where: Where, stub: ControllerStub) -> None:
        self._where = where
        self._stub = stub
        from ttp.wire.channel import metadata

        self._metadata = metadata(where.token)

    def status(self) -> pb.GetStatusResponse:
        """A picture of the job now."""
        from ttp.wire.v1 import controller_pb2 as pb

        with self._translated(ANSWER_S):
            return self._stub.GetStatus(pb.GetStatusRequest(), timeout=ANSWER_S, metadata=self._metadata)

    def save(self, reason: str, timeout_s: float) -> pb.SaveNowResponse:
        """A checkpoint now; returns when it is committed or refused."""
        from ttp.wire.v1 import controller_pb2 as pb

        with self._translated(timeout_s):
            return self._stub.SaveNow(pb.SaveNowRequest(reason=reason), timeout=timeout_s, metadata=self._metadata)

    def report_fault(self, ranks: list[int], host: str, reason: str) -> pb.ReportFaultResponse:
        """Accuse ranks, or all ranks of a host."""
        from ttp.wire.v1 import controller_pb2 as pb

        request = pb.ReportFaultRequest(ranks=ranks, host=host, reason=reason)
        with self._translated(ANSWER_S):
            return self._stub.ReportFault(request, timeout=ANSWER_S, metadata=self._metadata)

    @contextlib.contextmanager
    def _translated(self, timeout_s: float) -> Iterator[None]:
        import grpc

        try:
            yield
        except grpc.RpcError as problem:
            raise _explain(problem, self._where, timeout_s) from None


@contextlib.contextmanager
def connected(where: Where) -> Iterator[Client]:
    """A client for as long as the block runs. Connects with the first question."""
    from ttp.wire.channel import open_channel, stub

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own log lines would garble one clear message
    with open_channel(where.address, where.port) as channel:
        yield Client(where, stub(channel))


def _about_refusal(where: Where, details: str) -> str:
    if "certificate" in details or "another user" in details:
        return f"the controller at {where} refuses this process: {details}"
    if not where.token and "TTP_TOKEN" in details:
        return (
            f"the controller at {where} asks for the job's token, and there is none in TTP_TOKEN_FILE or TTP_TOKEN, "
            "nor in the run directory of this host: set one of them as the job has it, set TTP_RUN_DIR to the job's, "
            "or run this as the job's user on one of its hosts"
        )
    return (
        f"the controller at {where} belongs to a job with another secret: set TTP_TOKEN_FILE or TTP_TOKEN to the "
        "job's, or run this as the job's user on one of its hosts"
    )


def _explain(problem: grpc.RpcError, where: Where, timeout_s: float) -> TtpError:
    from grpc import StatusCode

    code, details = problem.code(), problem.details() or ""
    match code:
        case StatusCode.UNAUTHENTICATED | StatusCode.PERMISSION_DENIED:
            return ConfigError(_about_refusal(where, details))
        case StatusCode.DEADLINE_EXCEEDED:
            return UnreachableError(f"the controller at {where} did not answer within {timeout_s:g} s")
        case StatusCode.UNIMPLEMENTED:
            return ConfigError(f"what listens at {where} is no ttp controller, or an older one: check --port")
        case StatusCode.INVALID_ARGUMENT:
            return ConfigError(details)
        case StatusCode.CANCELLED:
            return UnreachableError(f"the controller at {where} ended while it was asked")
    return _explain_silence(where, details or code.name.lower())


def _explain_silence(where: Where, details: str) -> TtpError:
    from ttp.wire.tls import diagnose

    if encryption := diagnose(where.address, where.port, details):
        return ConfigError(encryption)
    return UnreachableError(
        f"no ttp controller answers at {where} ({details.splitlines()[0]}): "
        "is the job running, and is this its --address and --port?"
    )
