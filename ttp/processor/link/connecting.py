"""Connects a rank to a controller: starts one if it has to, opens the stream, and says why that fails."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from ttp.aside import aside
from ttp.config import Config, RankEnv
from ttp.core import messages as m
from ttp.core.rank import actions as act
from ttp.core.rank import events as ev
from ttp.errors import ConfigError
from ttp.launch.controller_process import ensure_controller
from ttp.launch.presence import is_local
from ttp.launch.ring import Ring, write_ring
from ttp.processor.joining import JOIN_PATIENCE_S, Joining
from ttp.processor.link.relay_choice import RelayChoice
from ttp.processor.link.second import SecondStream
from ttp.processor.link.stream import Stream
from ttp.wire import tls
from ttp.wire.address import split, target
from ttp.wire.sockets import Sockets, peers

log = logging.getLogger("ttp.processor")


class ControllerLink:
    """Opens, uses and closes the stream to the controller that leads.

    Args:
        config: the job's settings.
        env: identity of this rank.
        put: takes the events of the stream; called on any thread.
        joining: knows whether this rank belongs to the job; takes problems that no retry can mend.
        over: returns whether the stream is no longer needed.
    """

    def __init__(
        self,
        config: Config,
        env: RankEnv,
        put: Callable[[ev.Event], None],
        joining: Joining,
        over: Callable[[], bool],
    ) -> None:
        self._config, self._env, self._run_dir = config, env, config.resolved_run_dir()
        self._put, self._joining, self._over = put, joining, over
        self._lock = threading.Lock()  # other threads may still connect while ``finish`` is called
        self._finished = False
        self._stream: Stream | None = None
        self._relay_choice = RelayChoice(config, env)
        self._second = SecondStream(config.token, put, self._relay_choice.port)
        self._sockets = Sockets()
        self._peers: tuple[str, ...] = ()
        """Addresses of the controller's end of the stream; empty if the stream goes through the relay."""
        self._relayed = False
        self._said: set[str] = set()
        """The problems that were logged since there was a stream."""

    def perform(self, action: act.LinkAction) -> None:
        """Carry out an action of the machine on the streams. Does not wait for a network."""
        match action:
            case act.Send(report):
                if self._stream is not None:
                    self._stream.send(report)
                    if self._relayed and isinstance(report, m.Heartbeat) and self._relay_choice.stands_still():
                        aside("ttp-connect", self._stream.abort)  # the machine then opens another one
            case act.Connect():
                aside("ttp-connect", lambda: self.connect(action))
            case act.LookAtController():
                if self._relayed and self._stream is not None:
                    self._stream.ask(lambda silent_s: self._put(ev.Looked(silent_s)))
                else:
                    self._put(ev.Looked(self._sockets.heard_of(self._peers)))
            case act.ConnectAside() | act.SendAside() | act.CloseAside():
                with self._lock:
                    if not self._finished:
                        self._second.perform(action)

    def finish(self, timeout_s: float) -> None:
        """Send the queued reports, for at most ``timeout_s`` seconds, and close the stream. None is opened later."""
        with self._lock:
            self._finished, stream = True, self._stream
        if stream is not None:
            stream.finish(timeout_s=timeout_s)
        self._second.perform(act.CloseAside())
        self._relay_choice.close()

    def connect(self, action: act.Connect) -> None:
        """Open a stream; first start a controller if the action says so, which may take as long as its start does."""
        try:
            if action.start_controller and self._config.port is not None and is_local(self._env.master_addr):
                ensure_controller(self._env.master_addr, self._config, self._run_dir, patience_s=JOIN_PATIENCE_S)
            self._open(action.address, action.within_s)
        except ConfigError as problem:
            if self._joining.pending():
                self._joining.failed(problem)  # raised in the program
            else:
                self._say(logging.ERROR, str(problem))
            self._put(ev.StreamDown(str(problem)))
        except Exception as problem:
            log.debug("cannot connect", exc_info=True)
            self._put(ev.StreamDown(repr(problem)))

    def note(self, ring: act.NoteRing, incarnation: int) -> None:
        """Write the ring of controllers to the run directory, for the other processes of this host."""
        home = target(self._env.master_addr, self._config.port or 0)
        found = Ring(self._env.run_id, incarnation, ring.term, home, ring.address or home, ring.standbys)
        write_ring(self._run_dir, found)

    def _open(self, address: str, within_s: float | None) -> None:
        """Open a stream to ``address`` (host:port), or else to the controller that the environment names."""
        assert self._config.port is not None
        if self._finished:
            return
        host, port = split(address) if address else (self._env.master_addr, self._config.port)
        if self._stream is not None:
            before, self._stream = self._stream, None
            before.abort()
        relay = self._relay_choice.port()
        self._peers, self._relayed = (), relay is not None
        stream = Stream(
            host,
            port,
            self._config.token,
            on_up=lambda: self._on_up(host, port, relayed=relay is not None),
            on_order=lambda order: self._put(ev.OrderReceived(order)),
            on_down=lambda reason: self._on_down(reason, relay if self._stream is stream else None),
            within_s=within_s,
            relay=relay,
        )
        with self._lock:
            if self._finished:
                stream.abort()
                return
            self._stream = stream
        stream.start()

    def _say(self, level: int, text: str) -> None:
        """Log a problem, once until there is a stream again: the next attempt is made in seconds."""
        log.log(logging.DEBUG if text in self._said else level, "%s", text)
        self._said.add(text)

    def _on_up(self, host: str, port: int, *, relayed: bool) -> None:
        self._said.clear()
        self._put(ev.StreamUp())
        stream = self._stream

        def look() -> None:
            found = peers(host, port)  # may take as long as the name service does, and the reader has orders to read
            if self._stream is stream:
                self._peers = found

        if not relayed:
            with contextlib.suppress(RuntimeError):  # no thread can be started: nobody stands in for this controller
                aside("ttp-peers", look)

    def _on_down(self, reason: str, relay: int | None) -> None:
        if relay is not None:
            self._relay_choice.ended(relay, reason)
        if not self._over():
            level = logging.DEBUG if self._joining.pending() else logging.WARNING
            self._say(level, f"stream to the controller ended: {reason}; this rank connects again")
        if reason.startswith(("UNAUTHENTICATED", "FAILED_PRECONDITION")) and self._joining.pending():
            self._joining.failed(
                ConfigError(f"the controller at {self._env.master_addr}:{self._config.port}: {reason}")
            )
        self._put(ev.StreamDown(reason))  # first: the diagnosis may fail
        self._complain_of_encryption(reason)

    def _complain_of_encryption(self, reason: str) -> None:
        """Fail to join, before the job has formed, if one side speaks TLS and the other does not: no retry helps."""
        if not self._joining.pending() or self._over() or not reason.startswith("UNAVAILABLE"):
            return
        problem = tls.diagnose(self._env.master_addr, self._config.port or 0, reason)
        if problem is not None:
            self._joining.failed(ConfigError(problem))
