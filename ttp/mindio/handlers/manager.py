"""The client for an outside manager, which decides about a job after a fault; see ``protocol.handshake``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc

from ttp.core.layout import Rank
from ttp.errors import ConfigError
from ttp.launch.ring import places, reigning
from ttp.mindio.manager_wire import ATTACHED, call_from_wire, notice_to_wire
from ttp.mindio.protocol import manager_messages as mm
from ttp.wire import channel as wire
from ttp.wire.address import split, target
from ttp.wire.limits import WireError
from ttp.wire.v1 import controller_pb2 as controller_pb
from ttp.wire.v1 import rounds_pb2 as pb
from ttp.wire.v1 import rounds_pb2_grpc as rpc

log = logging.getLogger("ttp.handlers")

OK, ERROR = 0, 1
ANSWER_S = 10.0
"""Seconds in which the controller has to accept a notice."""
RETRY_S = 0.5
"""Seconds until the next attempt after a controller could not be reached."""

Faults = dict[int, int]
"""Rank -> kind of its fault: 0 device memory, 1 process, 2 network."""


ReportFaultRanks = Callable[[Faults, dict[int, str]], object]
"""Callback ``callback(faults, codes)``: takes the faulty ranks, and the error codes of their devices."""

ReportStopComplete = Callable[[int, str, Faults], object]
"""Callback ``callback(code, text, faults)``: takes the report that training has stopped (code 0), or could not be."""

ReportStrategies = Callable[[Faults, list[str]], object]
"""Callback ``callback(faults, strategies)``: takes the strategies that are possible, the best last."""

ReportResult = Callable[[int, str, Faults, str], object]
"""Callback ``callback(code, text, faults, strategy)``: takes the result of a strategy: 0, or what is still possible
(405 recover, 406 dump, 499 only exit)."""


class Manager:
    """A manager of the job whose controller is at ``address:port``.

    Methods that return an int return 0 if the controller has accepted the request, else 1.

    Args:
        address: host of the controller.
        port: port of the controller.
        token: the job's shared secret.
        report_fault_ranks: see ``ReportFaultRanks``.
        report_stop_complete: see ``ReportStopComplete``.
        report_strategies: see ``ReportStrategies``.
        report_result: see ``ReportResult``.
        wait_s: seconds that the controller waits for each answer before it decides by itself.
        run_dir: run directory of the job on this host, which has the addresses of its other controllers.
    """

    def __init__(
        self,
        address: str,
        port: int,
        token: str = "",
        *,
        report_fault_ranks: ReportFaultRanks,
        report_stop_complete: ReportStopComplete,
        report_strategies: ReportStrategies,
        report_result: ReportResult,
        wait_s: float = mm.WAIT_S,
        run_dir: Path | None = None,
    ) -> None:
        self._home, self._run_dir, self._token = target(address, port), run_dir, token
        self._channel = wire.open_channel(address, port)
        self._metadata = wire.metadata(token)
        self._stub = rpc.ManagerStub(self._channel)
        self._where, self._wait_s = self._home, wait_s
        self._closed, self._attached = threading.Event(), threading.Event()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._attend, name="ttp-manager", daemon=True)
        self._callbacks: dict[mm.CallKind, Callable[[mm.ManagerCall], object]] = {
            mm.CallKind.FAULT_RANKS: lambda c: report_fault_ranks(_ranks(c), {int(f.rank): f.code for f in c.faults}),
            mm.CallKind.STOP_COMPLETE: lambda c: report_stop_complete(c.code, c.text, _ranks(c)),
            mm.CallKind.STRATEGIES: lambda c: report_strategies(_ranks(c), list(c.strategies)),
            mm.CallKind.RESULT: lambda c: report_result(c.code, c.text, _ranks(c), c.strategy),
        }

    def start(self) -> None:
        """Attach to the controller, on a thread; the controller may start later. Callbacks run on that thread."""
        self._thread.start()

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds until this manager is attached, and return whether it is."""
        return self._attached.wait(timeout_s)

    def close(self) -> None:
        """Detach, so that the controller decides by itself again."""
        self._closed.set()
        if self._call is not None:
            self._call.cancel()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(RETRY_S)
        self._channel.close()

    # ---------------------------------------------------------------------------------------------------------- notify

    def stop_train(self, fault_ranks: Mapping[int, int], stop_type: str = "stop", timeout: float | None = None) -> int:
        """Stop training because of faults of these ranks (``stop``), or pause it (``pause``).

        Args:
            fault_ranks: rank -> kind of its fault: 0 device memory, 1 process, 2 network.
            stop_type: ``stop`` or ``pause``.
            timeout: seconds after which a pause ends by itself; None for ``wait_s``.
        """
        kinds = {"stop": mm.NoticeKind.STOP_TRAIN, "pause": mm.NoticeKind.PAUSE_TRAIN}
        if stop_type not in kinds:
            log.error("stop_train: %r is neither stop nor pause", stop_type)
            return ERROR
        return self._notify(kinds[stop_type], fault_ranks, seconds=timeout or 0.0)

    def on_global_rank(self, fault_ranks: Mapping[int, int], time: float = 1) -> int:
        """Report all known faults, and ask for the possible strategies.

        Args:
            fault_ranks: rank -> kind of its fault.
            time: seconds that the controller waits for a choice, if more than ``wait_s``.
        """
        return self._notify(mm.NoticeKind.GLOBAL_RANK, fault_ranks, seconds=time)

    def change_strategy(self, strategy: str, params: str = "") -> int:
        """Choose one of the offered strategies, or ``continue`` after a pause."""
        return self._notify(mm.NoticeKind.STRATEGY, {}, strategy=strategy, params=params)

    def prepare_action(self, action: str, fault_ranks: Mapping[int, int] | None = None) -> int:
        """Announce that new processes for live ranks start on other hosts, or withdraw that.

        Once the new processes have joined and the job is paused, the strategy ``migration`` is offered.

        Args:
            action: ``hot switch`` to announce, ``stop switch`` to withdraw.
            fault_ranks: the ranks to move, with a kind of fault; None to withdraw.
        """
        if action not in mm.SWITCHES:
            log.error("prepare_action: %r is neither hot switch nor stop switch", action)
            return ERROR
        return self._notify(mm.SWITCHES[action], fault_ranks or {})

    def high_availability(self) -> bool:
        """Return whether a controller answers and a rank has joined it."""
        try:
            request = controller_pb.GetStatusRequest()
            answer = wire.stub(self._channel).GetStatus(request, metadata=self._metadata, timeout=ANSWER_S)
        except (ValueError, grpc.RpcError):
            return False
        return any(rank.state != "missing" for rank in answer.ranks)

    def notify(self, notice: mm.Notice) -> int:
        """Send a notice to the controller."""
        try:
            answer = self._stub.Notify(notice_to_wire(notice), metadata=self._metadata, timeout=ANSWER_S)
        except (ValueError, grpc.RpcError) as problem:
            log.error("%s is not accepted: %s", notice.kind.value, wire.details_of(problem))
            return ERROR
        if not answer.accepted:
            log.error("%s is not accepted: %s", notice.kind.value, answer.text)
        return OK if answer.accepted else ERROR

    def _notify(
        self,
        kind: mm.NoticeKind,
        faults: Mapping[int, int],
        *,
        seconds: float = 0.0,
        strategy: str = "",
        params: str = "",
    ) -> int:
        try:
            known = tuple(mm.RankFault(Rank(int(rank)), mm.FaultOf(int(what))) for rank, what in faults.items())
        except (AttributeError, TypeError, ValueError):
            text = "%s is not accepted: fault_ranks %r has to be {rank: 0 (memory), 1 (process) or 2 (network)}"
            log.error(text, kind.value, faults)
            return ERROR
        return self.notify(mm.Notice(kind, known, seconds, strategy, params))

    # ---------------------------------------------------------------------------------------------------------- attend

    def _attend(self) -> None:
        while not self._closed.is_set():
            try:
                self._call = call = self._stub.Attend(pb.AttendRequest(wait_s=self._wait_s), metadata=self._metadata)
                if ATTACHED in call.initial_metadata():
                    self._attached.set()
                for message in call:
                    self._take(message)
            except grpc.RpcError as problem:
                if not self._closed.is_set():
                    log.debug("cannot attach to the controller at %s: %s", self._where, problem)
            except Exception:  # try again, whatever happened
                log.exception("an error in the thread that serves the manager")
            self._attached.clear()
            if not self._closed.wait(RETRY_S):
                try:
                    self._look_for_another()
                except ConfigError as problem:  # the files of a certificate are being renewed
                    log.warning("cannot connect to another controller: %s", problem)

    def _look_for_another(self) -> None:
        """Look for the leading controller after the connection was lost, as another one may have taken over."""
        around = places(self._run_dir, self._home) if self._run_dir is not None else ()
        found = reigning(around, self._token) if len(around) > 1 else None
        if found is None or self._closed.is_set() or found[0] == self._where:
            return
        lost, self._channel = self._channel, wire.open_channel(*split(found[0]))
        self._where, self._stub = found[0], rpc.ManagerStub(self._channel)
        lost.close()

    def _take(self, message: pb.ManagerCall) -> None:
        try:
            call = call_from_wire(message)
            self._callbacks[call.kind](call)
        except WireError as problem:
            log.warning("cannot parse a message of the controller: %s", problem)
        except Exception:
            log.exception("the callback for %s failed: the controller decides by itself", message.what)
            self._notify(mm.NoticeKind.FAILED, {})


def _ranks(call: mm.ManagerCall) -> Faults:
    return {int(fault.rank): int(fault.kind) for fault in call.faults}
