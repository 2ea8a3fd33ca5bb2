"""A barrier of all ranks between the reduced gradients and the update, for layouts of several slices.

With one slice, any replica can save the whole state, and no barrier is needed. With several slices, the ranks of one
slice could begin an update whose gradients the ranks of another slice never get; then no version is whole in every
slice (docs/concepts.md). After the barrier every rank holds its final gradients.

A rank cannot leave a collective of MindSpore that hangs. It holds its gradients there, but can neither make the update
(redo) nor report that it could. So the ranks meet over gRPC streams of their own, and look at the gate while they wait.
A rank that is frozen in the barrier counts as standing at the gate, and the controller may order it to make the update
without the other ranks. A rank that finds a peer gone reports this, and waits for the same order.

The barrier is a dissemination barrier (Hensgen, Finkel, Manber 1988): in round k a rank sends to the rank 2^k after it,
and waits for a message of the rank 2^k before it. A rank that has received a message in every round knows that all
ranks have arrived. Each rank sends log2(ranks) small messages.

The streams have the same access checks as every service of the job (``ttp.wire.access``). In addition, a caller has to
know the secret that the called rank gave to the other ranks in this launch: ranks of an older launch are refused.
"""

from __future__ import annotations

import concurrent.futures
import queue
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import grpc

from ttp.config import Config
from ttp.core.messages import FaultKind
from ttp.errors import ConfigError, ToldAs
from ttp.inbox import Inbox
from ttp.polling import poll
from ttp.processor.gate.gate import Gate
from ttp.wire import access, tls
from ttp.wire.address import target
from ttp.wire.channel import CLIENT_OPTIONS, SERVER_OPTIONS, metadata
from ttp.wire.v1 import barrier_pb2 as pb
from ttp.wire.v1 import barrier_pb2_grpc as rpc

LOOK_MS = 1
"""Milliseconds between two looks at the gate while no message arrives."""
FREEZE_S = 30.0
"""Seconds that a rank waits for a freeze after its barrier broke. Longer than a failover to a standby controller."""
CONNECT_S = 120.0
"""Seconds that ranks may take to connect to each other after they have exchanged their addresses."""
SPARE_THREADS = 8
"""Threads of the service in addition to one per peer, for callers that are refused."""
GONE = "a rank is gone"

_RECORD = struct.Struct("!64sH16s")
"""The record that ranks exchange: host, port, and the secret that callers of this rank have to send."""

Gather = Callable[[bytes], Sequence[bytes]]
"""A collective function that takes this rank's record and returns the records of all ranks, in the order of ranks."""


class Frozen(Protocol):
    """The part of the processor that the barrier uses."""

    gate: Gate

    def report(self, kind: FaultKind, text: str, detail: str = "") -> None:
        """Report to the controller a fault that stops this rank."""


class UpdateBarrier:
    """The barrier before an update. All ranks construct it at the same point of their programs.

    Args:
        rank: this rank.
        world_size: number of ranks of the job; all of them take part.
        host: address of this host for the other ranks.
        processor: the processor of this rank.
        gather: see ``Gather``.
        config: gives the address at which this rank listens, and the token and certificates that callers need.

    Raises:
        ConfigError: the ranks cannot reach each other; the message says what to check.
    """

    def __init__(
        self, rank: int, world_size: int, host: str, processor: Frozen, gather: Gather, config: Config
    ) -> None:
        if not host or len(host.encode()) > 64:
            raise ConfigError(
                f"this host does not know its own address ({host!r:.80}): set TTP_ADDRESS to an address that the other "
                "hosts reach"
            )
        self._rank, self._processor = rank, processor
        self._count = self._told = 0
        strides = [1 << place for place in range((world_size - 1).bit_length())]
        behind = [(rank + stride) % world_size for stride in strides]
        before = [(rank - stride) % world_size for stride in strides]
        self._to: list[_Told] = []
        self._from = _Heard(before, config)
        try:
            mine = _RECORD.pack(host.encode(), self._from.port, self._from.secret)
            told = [_RECORD.unpack(record) for record in gather(mine)]
            deadline = time.monotonic() + CONNECT_S
            for peer in behind:
                where, port, secret = told[peer]
                self._to.append(_Told(rank, peer, where, port, secret, config, deadline))
            self._wait_for_all(before, behind, deadline)
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Return when every rank holds its final gradients, or when the controller orders this rank to update alone.

        Raises:
            RuntimeError: a rank is gone, and no freeze came in ``FREEZE_S`` seconds. A collective would raise this too.
        """
        gate = self._processor.gate
        self._count, self._told = self._count + 1, 0
        with gate.nearby():
            try:
                if self._meet(gate):
                    return
            except (OSError, EOFError) as problem:
                text = f"the barrier before the update broke: {problem}"
                if not self._rescued(text):
                    raise RuntimeError(text) from problem
        self._leave()

    def close(self) -> None:
        """Close the streams. Ranks that arrive at the barrier later find it broken."""
        for told in self._to:
            told.close()
        self._from.close()

    # --------------------------------------------------------------------------------------------------- the meeting

    def _meet(self, gate: Gate) -> bool:
        """Return True when all ranks have arrived, False if the controller orders this rank to update without them."""
        for source in self._from.sources.values():
            self._tell()
            if not self._hears(source, gate):
                return False
        return True

    def _tell(self) -> None:
        self._told += 1
        self._to[self._told - 1].say(self._count)

    def _leave(self) -> None:
        """Send the remaining messages after leaving early: if training continues, the peers need them to update too."""
        while self._told < len(self._to):
            with suppress(EOFError):
                self._tell()

    def _hears(self, source: _Source, gate: Gate) -> bool:
        """Return True when the peer has arrived, False if the controller orders this rank to update without it.

        Raises:
            EOFError: the peer is gone, or is at another update.
        """
        count = 0
        while count < self._count:  # skip messages for barriers that this rank has left early
            try:
                count = source.next(LOOK_MS / 1000)
            except queue.Empty:
                if gate.closed and gate.stand_aside():
                    return False
        if count > self._count:
            raise EOFError(f"rank {self._rank} is at its update {self._count}, and a peer at {count}")
        return True

    def _rescued(self, text: str) -> bool:
        """Report the broken barrier and wait for the freeze. Return whether the controller orders the update anyway."""
        self._processor.report(FaultKind.COLLECTIVE, text)
        gate = self._processor.gate
        return poll(lambda: gate.closed, FREEZE_S, LOOK_MS / 1000) and gate.stand_aside()

    # ------------------------------------------------------------------------------------------------------- connecting

    def _wait_for_all(self, before: Sequence[int], behind: Sequence[int], deadline: float) -> None:
        """Wait until each peer has connected to this rank; raise ConfigError if one refuses this rank or is late."""
        while missing := [peer for peer in before if not self._from.sources[peer].here]:
            for peer, told in zip(behind, self._to, strict=True):
                if told.problem:
                    raise ConfigError(f"rank {peer} does not let rank {self._rank} into the barrier: {told.problem}")
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"rank {missing[0]} did not connect to rank {self._rank} within {CONNECT_S:g} s for the barrier "
                    "before each update: open the ports between the hosts, or set TTP_ADDRESS"
                )
            time.sleep(LOOK_MS / 1000)


class _Told:
    """The stream on which this rank tells one peer that it has arrived.

    Raises:
        ConfigError: the peer cannot be reached.
    """

    def __init__(
        self, rank: int, peer: int, host: bytes, port: int, secret: bytes, config: Config, deadline: float
    ) -> None:
        where = host.rstrip(b"\0").decode()
        self._outbox: Inbox[pb.Arrival | None] = Inbox()
        self._outbox.put(pb.Arrival(rank=rank, secret=secret))
        self._channel = tls.open_channel(target(where, port), CLIENT_OPTIONS)
        try:
            grpc.channel_ready_future(self._channel).result(max(0.001, deadline - time.monotonic()))
        except grpc.FutureTimeoutError:
            self._channel.close()
            why = tls.diagnose(where, port, "") or "it does not answer"
            raise ConfigError(
                f"rank {rank} cannot reach rank {peer} at {where} port {port} for the barrier before each "
                f"update ({why}): open the ports between the hosts, set TTP_ADDRESS, or wrap the optimizer with "
                'undo="preimage", which needs no barrier'
            ) from None
        arrivals = iter(self._outbox.get, None)
        self._call = rpc.BarrierStub(self._channel).Come.future(arrivals, metadata=metadata(config.token))

    @property
    def problem(self) -> str:
        """The reason why the stream to the peer has ended; empty: it is open."""
        if not self._call.done():
            return ""
        return (self._call.details() or "") if not self._call.cancelled() else "the barrier was closed"

    def say(self, count: int) -> None:
        """Tell the peer that this rank has arrived at the update number ``count``.

        Raises:
            EOFError: the peer is gone.
        """
        if self._call.done():
            raise EOFError(GONE)
        self._outbox.put(pb.Arrival(update=count))

    def close(self) -> None:
        """End the stream."""
        self._call.cancel()
        self._outbox.put(None)
        self._channel.close()


class _Source:
    """The messages from one peer, received by ``_Heard`` and read by the training thread."""

    def __init__(self) -> None:
        self.here = False
        self._counts: Inbox[int | None] = Inbox()

    def put(self, count: int | None) -> None:
        """Note that the peer has arrived at the update number ``count``; None: the peer is gone."""
        self._counts.put(count)

    def next(self, timeout_s: float) -> int:
        """Return the next number of an update at which the peer has arrived; wait up to ``timeout_s`` seconds.

        Raises:
            queue.Empty: no message arrived in time.
            EOFError: the peer is gone.
        """
        count = self._counts.get(timeout=timeout_s)
        if count is None:
            self._counts.put(None)  # so that later calls raise too
            raise EOFError(GONE)
        return count


class _Heard(rpc.BarrierServicer):
    """The gRPC service at which peers tell this rank that they have arrived.

    Raises:
        ConfigError: this rank cannot listen.
    """

    def __init__(self, peers: Sequence[int], config: Config) -> None:
        self.secret = secrets.token_bytes(16)
        self.sources = {peer: _Source() for peer in peers}
        threads = concurrent.futures.ThreadPoolExecutor(len(peers) + SPARE_THREADS, thread_name_prefix="ttp-barrier")
        self._server = grpc.server(threads, options=SERVER_OPTIONS, interceptors=access.guards(config))
        rpc.add_BarrierServicer_to_server(self, self._server)
        bind = access.listening_address(config)
        with ToldAs(ConfigError, f"this rank cannot listen at {bind} for the barrier before each update", RuntimeError):
            self.port = tls.add_port(self._server, target(bind, 0))
        self._server.start()

    def Come(self, request_iterator: Iterator[pb.Arrival], context: Any) -> pb.BarrierOver:
        """Serve the stream of one peer; see the proto."""
        first = next(request_iterator, pb.Arrival())
        source = self.sources.get(first.rank)
        if not secrets.compare_digest(first.secret, self.secret) or source is None or source.here:
            context.abort(
                grpc.StatusCode.PERMISSION_DENIED, "the caller is not the peer that this rank expects, of this launch"
            )
            raise AssertionError
        source.here = True
        try:
            for arrival in request_iterator:
                source.put(arrival.update)
        except grpc.RpcError:
            pass  # the peer is gone
        finally:
            source.put(None)
        return pb.BarrierOver()

    def close(self) -> None:
        """Stop the service."""
        self._server.stop(grace=None)
