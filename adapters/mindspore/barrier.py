"""A barrier of all ranks between the reduced gradients and the update, for layouts of several slices.

With one slice any replica will do, and no barrier is needed. With several, the ranks of one slice could begin an update
whose gradients those of another never get; then no version is whole in every slice (docs/concepts.md). Behind the
barrier every rank holds its final gradients.

A collective of MindSpore cannot be left once it hangs, and whoever hangs there with its gradients can neither make the
update (redo) nor say that it could. So ranks meet over sockets of their own, and look at the gate while they wait: who
is frozen stands at the gate there, and may be told to make the update without the others. Who hears that a peer is gone
reports it and does the same.

The meeting is a dissemination barrier: in round k a rank tells the one 2^k behind it, and hears from the one 2^k before
it. Whoever has heard in every round knows that all have come; that takes log2(ranks) messages of eight bytes from each.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from ttp.core.messages import FaultKind
from ttp.errors import ConfigError
from ttp.processor.gate import Gate

LOOK_MS = 1
"""Between two looks at the gate while nothing is heard."""
FREEZE_S = 30.0
"""How long a rank whose barrier broke waits to be frozen. Outlasts the loss of a controller."""
CONNECT_S = 120.0
"""How long ranks that have told their addresses may take to connect."""

HELLO_S = 10.0
"""How long whoever has connected may take to say who it is; strangers may say nothing, and others wait behind them."""

_RECORD = struct.Struct("!64sH16s")
"""Host, port, and what is to be said there."""
_HELLO = struct.Struct("!16sI")
_COUNT = struct.Struct("!Q")

Gather = Callable[[bytes], Sequence[bytes]]
"""What every rank gives, in the order of the ranks; all of them call it at the same time."""


class Frozen(Protocol):
    """The processor, as the barrier needs it."""

    gate: Gate

    def report(self, kind: FaultKind, text: str, detail: str = "") -> None:
        """This rank cannot train on."""


class UpdateBarrier:
    """To be made by all ranks at the same point of their programs.

    Args:
        rank: this one.
        world_size: ranks of the job; all of them take part.
        host: address of this host for the others.
        processor: of this rank.
        gather: see ``Gather``.

    Raises:
        ConfigError: the ranks cannot reach each other; the text says what to look at.
    """

    def __init__(self, rank: int, world_size: int, host: str, processor: Frozen, gather: Gather) -> None:
        if not host or len(host.encode()) > 64:
            raise ConfigError(f"this host does not know its own address ({host!r:.80}): set TTP_ADDRESS")
        self._rank, self._processor = rank, processor
        self._count = self._told = 0
        self._to: list[socket.socket] = []
        self._from: list[socket.socket] = []
        strides = [1 << place for place in range((world_size - 1).bit_length())]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server(("", 0), family=family, backlog=len(strides) + 8) as listening:
            secret = secrets.token_bytes(16)
            mine = _RECORD.pack(host.encode(), listening.getsockname()[1], secret)
            told = [_RECORD.unpack(record) for record in gather(mine)]
            behind = [(rank + stride) % world_size for stride in strides]
            before = [(rank - stride) % world_size for stride in strides]
            try:
                for peer in behind:
                    self._to.append(self._connect(peer, *told[peer]))
                self._from += self._accept(listening, secret, before)
            except BaseException:
                self.close()
                raise

    def wait(self) -> None:
        """Return when every rank holds its final gradients, or this one is to make the update without them.

        Raises:
            RuntimeError: a rank is gone, and nobody came to the rescue: like any collective of the program.
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
        """Who comes to the barrier later finds it broken."""
        for connection in (*self._to, *self._from):
            connection.close()

    # --------------------------------------------------------------------------------------------------- the meeting

    def _meet(self, gate: Gate) -> bool:
        """Whether all have come; False: this rank is to go on without them."""
        for source in self._from:
            self._tell()
            if not self._hears(source, gate):
                return False
        return True

    def _tell(self) -> None:
        self._told += 1
        self._to[self._told - 1].sendall(_COUNT.pack(self._count))

    def _leave(self) -> None:
        """The update is made without the others; should training go on after all, they are to make it too."""
        while self._told < len(self._to):
            with suppress(OSError):
                self._tell()

    def _hears(self, source: socket.socket, gate: Gate) -> bool:
        """Whether the peer has come; False: this rank is to go on without it."""
        waiting = select.poll()
        waiting.register(source, select.POLLIN)
        count = 0
        while count < self._count:  # what was sent to this rank when it had left is of the past
            while not waiting.poll(LOOK_MS):
                if gate.closed and gate.stand_aside():
                    return False
            (count,) = _COUNT.unpack(_read(source, _COUNT.size))
        if count > self._count:
            raise EOFError(f"rank {self._rank} is at its update {self._count}, and a peer at {count}")
        return True

    def _rescued(self, text: str) -> bool:
        """The barrier broke, the gradients are whole: whether the update is to be made all the same."""
        self._processor.report(FaultKind.COLLECTIVE, text)
        gate, deadline = self._processor.gate, time.monotonic() + FREEZE_S
        while not gate.closed and time.monotonic() < deadline:
            time.sleep(LOOK_MS / 1000)
        return gate.closed and gate.stand_aside()

    # ------------------------------------------------------------------------------------------------- at the beginning

    def _connect(self, peer: int, host: bytes, port: int, secret: bytes) -> socket.socket:
        where = host.rstrip(b"\0").decode(), port
        try:
            connection = socket.create_connection(where, CONNECT_S)
        except OSError as problem:
            raise ConfigError(
                f"rank {self._rank} cannot reach rank {peer} at {where[0]} port {port} for the barrier before each "
                f"update ({problem}): open the ports between the hosts, set TTP_ADDRESS, or wrap the optimizer with "
                'undo="preimage", which needs no barrier'
            ) from problem
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # then the peer misses this rank and says so
            connection.sendall(_HELLO.pack(secret, self._rank))
        return connection

    def _accept(self, listening: socket.socket, secret: bytes, peers: Sequence[int]) -> list[socket.socket]:
        """A connection from each of ``peers``, in their order. Strangers are sent away."""
        found: dict[int, socket.socket] = {}
        deadline = time.monotonic() + CONNECT_S
        while missing := sorted(set(peers) - found.keys()):
            try:
                listening.settimeout(max(0.001, deadline - time.monotonic()))
                connection, _ = listening.accept()
            except TimeoutError:
                for connection in found.values():
                    connection.close()
                raise ConfigError(
                    f"rank {missing[0]} did not connect to rank {self._rank} within {CONNECT_S:g} s for the barrier "
                    "before each update: open the ports between the hosts, or set TTP_ADDRESS"
                ) from None
            try:
                connection.settimeout(min(HELLO_S, max(0.001, deadline - time.monotonic())))
                said, rank = _HELLO.unpack(_read(connection, _HELLO.size))
                connection.settimeout(None)
            except (OSError, EOFError):
                said, rank = b"", -1
            if secrets.compare_digest(said, secret) and rank in missing:
                found[rank] = connection
            else:
                connection.close()
        return [found[peer] for peer in peers]


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError("a rank is gone")
        data += more
    return data
