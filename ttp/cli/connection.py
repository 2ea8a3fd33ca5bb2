"""Finds the controller of a job and sends it requests. Errors of gRPC become messages that say what to do."""

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
        "Prefer these: other users can see arguments.",
    ),
]

ANSWER_S = 5.0
ENDED = "`ttp verdict SAVE_DIR` says how a job ended"
TAKEOVER_S = 10
"""Seconds within which ranks connect to a standby controller after the controller's host was lost."""
LOCAL = "127.0.0.1"


class UnreachableError(TtpError):
    """No controller answers. That is not bad usage (64): the job may just have ended."""


@dataclass(frozen=True, slots=True)
class Where:
    """The location of a controller.

    Args:
        address: its host.
        port: its port.
        token: the secret of the job; may be empty.
        others: addresses (``host:port``) of other controllers that may lead the job by now.
        run_dir: the run directory of the job on this host.
    """

    address: str
    port: int
    token: str
    others: tuple[str, ...] = ()
    run_dir: Path | None = None

    def __str__(self) -> str:
        from ttp.wire.address import target

        return target(self.address, self.port)

    @property
    def around(self) -> tuple[str, ...]:
        """All addresses (``host:port``) to ask, the likeliest first."""
        from ttp.wire.address import target

        return tuple(dict.fromkeys((*self.others, target(self.address, self.port))))


def find(address: str | None, port: int | None, token: str | None) -> Where:
    """Return where the controller of the job is.

    Values that are not given come from the environment, then from the run directories of this user's jobs on this host.
    Unless an address is given, the run directory also names the other controllers of the job.

    Args:
        address: host of the controller; None: to be found.
        port: port of the controller; None: to be found.
        token: secret of the job; None: to be found.

    Raises:
        ConfigError: nothing says which port, or the environment is wrong.
    """
    from ttp.launch.ring import read_ring
    from ttp.launch.token_file import read_token
    from ttp.wire.address import split

    config = Config.from_env()
    named = _text(address or os.environ.get("MASTER_ADDR") or "")
    found = port or config.port or _port_of(config) or _only_local_job(named or LOCAL)
    run_dir = dataclasses.replace(config, port=found).resolved_run_dir()
    ring = read_ring(run_dir)
    if address or (ring is not None and split(ring.home)[1] != found):
        ring = None
    chosen = named or (split(ring.home)[0] if ring is not None else LOCAL)
    secret = token if token is not None else config.token or read_token(run_dir) or ""
    if not secret and ring is None:
        chosen = _on_this_host(config, chosen, found)
    return Where(chosen, found, secret, ring.places if ring is not None else (), run_dir)


def _text(argument: str) -> str:
    """Return an argument, which may be any bytes, with a "?" for each byte that is not UTF-8: gRPC refuses those."""
    return argument.encode(errors="replace").decode()


def _on_this_host(config: Config, address: str, port: int) -> str:
    """Return the address of the controller of a job without a token: loopback, if none listens at the host's name."""
    from ttp.launch.admission import admitted
    from ttp.launch.presence import listens

    if not listens(address, port, 1.0):
        with contextlib.suppress(ConfigError):
            return admitted(config, address)[1]
    return address


def _port_of(config: Config) -> int | None:
    """Return the port of the job whose run directory the environment names; None: it names none."""
    from ttp.launch.ring import read_ring
    from ttp.launch.run_dir import noted_port
    from ttp.wire.address import split

    if not config.run_dir:
        return None
    ring = read_ring(Path(config.run_dir))
    return noted_port(Path(config.run_dir)) if ring is None else split(ring.home)[1]


def _only_local_job(address: str) -> int:
    running = [port for port in known_ports() if _runs_here(port)] if address == LOCAL else []
    if os.environ.get("TTP_RUN_DIR"):  # it names one job, and none that is found by its port
        raise ConfigError(
            "the port of the controller is not known (TTP_RUN_DIR does not name it): "
            "use --port, or set TTP_PORT as the job has it"
        )
    if len(running) == 1:
        return running[0]
    several = f"You have several jobs here, on ports {', '.join(map(str, running))}"
    none = "No running job of yours was found on this host" if address == LOCAL else "None was given"
    raise ConfigError(
        f"the port of the controller is not known. {several if running else none}: "
        "use --port, or set TTP_PORT as the job has it"
    )


def _runs_here(port: int) -> bool:
    """Return whether a controller still leads the job of this port, on this host or on another one."""
    from ttp.launch.presence import listens
    from ttp.launch.ring import read_ring
    from ttp.wire.address import split

    if listens(LOCAL, port, 1.0):
        return True
    ring = read_ring(Config(port=port).resolved_run_dir())
    return ring is not None and any(listens(*split(place), 1.0) for place in ring.places)


def known_ports() -> list[int]:
    """Return the ports of this user's jobs on this host, from the names of their run directories."""
    folder = Path(tempfile.gettempdir()) / f"ttp-{os.getuid()}"
    try:
        return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal())
    except OSError:
        return []


class Client:
    """Sends requests to a controller; make one with ``connected``. Every method may raise the errors below.

    If a job has several controllers, the first request, and each one after a failure, first finds the one that leads.

    Raises:
        ConfigError: the controller refuses the request, or it is no controller of ttp; the text says what to do.
        UnreachableError: no controller answers.
    """

    def __init__(self, where: Where) -> None:
        from ttp.wire.channel import metadata

        self.where = where
        """The controller that was asked last."""
        self._channel: grpc.Channel | None = None
        self._metadata = metadata(_text(where.token))

    def status(self) -> pb.GetStatusResponse:
        """Return the current state of the job."""
        from ttp.wire.v1 import controller_pb2 as pb

        with self._asking(ANSWER_S) as stub:
            return stub.GetStatus(pb.GetStatusRequest(), timeout=ANSWER_S, metadata=self._metadata)

    def save(self, reason: str, timeout_s: float, *, again: bool = False) -> pb.SaveNowResponse:
        """Make the job write a checkpoint now. Returns when it is committed or refused.

        Args:
            reason: why, in words.
            timeout_s: seconds to wait for the answer.
            again: True: all ranks then go on from this checkpoint in their processes, as after a death.
        """
        from ttp.wire.v1 import controller_pb2 as pb

        with self._asking(timeout_s) as stub:
            request = pb.SaveNowRequest(reason=_text(reason), again=again)
            return stub.SaveNow(request, timeout=timeout_s, metadata=self._metadata)

    def report_fault(
        self, ranks: list[int], host: str, reason: str, *, drain: bool = False, recovered: bool = False
    ) -> pb.ReportFaultResponse:
        """Report ranks, or all ranks of a host, as broken.

        Args:
            ranks: the ranks; may be empty if ``host`` is given.
            host: name of the host; may be empty.
            reason: what is wrong, in words.
            drain: True: the launcher of the host must not start ranks again.
            recovered: True: report instead that the host is healthy again and may start ranks.
        """
        from ttp.wire.v1 import controller_pb2 as pb

        host, reason = _text(host), _text(reason)
        request = pb.ReportFaultRequest(ranks=ranks, host=host, reason=reason, drain=drain, recovered=recovered)
        with self._asking(ANSWER_S) as stub:
            return stub.ReportFault(request, timeout=ANSWER_S, metadata=self._metadata)

    def move(self, host: str) -> bool:
        """Ask that the ranks of this host be moved to one that stands by, while all train. Return whether they are."""
        from ttp.wire.v1 import rounds_pb2 as rounds
        from ttp.wire.v1.rounds_pb2_grpc import ManagerStub

        with self._asking(ANSWER_S):
            notice = rounds.Notice(what="move", params=_text(host))
            assert self._channel is not None
            return ManagerStub(self._channel).Notify(notice, timeout=ANSWER_S, metadata=self._metadata).accepted

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    @contextlib.contextmanager
    def _asking(self, timeout_s: float) -> Iterator[ControllerStub]:
        import grpc

        from ttp.wire.channel import open_channel, stub

        if self._channel is None:
            self.where = _reigning(self.where)
            self._channel = open_channel(self.where.address, self.where.port)
        try:
            yield stub(self._channel)
        except grpc.RpcError as problem:
            self.close()  # a channel that failed for a while tries to connect only every two minutes
            raise _explain(problem, self.where, timeout_s) from None


def _reigning(where: Where) -> Where:
    """Return the location of the controller that leads the job now.

    Raises:
        UnreachableError: several controllers are known, and none of them answers, or only one that stands by.
    """
    from ttp.launch.ring import reigning
    from ttp.wire.address import split, target, why_unknown

    if len(where.around) < 2:
        return where
    found = reigning(where.around, where.token, ANSWER_S)  # a controller that is busy with an incident answers late
    if found is None:
        unknown = "".join(dict.fromkeys(why_unknown(split(place)[0]) for place in where.around))
        raise UnreachableError(
            f"no controller of this job answers, neither the first one nor a standby: "
            f"{', '.join(where.around)}{unknown}. Is the job running, and is this its token (TTP_TOKEN)? {ENDED}"
        )
    first = target(where.address, where.port)
    if not found[1].world_size and found[0] != first:
        if reigning((first,), where.token, ANSWER_S) is not None:
            return where  # the ranks of a new launch have not joined yet
        raise UnreachableError(
            f"only a standby controller answers, at {found[0]}, and no rank has connected to it: the job has ended, or "
            f"its controller was lost a moment ago. Ask again in {TAKEOVER_S} s"
        )
    address, port = split(found[0])
    return dataclasses.replace(where, address=address, port=port)


@contextlib.contextmanager
def connected(where: Where) -> Iterator[Client]:
    """Yield a client, and close it after the block. It connects at its first request."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own log lines would mix with ttp's message
    client = Client(where)
    try:
        yield client
    finally:
        client.close()


def _about_refusal(where: Where, details: str) -> str:
    """Return a text on a refused token or certificate that says what to do."""
    if "certificate" in details or "another user" in details:
        return f"the controller at {where} refused this request: {details}"
    if not where.token and "TTP_TOKEN" in details:
        return (
            f"the controller at {where} requires the job's token, and none was found in TTP_TOKEN_FILE or TTP_TOKEN, "
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
            return ConfigError(f"the server at {where} is not a ttp controller, or an older one: check --port")
        case StatusCode.INVALID_ARGUMENT:
            return ConfigError(details)
        case StatusCode.CANCELLED:
            return UnreachableError(f"the controller at {where} ended before it answered")
    return _explain_silence(where, details or code.name.lower())


def _explain_silence(where: Where, details: str) -> TtpError:
    from ttp.wire.address import why_unknown
    from ttp.wire.tls import diagnose

    if encryption := diagnose(where.address, where.port, details):
        return ConfigError(encryption)
    return UnreachableError(
        f"no ttp controller answers at {where} ({details.splitlines()[0]}){why_unknown(where.address)}: "
        f"is the job running, and is this its --address and --port? {ENDED}"
    )
