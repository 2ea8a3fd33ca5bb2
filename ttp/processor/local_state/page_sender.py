"""Sends the page of this rank to the rank of another host that keeps it; see ``ttp.core.controller.mirrors``."""

from __future__ import annotations

import contextlib
import logging
import threading

import grpc

from ttp.core.copy_messages import MirrorTo
from ttp.core.layout import Rank
from ttp.wire import tls
from ttp.wire.channel import CLIENT_OPTIONS, details_of, metadata
from ttp.wire.v1 import buddy_pb2 as pb
from ttp.wire.v1 import buddy_pb2_grpc as rpc

log = logging.getLogger("ttp.processor")

SEND_S = 5.0
"""Seconds after which sending a page is given up: by then a newer page waits to be sent."""


class PageSender:
    """Sends the pages of one rank, one at a time.

    Args:
        rank: rank whose pages they are.
        token: shared secret of the job; may be empty.
        run_id: the job.
    """

    def __init__(self, rank: Rank, token: str, run_id: str) -> None:
        self._rank, self._token, self._run_id = rank, token, run_id
        self._order: MirrorTo | None = None
        self._address = ""
        self._channel: grpc.Channel | None = None
        self._lock = threading.Lock()
        self._well = True

    def named(self, order: MirrorTo) -> None:
        """Send pages from now on to the keeper that the order names. Does not block."""
        if self._order is None:
            log.info("the page of rank %s is mirrored to rank %s at %s", self._rank, order.keeper, order.address)
        self._order = order

    def send(self, version: int, final: bool, incarnation: int, data: bytes) -> None:
        """Send a page. Returns when it is kept, or was given up. For one thread, that of ``PageMirror``."""
        order = self._order
        if order is None:
            return  # the controller names a keeper only when all ranks have joined
        try:
            refused = self._call(order, version, final, incarnation, data)
        except grpc.RpcError as problem:
            refused = details_of(problem)
        except ValueError:
            return  # closed meanwhile
        if refused and self._well:
            log.warning("rank %s at %s did not store the page of this rank: %s", order.keeper, order.address, refused)
        self._well = not refused

    def _call(self, order: MirrorTo, version: int, final: bool, incarnation: int, data: bytes) -> str:
        request = pb.KeepRequest(
            of=self._rank,
            keeper=order.keeper,
            version=version,
            final=final,
            incarnation=incarnation,
            run_id=self._run_id,
            data=data,
        )
        call = rpc.BuddyStub(self._open(order.address)).Keep
        response: pb.KeepResponse = call(request, metadata=metadata(self._token), timeout=SEND_S)
        return response.refused

    def _open(self, address: str) -> grpc.Channel:
        with self._lock:
            if self._channel is None or address != self._address:
                if self._channel is not None:
                    self._channel.close()
                self._channel, self._address = tls.open_channel(address, CLIENT_OPTIONS), address
            return self._channel

    def close(self) -> None:
        """Stop sending; a page that is being sent is given up."""
        with self._lock, contextlib.suppress(Exception):
            if self._channel is not None:
                self._channel.close()
