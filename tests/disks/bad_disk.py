r"""A disk that fails on command: real system calls, through the kernel, into a directory.

```python
with BadDisk(mountpoint, directory) as disk:
    disk.rules(Rule(("WRITE",), name=r"\.distcp$", skip=3, error=errno.ENOSPC))
```

Needs ``/dev/fuse`` and the right to mount (root, or a container with CAP_SYS_ADMIN); ``why_not`` says what is missing.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import msgpack

from tests.disks import fuse_wire as wire
from tests.disks.fuse_server import Rule

__all__ = ["BadDisk", "Rule", "why_not"]

HIT_S = 60.0
"""How long a rule may take to hit a request."""


class BadDisk:
    """A mounted file system that fails by rules. It is unmounted when the context ends or this process dies.

    Args:
        mountpoint: made if it does not exist.
        directory: the directory with the bytes; likewise.
        journal: record every change, see ``tests.disks.crash``.
        writeback: let the kernel keep written data until it is synced, as most file systems do.

    Raises:
        OSError: it cannot be mounted.
    """

    def __init__(self, mountpoint: Path, directory: Path, *, journal: bool = False, writeback: bool = False) -> None:
        self.mountpoint, self.directory = mountpoint, directory
        for made in (mountpoint, directory):
            made.mkdir(parents=True, exist_ok=True)
        options = ["--journal"] * journal + ["--writeback"] * writeback
        self._lock = threading.Lock()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.disks.fuse_server", str(mountpoint), str(directory), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            start_new_session=True,  # ^C is for the test
        )
        try:
            self._reply()
            self._teach()
        except BaseException:
            self.close()
            raise

    def _teach(self) -> None:
        """Close a file once, so that the kernel learns that FLUSH is not supported; see ``fuse_wire.OPCODES``."""
        probe = self.mountpoint / ".bad-disk"
        probe.touch()
        probe.unlink()
        self._ask("begin")

    def rules(self, *rules: Rule) -> None:
        """Set the rules; the first that fits a request applies. Without rules nothing fails."""
        self._ask("rules", [asdict(rule) for rule in rules])

    def hits(self) -> list[int]:
        """Return how many requests each rule has hit."""
        return list(self._ask("hits"))

    def wait_hit(self) -> None:
        """Wait until a rule has hit a request.

        Raises:
            TimeoutError: none has within ``HIT_S``.
        """
        deadline = time.monotonic() + HIT_S
        while not any(self.hits()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing has met a rule of the bad disk within {HIT_S:g} s")
            time.sleep(0.01)

    def thaw(self) -> None:
        """Let a mount that hangs go on."""
        self._ask("thaw")

    def mark(self, text: str) -> None:
        """Add a line of text to the journal."""
        self._ask("mark", text)

    def journal(self) -> list[list[Any]]:
        """Return all changes so far, in order."""
        with tempfile.NamedTemporaryFile() as file:
            self._ask("journal", file.name)
            read: list[list[Any]] = msgpack.unpackb(Path(file.name).read_bytes())
        return read

    def die(self) -> None:
        """End the server and keep the mount: every access fails with ENOTCONN."""
        self._ask("die", None)
        self._server.wait()

    def vanish(self) -> None:
        """Unmount as ``umount -l`` does: the path is the empty directory below, and open files fail with ENOTCONN."""
        self.close()

    def close(self) -> None:
        """Unmount, even if processes still wait for it."""
        with contextlib.suppress(OSError):
            assert self._server.stdin is not None and self._server.stdout is not None
            self._server.stdin.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()
        wire.unmount(self.mountpoint)  # it has done so itself, unless it died

    def __enter__(self) -> BadDisk:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, verb: str, argument: Any = None) -> Any:
        with self._lock:
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps({verb: argument}) + "\n")
            self._server.stdin.flush()
            return self._reply()

    def _reply(self) -> Any:
        assert self._server.stdout is not None
        answer = json.loads(self._server.stdout.readline() or '{"problem": "the server of the bad disk has ended"}')
        if "problem" in answer:
            raise OSError(answer["problem"])
        return answer["done"]


def why_not() -> str:
    """Return why this machine cannot have a ``BadDisk``; empty: it can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with BadDisk(Path(folder, "mount"), Path(folder, "directory")):
                return ""
        except OSError as problem:
            return f"no FUSE file system can be mounted here: {problem}"
