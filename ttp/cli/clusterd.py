"""``ttp clusterd``: connects MindCluster's ClusterD to the job's controller, in place of MindIO."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttp.cli.connection import Address, Client, Port, Token, connected, find
from ttp.cli.incident_reader import IncidentLog, incident_files, read_incident
from ttp.cli.output import Complaints, complain, seconds
from ttp.config import Config
from ttp.core.messages import FaultKind
from ttp.errors import CheckpointError, TtpError, UsageError
from ttp.inbox import Inbox
from ttp.store.names import INCIDENTS

if TYPE_CHECKING:
    from ttp.mindio.clusterd import Accuse, Message, Seen
    from ttp.mindio.handlers import Manager

Server = Annotated[str, typer.Option("--server", help="ClusterD, HOST:PORT. Default: MINDX_SERVER_IP with port 8899.")]
JobId = Annotated[str, typer.Option("--job-id", help="The job as ClusterD knows it. Default: MINDX_TASK_ID.")]
Every = Annotated[float, seconds("--every", least=0.05, about="Seconds between two queries of the job.")]

PORT = 8899
ROLE = "master agent"
HANDLERS = "handlers"
"""``framework`` of ranks whose program saves and repairs with handlers of its own."""
KILL = "killMaster"
SWITCHED_OFF = 403
CALL_S = 5.0
DEATHS = frozenset({FaultKind.EXITED.value, FaultKind.LOST.value, FaultKind.SILENT.value})
NOBODY: frozenset[int] = frozenset()
AGAIN_MAX_S = 10.0


def clusterd(
    *,
    server: Server = "",
    job_id: JobId = "",
    every: Every = 0.2,
    address: Address = None,
    port: Port = None,
    token: Token = None,
) -> None:
    """Connect a job to ClusterD, MindCluster's service that decides how jobs recover, in place of MindIO.

    Run one beside rank 0. Faults that ClusterD knows of are reported to the job, which saves its newest step and ends
    with 75; ranks that die are reported to ClusterD. ClusterD is offered the strategies dump and exit, and told whether
    the dump is on disk. If the job's program has handlers of MindIO's, every message is passed on in both directions:
    such a job can also retry, recover and pause. The job needs process-recover-enable=on. The command runs until
    ClusterD sends killMaster (exit code 0), until ClusterD answers that process-recover-enable is off (1), or until it
    is stopped. It waits for a job, and for ClusterD, if they are not there yet.
    """
    from ttp.mindio.clusterd import Accuse, Bridge

    host, job = server or os.environ.get("MINDX_SERVER_IP", ""), job_id or os.environ.get("MINDX_TASK_ID", "")
    if not host or not job:
        raise UsageError("clusterd needs --server HOST:PORT and --job-id ID, or MINDX_SERVER_IP and MINDX_TASK_ID")
    where = host if host.rpartition("]")[2].count(":") == 1 else f"{host}:{PORT}"
    bridge = Bridge(job, dump_s=Config.from_env().rescue_patience_s)
    with contextlib.ExitStack() as closing:
        link, eyes = ClusterLink(where, job), Eyes(address, port, token)
        closing.callback(link.close)
        closing.callback(eyes.close)
        words = Words(job, (address, port, token))
        closing.callback(words.close)
        while not bridge.ended:
            signal, seen = link.next(every), eyes.look()
            if eyes.has_handlers and (signal is None or signal.signal_type != KILL):
                for message in words.pass_on(signal, seen):
                    link.say(message)
                continue
            actions = [] if signal is None else bridge.signal(signal, time.time())
            for action in [*actions, *bridge.look(seen, time.time())]:
                if not isinstance(action, Accuse):
                    link.say(action)
                elif eyes.accuse(action):
                    bridge.believed()


class Eyes:
    """Observes the job through its controller, and through its save_dir when the controller has ended."""

    def __init__(self, address: str | None, port: int | None, token: str | None) -> None:
        self._asked = (address, port, token)
        find(*self._asked)  # raises bad usage at once
        self._closing = contextlib.ExitStack()
        self._client: Client | None = None
        self._save_dir: Path | None = None
        self._read: IncidentLog | None = None
        self._saw = False
        self.has_handlers = False
        """True if the job's program saves and repairs with handlers of its own."""
        self._complain = Complaints()

    def look(self) -> Seen | None:
        """Return the state of the job. None: no controller answers, and no file in save_dir says how the job ended."""
        from ttp.mindio.clusterd import Seen

        try:
            now = self._connected().status()
        except TtpError as problem:  # the job has not started or has ended; or the token is wrong
            self._complain(str(problem))
            self.close()
            return self._left()
        self._complain("")
        self.has_handlers = now.framework == HANDLERS if now.framework else self.has_handlers
        self._save_dir = Path(now.save_dir) if now.save_dir else self._save_dir
        hosts: dict[str, list[int]] = {}
        for rank in sorted(now.ranks, key=lambda rank: rank.rank):
            hosts.setdefault(rank.host, []).append(rank.rank)
        if hosts and not self._saw and len(now.ranks) == now.world_size:
            complain(f"the job has {len(now.ranks)} ranks on {len(hosts)} hosts")
            self._saw = True
        last = now.last_incident
        dead = frozenset(rank.rank for rank in now.ranks if rank.state == "lost")
        seen = Seen(
            hosts=tuple(tuple(ranks) for ranks in hosts.values()),
            incident=last.id,
            stage=last.stage,
            faulty=any(rank.state in ("lost", "broken", "released") for rank in now.ranks),
            lost=dead if last.stage != "closed" else NOBODY,
            saved=bool(last.path),
            text=last.outcome or last.reason,
        )
        return self._with_file(seen) if seen.over else seen

    def _with_file(self, seen: Seen) -> Seen:
        """Add the facts of the incident's file: a whole incident may have passed between two calls of ``look``."""
        if self._read is None or self._read.id != seen.incident or self._read.last("released", "thawed") is None:
            try:
                path = self._save_dir and self._save_dir / INCIDENTS / f"{seen.incident}.jsonl"
                self._read = read_incident(path) if path else None
            except CheckpointError:
                self._read = None
        if self._read is None:
            return seen
        standing = [line for lines in self._read.accused_hosts().values() for line in lines]
        dead = {line.facts.get("rank") for line in standing if line.facts.get("evidence") in DEATHS}
        return replace(
            seen,
            faulty=bool(standing) or seen.faulty,
            lost=frozenset(rank for rank in dead if isinstance(rank, int)) | seen.lost,
            saved=self._read.saved,
            text=self._read.outcome,
        )

    def _left(self) -> Seen | None:
        """Return how the last incident ended, read from the save_dir of a controller that has ended; None: unknown."""
        from ttp.mindio.clusterd import Seen

        try:
            newest = next(iter(incident_files(self._save_dir)), None) if self._save_dir is not None else None
        except CheckpointError:
            return None
        if newest is None:
            return None
        seen = self._with_file(Seen(incident=newest.stem))
        over = self._read is not None and self._read.last("released", "thawed") is not None
        return replace(seen, stage="closed") if over else None

    def accuse(self, accusation: Accuse) -> bool:
        """Report ranks as broken, and print the controller's answer. Returns True if the controller accused any."""
        try:
            answer = self._connected().report_fault(list(accusation.ranks), "", accusation.text)
        except TtpError as problem:
            complain(str(problem))
            self.close()
            return False
        complain(f"ClusterD has named ranks {', '.join(map(str, accusation.ranks))}. {answer.text}")
        return bool(answer.accused)

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        self._client = None
        self._closing.close()

    def _connected(self) -> Client:
        if self._client is None:
            self._client = self._closing.enter_context(connected(find(*self._asked)))
        return self._client


class Words:
    """Passes messages between ClusterD and the controller of a job with handlers, as the job's manager.

    Args:
        job_id: id of the job in ClusterD.
        asked: address, port and token of the controller, as far as they were given.
    """

    def __init__(self, job_id: str, asked: tuple[str | None, int | None, str | None]) -> None:
        from ttp.mindio.clusterd_manager import Interpreter

        self._interpreter, self._asked = Interpreter(job_id), asked
        self._said: Inbox[Message] = Inbox()
        self._manager: Manager | None = None
        self._heard = False

    def pass_on(self, signal: Any, seen: Seen | None) -> list[Message]:
        """Pass ClusterD's signal, if there is one, to the controller. Returns the messages to send to ClusterD."""
        if self._manager is None:
            self._manager = self._attend()
        if not self._heard and self._manager.wait_attached(0.0):
            self._heard = True
            complain("the job's program has handlers of its own: ClusterD's orders are passed on to them")
        hosts = seen.hosts if seen is not None else ()
        for notice in [] if signal is None else self._interpreter.notices(signal, hosts):
            self._manager.notify(notice)
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._said.get_nowait())
        return found

    def close(self) -> None:
        """Stop managing the job: its controller decides by itself again."""
        if self._manager is not None:
            self._manager.close()

    def _attend(self) -> Manager:
        from ttp.mindio.handlers import Manager

        where, say, put = find(*self._asked), self._interpreter, self._said.put
        manager = Manager(
            where.address, where.port, where.token, run_dir=where.run_dir,
            report_fault_ranks=lambda faults, _: put(say.fault_ranks(faults)),
            report_stop_complete=lambda code, text, faults: put(say.stop_complete(code, text, faults)),
            report_strategies=lambda faults, offered: put(say.strategies(faults, offered)),
            report_result=lambda code, text, _, strategy: put(say.result(code, text, strategy)),
        )  # fmt: skip
        manager.start()
        return manager


class ClusterLink:
    """The connection to ClusterD, opened again when it breaks. ``recover.proto`` has its fields and method names."""

    def __init__(self, where: str, job_id: str) -> None:
        import grpc

        from ttp.wire.v1 import recover_pb2 as pb

        self._where = where
        self._me = pb.RecoverClient(job_id=job_id, role=ROLE)
        keepalive = [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000)]
        self._channel = grpc.insecure_channel(where, options=[*keepalive, ("grpc.enable_http_proxy", 0)])
        self._signals: Inbox[Any] = Inbox()
        self._unsent: deque[Message] = deque()
        self._closed = threading.Event()
        self._complain = Complaints()
        threading.Thread(target=self._listen, name="ttp-clusterd", daemon=True).start()

    def next(self, patience_s: float) -> Any:
        """Wait up to ``patience_s`` seconds for the next signal of ClusterD, and return it; None: there was none.

        Raises:
            TtpError: process-recover-enable is off, so ClusterD does not look after this job.
        """
        self._send()
        try:
            found = self._signals.get(timeout=patience_s)
        except queue.Empty:
            return None
        if isinstance(found, TtpError):
            raise found
        return found

    def say(self, message: Message) -> None:
        """Send a message now, or as soon as ClusterD can be reached."""
        self._unsent.append(message)
        self._send()

    def close(self) -> None:
        """Close the connection."""
        self._closed.set()
        self._channel.close()

    def _send(self) -> None:
        import grpc

        from ttp.wire.v1 import recover_pb2 as pb

        methods = {
            pb.RecoverStopped: "ReportStopComplete",
            pb.RecoverStrategies: "ReportRecoverStrategy",
            pb.RecoverResult: "ReportRecoverStatus",
            pb.RecoverFaults: "ReportProcessFault",
        }
        while self._unsent:
            message = self._unsent[0]
            try:
                self._call(methods[type(message)], message)
            except grpc.RpcError as problem:
                self._unreachable(problem)
                return
            self._unsent.popleft()

    def _call(self, method: str, request: Any) -> Any:
        from ttp.wire.v1 import recover_pb2 as pb

        ask = self._channel.unary_unary(
            f"/Recover/{method}", type(request).SerializeToString, pb.RecoverAnswer.FromString
        )
        answer = ask(request, timeout=CALL_S)
        if answer.code:
            complain(f"ClusterD answers {method} with {answer.code}: {answer.info[:300]}")
        return answer

    def _listen(self) -> None:
        import grpc

        from ttp.wire.v1 import recover_pb2 as pb

        subscribe = self._channel.unary_stream(
            "/Recover/SubscribeProcessManageSignal", pb.RecoverClient.SerializeToString, pb.RecoverSignal.FromString
        )
        again_s = 1.0
        while not self._closed.is_set():
            try:
                code = self._call("Init", self._me).code or self._call("Register", self._me).code
                if code == SWITCHED_OFF:
                    text = "ClusterD does not manage this job: set process-recover-enable=on for it"
                    self._signals.put(TtpError(text))
                    return
                if not code:
                    complain(f"ClusterD at {self._where} has registered job {self._me.job_id}")
                    for signal in subscribe(self._me):
                        again_s = 1.0
                        self._complain("")
                        self._signals.put(signal)
            except (grpc.RpcError, ValueError) as problem:  # ValueError: the channel was closed
                self._unreachable(problem)
            self._closed.wait(again_s)
            again_s = min(AGAIN_MAX_S, 2 * again_s)

    def _unreachable(self, problem: Any) -> None:
        text = str(problem.details() if hasattr(problem, "details") else problem)[:300]
        if not self._closed.is_set():
            self._complain(f"ClusterD at {self._where} cannot be reached: {text}")
