"""The process behind a ``BadDisk``: ``python -m tests.disks.fuse_server MOUNTPOINT DIRECTORY``.

Commands come on stdin and are answered on stdout, one JSON object per line. When stdin ends the file system is
unmounted, so nothing is left of it however the test ends. One thread does everything: a slow request holds up the
others, as with a slow server.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from tests.disks import fuse_wire as wire
from tests.disks.fuse_tree import Tree
from tests.disks.fuse_wire import Request

FROZEN_MAX_S = 600.0
"""A mount hangs for so long at most, if everybody who could thaw it hangs too."""


@dataclass(slots=True)
class Rule:
    """A failure of requests, and when it happens.

    Args:
        ops: its requests, see ``fuse_wire.OPCODES``; empty: all.
        name: regular expression for the name of the file; empty: any.
        skip: number of matching requests that succeed first.
        times: number of requests that are hit then; None: all.
        error: errno that is answered instead of carrying out the request.
        delay_s: time that the request takes.
        hang: ``op``: this request is never answered, and its process cannot even be killed. ``mount``: it is carried
        out,
            and no later one is until the thaw; as with a lost file server, waiting processes can be killed.
    """

    ops: tuple[str, ...] = ()
    name: str = ""
    skip: int = 0
    times: int | None = None
    error: int = 0
    delay_s: float = 0.0
    hang: str = ""
    hits: int = 0
    seen: int = 0

    def applies(self, op: str, name: str) -> bool:
        """Return whether the rule hits this request. Counts requests that match."""
        if (self.ops and op not in self.ops) or not re.search(self.name, name):
            return False
        self.seen += 1
        hit = self.seen > self.skip and (self.times is None or self.hits < self.times)
        self.hits += hit
        return hit


@dataclass(slots=True)
class Server:
    """Answers the kernel's requests from a directory.

    Args:
        device: descriptor of ``/dev/fuse``.
        tree: the directory.
        writeback: let the kernel keep written data until it is synced, as most file systems do.
    """

    device: int
    tree: Tree
    writeback: bool = False
    rules: list[Rule] = field(default_factory=list)
    frozen: bool = False
    done: bool = False
    died: bool = False
    _buffer: bytearray = field(default_factory=lambda: bytearray(wire.REQUEST_MAX))

    def run(self) -> None:
        """Serve until stdin ends or the mount is gone."""
        while not self.done:
            sources = [sys.stdin.fileno(), *([] if self.frozen else [self.device])]
            ready, _, _ = select.select(sources, [], [], FROZEN_MAX_S if self.frozen else None)
            if not ready:
                self.done = True
            elif sys.stdin.fileno() in ready:
                self._command()
            elif self.device in ready:
                self._request()

    def _command(self) -> None:
        line = sys.stdin.readline()
        if not line:
            self.done = True
            return
        command: dict[str, Any] = json.loads(line)
        verbs: dict[str, Callable[[Any], Any]] = {
            "rules": self._set_rules,
            "thaw": lambda _: setattr(self, "frozen", False),
            "hits": lambda _: [rule.hits for rule in self.rules],
            "mark": lambda text: self.tree.note("mark", text),
            "journal": self._journal,
            "begin": lambda _: self.tree.journal.clear() if self.tree.journal is not None else None,
            "die": self._die,
        }
        ((verb, argument),) = command.items()
        print(json.dumps({"done": verbs[verb](argument)}), flush=True)

    def _set_rules(self, rules: list[dict[str, Any]]) -> None:
        self.rules = [Rule(**rule) for rule in rules]

    def _die(self, _: Any) -> None:
        self.done = self.died = True

    def _journal(self, file: str) -> None:
        """Write the journal so far to its file."""
        Path(file).write_bytes(msgpack.packb(self.tree.journal or []))

    # ------------------------------------------------------------------------------------------------------ requests

    def _request(self) -> None:
        try:
            size = os.readv(self.device, [self._buffer])
        except OSError as problem:
            if problem.errno == errno.ENODEV:  # unmounted
                self.done = True
            elif problem.errno not in (errno.EINTR, errno.ENOENT, errno.EAGAIN):  # ENOENT: the asker was killed
                raise
            return
        self._serve(wire.parse(memoryview(self._buffer)[:size]))

    def _serve(self, request: Request) -> None:
        match request.op:
            case "FORGET":
                self.tree.forget(request.node, request.take("Q")[0])
            case "BATCH_FORGET":
                for at in range(8, 8 + 16 * request.take("I")[0], 16):
                    self.tree.forget(*(int.from_bytes(request.body[i : i + 8], "little") for i in (at, at + 8)))
            case "INTERRUPT":
                pass
            case "INIT":
                self._answer(request, 0, wire.init(request, self.writeback))
            case _:
                self._do(request)

    def _do(self, request: Request) -> None:
        rule = self._rule_for(request)
        if rule is not None:
            time.sleep(rule.delay_s)
            if rule.hang == "op":
                return
            self.frozen = rule.hang == "mount"
            if rule.error:
                self._answer(request, rule.error)
                return
        try:
            self._answer(request, 0, self.tree.handle(request))
        except OSError as problem:
            self._answer(request, problem.errno or errno.EIO)

    def _rule_for(self, request: Request) -> Rule | None:
        if not self.rules:
            return None
        name = self.tree.name_of(request)
        return next((rule for rule in self.rules if rule.applies(request.op, name)), None)

    def _answer(self, request: Request, error: int, payload: bytes = b"") -> None:
        with suppress(FileNotFoundError):  # whoever asked was killed meanwhile
            os.write(self.device, wire.answer(request.unique, error, payload))


def main(mountpoint: str, directory: str, *options: str) -> None:
    """Mount, print that it is mounted, and serve."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    tree = Tree(Path(directory), [] if "--journal" in options else None)
    try:
        device = wire.mount(Path(mountpoint))
    except OSError as problem:
        print(json.dumps({"problem": str(problem)}), flush=True)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    print(json.dumps({"done": None}), flush=True)
    server = Server(device, tree, "--writeback" in options)
    try:
        server.run()
    finally:
        if not server.died:
            wire.unmount(Path(mountpoint))
        os.close(device)  # whoever still waits is told ENOTCONN


if __name__ == "__main__":
    main(*sys.argv[1:])
