"""Sends copies to the memory of another host, and receives those of other hosts.

Copies go straight from rank to rank, and not through the controller, which must stay free of gigabytes of data. A
receiver takes one copy at a time, in chunks of 1 MiB. It verifies every digest before the copy counts as existing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import grpc

from ttp.config import Config
from ttp.core.copy_messages import Keep
from ttp.core.layout import Rank, Version
from ttp.core.replication import NOBODY
from ttp.errors import CheckpointError
from ttp.processor.copies.store import INDEX, Copy, CopyStore, NoRoomError, pieces_of, plain_name
from ttp.processor.local_state.mirror import PAGE_BYTES_MAX
from ttp.store.digest import HashingFile
from ttp.store.plain_file import chunks
from ttp.wire import access, tls
from ttp.wire.address import target
from ttp.wire.channel import CLIENT_OPTIONS, SERVER_OPTIONS, details_of, metadata
from ttp.wire.v1 import buddy_pb2 as pb
from ttp.wire.v1 import buddy_pb2_grpc as rpc

log = logging.getLogger("ttp.processor")

SEND_S = 600.0
"""Seconds after which sending a copy is given up."""
MESSAGE_BYTES_MAX = PAGE_BYTES_MAX + (1 << 20)
THREADS = 64
"""Largest number of threads of the server; they are made when they are needed. Copies are received one after the other,
and each that waits for its turn has a thread. Pages do not wait for copies unless so many ranks have one buddy.
"""
FILES_MAX = 10_000
CLOSE_S = 1.0


class SendError(Exception):
    """The copy was not delivered."""


class Sender:
    """Sends copies to one receiver.

    Args:
        address: host:port of the buddy.
        token: shared secret of the job; may be empty.
        run_id: the job.
    """

    def __init__(self, address: str, token: str, run_id: str) -> None:
        self.address = address
        self._token, self._run_id = token, run_id
        self._channel = tls.open_channel(address, CLIENT_OPTIONS)

    def send(
        self,
        copy: Copy,
        rank: Rank,
        version: Version,
        incarnation: int,
        *,
        keep: Collection[Version],
        cancelled: Callable[[], None],
    ) -> None:
        """Send a copy, and return when the buddy has stored it whole.

        Args:
            copy: the copy to send.
            rank: the rank that it belongs to.
            version: its version.
            incarnation: launch of the job.
            keep: versions of this rank that the buddy still has to keep.
            cancelled: called between the chunks; raises to give up.

        Raises:
            SendError: the buddy refused it, or cannot be reached.
        """
        begin = pb.StoreBegin(of=rank, version=version, incarnation=incarnation, run_id=self._run_id, keep=keep)
        given_up: list[Exception] = []
        calling = threading.Event()

        def requests() -> Iterator[pb.StoreRequest]:
            try:
                yield from _requests(copy, begin, cancelled)
            except Exception as problem:  # grpc would print it
                given_up.append(problem)
                calling.wait()
                call.cancel()

        call = rpc.BuddyStub(self._channel).Store.future(requests(), metadata=metadata(self._token), timeout=SEND_S)
        calling.set()
        try:
            call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as problem:
            if given_up:
                raise given_up[0] from None
            text = f"the buddy at {self.address} did not accept the copy: {details_of(problem)}"
            raise SendError(text) from None

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def _requests(copy: Copy, begin: pb.StoreBegin, cancelled: Callable[[], None]) -> Iterator[pb.StoreRequest]:
    """Yield the messages that send a copy: its description, then each file and its bytes, the index last."""
    files = [(piece.file, piece.size) for piece in copy.pieces]
    files.append((INDEX, (copy.path / INDEX).stat().st_size))
    begin.size = sum(size for _, size in files)
    yield pb.StoreRequest(begin=begin)
    for name, size in files:
        yield pb.StoreRequest(file=pb.StoreFile(name=name, size=size))
        for chunk in chunks(copy.path / name):
            cancelled()
            yield pb.StoreRequest(data=bytes(chunk))


class Receiver(rpc.BuddyServicer):
    """Receives copies from ranks of other hosts.

    Args:
        config: where to listen, and which credentials a caller needs.
        run_id: the job.

    Raises:
        RuntimeError: no port is free.
        ConfigError: strangers could be served; see ``ttp.wire.access``.
    """

    def __init__(self, config: Config, run_id: str) -> None:
        self._run_id = run_id
        self.store: CopyStore | None = None
        """The store of the copies; None: this rank has not joined yet."""
        self.rank = NOBODY
        """Number of this rank, whose own copies are not to be written from outside."""
        self.keep: Callable[[Keep], str] | None = None
        """Stores a page of another host's rank and returns why not, or empty; None: this rank keeps no pages."""
        self.frozen = False
        """True while the kept copies are being inspected: none is added or removed."""
        self._one_copy = threading.Lock()
        options = [(k, v) for k, v in SERVER_OPTIONS if k != "grpc.max_receive_message_length"]
        self._server = grpc.server(
            concurrent.futures.ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="ttp-buddy-take"),
            options=[*options, ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)],
            interceptors=access.guards(config),
        )
        rpc.add_BuddyServicer_to_server(self, self._server)
        self.port = tls.add_port(self._server, target(access.listening_address(config), 0))
        self._server.start()

    def close(self) -> None:
        """Stop receiving."""
        self._server.stop(grace=None).wait(CLOSE_S)

    def Store(  # noqa: N802 - as the proto calls it
        self, request_iterator: Iterator[pb.StoreRequest], context: Any
    ) -> pb.StoreResponse:
        """See ``Buddy.Store`` in the proto."""
        try:
            with self._one_copy:
                self._take(request_iterator)
        except NoRoomError as problem:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(problem))
        except (CheckpointError, OSError) as problem:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(problem))
        return pb.StoreResponse()

    def Keep(self, request: pb.KeepRequest, context: Any) -> pb.KeepResponse:  # noqa: N802 - as the proto calls it
        """See ``Buddy.Keep`` in the proto."""
        if self.keep is None or request.run_id != self._run_id:
            return pb.KeepResponse(refused="the page is of another job, or this rank stores no pages")
        keep = Keep(
            Rank(request.keeper),
            0,
            Rank(request.of),
            Version(request.version),
            request.final,
            request.incarnation,
            request.data,
        )
        return pb.KeepResponse(refused=self.keep(keep))

    def _take(self, requests: Iterator[pb.StoreRequest]) -> None:
        first = next(requests, None)
        if first is None or first.WhichOneof("part") != "begin":
            raise CheckpointError("the first message of a copy must say which rank and version it is of")
        begin, store = first.begin, self.store
        if store is None or (begin.run_id, begin.incarnation) != (self._run_id, store.incarnation):
            raise CheckpointError("the copy is of another job or another launch, or this rank has not joined yet")
        self._check_frozen()
        rank, version = Rank(begin.of), Version(begin.version)
        if rank == self.rank:
            raise CheckpointError(f"rank {rank} keeps its own copies itself")
        store.drop_others(rank, set(begin.keep))
        store.check_room(begin.size)
        draft = store.begin(rank, version)
        try:
            found = self._receive(requests, draft, begin.size)
            _verify(draft, rank, version, found)
            self._check_frozen()
            store.publish(draft, rank, version)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _receive(self, requests: Iterator[pb.StoreRequest], draft: Path, size: int) -> dict[str, tuple[int, str]]:
        """Write the received files; returns size and digest of each."""
        found: dict[str, tuple[int, str]] = {}
        writer: HashingFile | None = None
        left = size
        try:
            for request in requests:
                if request.WhichOneof("part") == "file":
                    if writer is not None:
                        found[writer.path.name] = writer.sync_and_close()
                    writer = _open(draft, request.file.name, len(found))
                    self._check_frozen()
                elif writer is not None and len(request.data) <= left:
                    left -= writer.write(request.data)
                else:
                    raise CheckpointError("the sender sent more bytes than it announced")
            if writer is not None:
                found[writer.path.name] = writer.sync_and_close()
        finally:
            if writer is not None:
                with contextlib.suppress(OSError):
                    writer.close()
        return found

    def _check_frozen(self) -> None:
        if self.frozen:
            raise CheckpointError("the job is frozen")


def _open(draft: Path, name: str, count: int) -> HashingFile:
    if not plain_name(name) or (draft / name).exists() or count >= FILES_MAX:
        raise CheckpointError(f"{name!r:.80} is not a valid name for a file of a copy")
    return HashingFile(draft / name)


def _verify(draft: Path, rank: Rank, version: Version, found: dict[str, tuple[int, str]]) -> None:
    promised = {piece.file: (piece.size, piece.digest) for piece in pieces_of(draft, rank, version)}
    arrived = {name: what for name, what in found.items() if name != INDEX}
    if promised != arrived:
        wrong = sorted(promised.items() ^ arrived.items())
        raise CheckpointError(f"{wrong[0][0]!r:.80} does not have the size and digest in its index")


def open_receiver(config: Config, run_id: str, *, copies: bool) -> Receiver | None:
    """Start to receive copies and pages of other ranks, if that is configured and possible; otherwise return None.

    Args:
        config: the job's settings.
        run_id: the job.
        copies: whether shards are copied; ``config.mirror`` says whether pages are.
    """
    if not (copies or config.mirror):
        return None
    try:
        return Receiver(config, run_id)
    except Exception as problem:
        what = "buddy=True: no copies can be kept, and shards without replicas are UNPROTECTED"
        log.error("%s: %s", what if copies else "TTP_MIRROR: this rank cannot store pages of other hosts", problem)
        return None
